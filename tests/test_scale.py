"""Predictions for clusters that are not there, `foveate plan`, and measured links."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from worlds import Worlds

from foveate import cli, costs
from foveate.parallel import hosts, links
from foveate.parallel.plan import plan_parallel
from foveate.parallel.scale import METHODS, Cluster, Workload, generate, sizes, train
from foveate.parallel.shapes import MODELS, find
from foveate.parallel.topology import LINKS, Link, Topology
from foveate.training import measure as kernels
from foveate.training import plan as planning

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
TABLE = costs.load(Path(costs.__file__).parent / "assets" / "kernels_h200_202612.json")
TABLE = replace(TABLE.at(64), absent=frozenset({"fa4 dense", costs.ON_128}))
NODES = Topology(ranks=8, per_node=8, intra=LINKS["nvlink"], inter=LINKS["ib400"])


def test_one_gpus_measured_steps_are_predicted() -> None:
    """Of a Wan-shaped model at 131,072 tokens: its linear rate is from the dense one, the sparse one is predicted."""
    work = Workload(model=find("wan-1.3b"), tokens=131072, kept=0.1, skew=1.0)
    rows = json.loads((RESULTS / "train_step_settings_h200_202612.json").read_text())["summary"][0]
    one = Cluster(gpus=1, topology=NODES, costs=TABLE)
    for method, measured in (("dense ring", rows["dense_s"]), ("foveate", rows["uniform 10 %, drop"]["amortised_s"])):
        step = train(method, work, one)
        assert step is not None
        assert step.recompute == "but attention"
        assert step.exposed_s == step.weights_s == 0
        assert step.seconds == pytest.approx(measured, rel=0.15)


def test_attention_is_what_the_planner_says_and_ours_is_never_slower() -> None:
    work = Workload(model=find("wan-14b"), tokens=131_072, kept=0.05, dense_layers=6, batch=2)
    for gpus in (8, 16):
        cluster = Cluster(gpus=gpus, topology=NODES, costs=TABLE, memory_gib=1e9)
        steps = {method: train(method, work, cluster, 8) for method in METHODS}
        ours = steps["foveate"]
        assert ours is not None
        assert ours.seconds <= min(step.seconds for step in steps.values() if step)
        plan = plan_parallel(work.load(sparse=True), cluster.context(8), TABLE)
        turns = 2 / (gpus // 8)
        assert ours.attention_s + ours.exposed_s == pytest.approx(turns * plan.ms / 1e3)
    assert steps["sparse ulysses"].imbalance > 1.15 > 1.02 > ours.imbalance  # type: ignore[union-attr]


def test_videos_scale_until_links_stop_them_and_reuse_leaves_communication_out() -> None:
    work = Workload(model=find("wan-14b"), tokens=76_000)
    slow = replace(NODES, inter=Link(50.0, 2.0, 2.0))
    fast, bound = (Cluster(gpus=32, topology=links, costs=TABLE) for links in (NODES, slow))
    exact = {name: generate("dense usp", work, cluster) for name, cluster in (("fast", fast), ("slow", bound))}
    assert exact["slow"].seconds > 1.5 * exact["fast"].seconds  # type: ignore[union-attr]
    one, held = generate("dense usp", work, bound), generate("dense usp", work, bound, computed=0.4)
    assert one is not None
    assert held is not None
    assert held.exposed_s == pytest.approx((0.4 + 0.6 * 0.01) * one.exposed_s)
    assert generate("dense ulysses", work, Cluster(gpus=2, topology=NODES, costs=TABLE)).ranks == 2  # type: ignore[union-attr]


def test_what_does_not_fit_says_so_and_recomputing_makes_room() -> None:
    work = Workload(model=find("wan-14b"), tokens=131_072)
    step = train("dense ring", work, Cluster(gpus=8, topology=NODES, costs=TABLE, memory_gib=126))
    less = train("dense ring", work, Cluster(gpus=8, topology=NODES, costs=TABLE, memory_gib=60))
    none = train("dense ring", work, Cluster(gpus=8, topology=NODES, costs=TABLE, memory_gib=10))
    assert step.fits and step.recompute == "but attention"  # type: ignore[union-attr] # noqa: PT018
    assert less.fits and less.recompute == "all" and less.seconds > step.seconds  # type: ignore[union-attr] # noqa: PT018
    assert not none.fits  # type: ignore[union-attr]


def test_thousands_of_gpus_take_seconds() -> None:
    began = time.process_time()
    found = planning.predict(planning.PlanConfig(gpus=2048, links="nvlink,ib400"))
    assert time.process_time() - began < 6
    assert {row["gpus"] for row in found["training"]} == set(sizes(2048, 8))
    assert sizes(24, 8) == [8, 16, 24]
    assert sizes(4, 8) == [4]


def test_the_command_writes_a_table_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    asked = ["plan", "--gpus", "16", "--tokens", "80000", "--model", "wan-1.3b", "--links", "nvlink,ib400"]
    picture = tmp_path / "plan.png"
    with pytest.raises(SystemExit) as done:
        cli.main([*asked, "--plot", str(picture)])
    assert done.value.code == 0
    told = capsys.readouterr().out
    assert "times the best dense layout" in told
    assert "16 GPUs in nodes of 8" in told
    assert picture.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SystemExit):
        cli.main([*asked, "--json"])
    rows = json.loads(capsys.readouterr().out)["training"]
    ours = next(row for row in rows if row["gpus"] == 16 and row["method"] == "foveate")
    assert f"{ours['seconds']:9.2f}{ours['attention_s']:11.2f}" in told


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--gpus", "12"], "no whole nodes of 8"),
        (["--gpus", "0"], "1 to 16384"),
        (["--model", "gpt"], "LAYERSxHEADSxDIM"),
        (["--links", "nvlink"], "one link inside hosts and one between"),
        (["--links", "measured"], "no links were measured here"),
        (["--links", "no.json"], "no file no.json"),
        (["--context", "3"], "does not divide 8 GPUs"),
        (["--kept", "0"], "kept is a fraction"),
        (["--dense-layers", "99"], "cannot be dense"),
        (["--tokens", "3"], "tokens from 64 on"),
    ],
)
def test_wrong_flags_end_with_code_2(wrong: list, told: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as done:
        cli.main(["plan", "--gpus", "8", *wrong])
    assert done.value.code == 2
    assert told in capsys.readouterr().err


def test_shapes_have_the_weights_that_they_are_called_by() -> None:
    for model in MODELS.values():
        made = model.layers * model.passed
        assert 0.5 < made / model.weights <= 1.02, model.name
    assert find("32x24x96").width == 2304


def test_a_straight_line_is_a_link() -> None:
    found = links.fit([(size, 20e-6 + size / 40e9) for size in links.SIZES["nccl"]])
    assert found.latency_us == pytest.approx(20, rel=1e-3)
    assert found.gb_per_s == pytest.approx(40, rel=1e-3)
    falling = links.fit([(1, 2.0), (100, 1.0)])
    assert falling.latency_us == 0
    assert falling.gb_per_s == pytest.approx(1e-7)


def measured_on(names: str) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "_known", {})
        patch.setenv("NCCL_HOSTID", names[dist.get_rank()])
        return links.measure_links((1 << 10, 1 << 16), 2)


def test_links_are_measured_alike_on_all_ranks(worlds: Worlds) -> None:
    first, *others = worlds(4).run(measured_on, "abab")
    assert all(found == first for found in others)
    assert set(first["seconds"]) == {"intra", "inter", "inter, one rank"}
    assert first["hosts"] == (0, 1, 0, 1)
    alone = worlds(4).run(measured_on, "aaaa")[0]
    assert set(alone["seconds"]) == {"intra"}
    assert alone["inter"]["source"] == LINKS["ib400"].source


def test_measured_tables_are_read_by_later_plans(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "kernels.json"
    file.write_text((RESULTS / "kernels_h200_202612.json").read_text())
    monkeypatch.setattr(kernels, "measure", lambda device, say: file)
    monkeypatch.setattr(hosts, "_known", {})
    assert links.read("") == (LINKS["nvlink"], LINKS["ib400"])
    assert planning.measure(lambda line: None) == links.saved()
    assert costs.own_table("cpu").read_text() == file.read_text()
    found = json.loads(links.saved().read_text())
    found["intra"] |= {"gb_per_s": 77.0, "source": "measured"}
    links.saved().write_text(json.dumps(found))
    assert links.read("")[0].gb_per_s == links.read("measured")[0].gb_per_s == 77
    assert planning.predict(planning.PlanConfig(gpus=8))["assumptions"]["links"]["intra"]["gb_per_s"] == 77
    links.saved().write_text("{}")
    with pytest.raises(ValueError, match="foveate plan --measure renews it"):
        links.read("")
