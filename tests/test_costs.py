"""The cost table: exact at its points, sane between and past them, and a model where there is none."""

import json
from pathlib import Path

import pytest
import torch

from foveate import costs
from foveate.training import doctor, measure

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def row(kernel: str, length: int, density: float, ms: float, **more) -> dict:
    return {
        "kernel": kernel, "length": length, "heads": 8, "dim": 128, "density": density, "lists": "random",
        "periphery": "drop", "forward_ms": ms, "backward_ms": 3 * ms, "select_ms": length**2 / 1e10, **more,
    }  # fmt: skip


ROWS = [
    row("cudnn dense", 32768, 1.0, 6.0, lists="all", select_ms=0.0),
    row("cudnn dense", 131072, 1.0, 96.0, lists="all", select_ms=0.0),
    row("foveate", 32768, 0.1, 0.8),
    row("foveate", 131072, 0.1, 12.8),
    row("foveate", 131072, 0.4, 51.2),
    row("foveate, pooled", 131072, 0.1, 16.0, periphery="pool"),
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "kernels_h200_202611.json"
    file.write_text(json.dumps({"card": "NVIDIA H200", "rows": ROWS}))
    return file


def test_measured_points_come_back(table: Path) -> None:
    prices = costs.load(table)
    select = 131072**2 / 1e10
    assert prices.dense(131072, 8, 128) == pytest.approx(4 * 96)
    assert prices.dense(131072, 16, 128) == pytest.approx(8 * 96)
    assert prices.dense(32768, 8, 128, passes=("forward_ms",)) == pytest.approx(6)
    assert prices.sparse(131072, 8, 128, 0.1) == pytest.approx(4 * 12.8 + select)
    assert prices.sparse(131072, 8, 128, 0.1, pooled=1.0) == pytest.approx(4 * 16 + select)
    assert prices.sparse(131072, 8, 128, 0.1, pooled=0.5) == pytest.approx(2 * 12.8 + 2 * 16 + select)


def test_tiles_of_128_tokens_are_priced_by_their_own_rows(table: Path, tmp_path: Path, monkeypatch) -> None:
    own = {**row("foveate on fa4", 131072, 0.1, 8.0), "tile": 128}
    file = tmp_path / "kernels_h200_202612.json"
    file.write_text(json.dumps({"rows": [*ROWS, own], "half_mass": {"64": 0.2, "128": 0.4}}))
    monkeypatch.setattr(costs.importlib.util, "find_spec", lambda name: name)
    prices, select = costs.load(file), 131072**2 / 1e10
    assert (prices.tile, prices.at(128).tile) == (64, 128)
    assert prices.sparse(131072, 8, 128, 0.1) == pytest.approx(4 * 12.8 + select)
    assert prices.at(128).sparse(131072, 8, 128, 0.1) == pytest.approx(4 * 8 + select)
    assert prices.faster_tile()[0] == 64  # 25.6 against 32: twice the budget for the same mass
    file.write_text(json.dumps({"rows": [*ROWS, own], "half_mass": {"64": 0.2, "128": 0.21}}))
    assert costs.load(file).tile == 128
    monkeypatch.setattr(costs.importlib.util, "find_spec", lambda name: None)
    assert costs.load(file).tile == 64  # without flash-attn-4
    assert costs.load(table).at(128) == costs.load(table)
    assert "pip install 'foveate[fa4]'" in doctor.tiles(costs.load(file))
    assert doctor.tiles(costs.load(table)) == "64 tokens"


def test_a_table_measured_here_is_used_while_versions_are_the_same(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu = torch.device("cpu")
    costs.for_device.cache_clear()
    assert "arithmetic" in costs.here(cpu).source
    path = measure.measure(cpu, lambda line: None, lengths=(512, 1024), heads=2)
    found = costs.here(cpu)
    assert found.source.startswith("costs_cpu.json")
    (row,) = (r for r in found.rows if (r["length"], r["periphery"], r["density"]) == (1024, "pool", 0.2))
    whole = row["forward_ms"] + row["backward_ms"] + row["select_ms"]
    assert found.sparse(1024, 2, 64, 0.2, pooled=1.0) >= 0.9 * whole
    assert found.sparse(1024, 2, 64, 0.05) < found.sparse(1024, 2, 64, 0.2)
    path.write_text(path.read_text().replace(torch.__version__, "0.1"))
    costs.for_device.cache_clear()
    assert "arithmetic" in costs.here(cpu).source
    assert "other versions" in caplog.text
    monkeypatch.setattr(measure, "BARS", {torch.float32: 0.0})
    with pytest.raises(RuntimeError, match="differs from the oracle"):
        measure.measure(cpu, lambda line: None)
    costs.for_device.cache_clear()


def test_between_and_past_the_points(table: Path) -> None:
    prices = costs.load(table)
    # The points lie on ms = length^2 * density, so every other point must too.
    expected = 4 * 12.8 * (200_000 / 131072) ** 2 * 2
    assert prices.sparse(200_000, 8, 128, 0.2) - prices.select(200_000, 8, 128) == pytest.approx(expected)
    assert prices.dense(65536, 8, 128) == pytest.approx(4 * 24)
    assert prices.dense(131072, 8, 64) == pytest.approx(2 * 96)
    assert prices.sparse(131072, 8, 128, 0.05) < prices.sparse(131072, 8, 128, 0.1)


def test_tables_are_found_by_card_and_said_once(table: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(costs, "FOLDERS", (table.parent,))
    costs.for_device.cache_clear()
    with caplog.at_level("INFO", "foveate"):
        assert costs.for_device("cuda", "NVIDIA H200").rows
        assert not costs.for_device("cuda", "NVIDIA A100").rows
        assert not costs.for_device("cpu").rows
        assert not costs.for_device("cpu").rows
    assert [r.message for r in caplog.records if "model of cpu" in r.message] == [
        "costs: no saved table for cpu, an arithmetic model of cpu serves"
    ]
    monkeypatch.setenv(costs.VARIABLE, str(table))
    costs.for_device.cache_clear()
    assert costs.for_device("cpu").rows
    costs.for_device.cache_clear()


def test_the_cpu_model_orders_cases_as_measured() -> None:
    """One core, 4 heads of 32, ms: 4,096 tokens dense 264; with selection 10 % 70, 30 % 164, 60 % 322."""
    model = costs.Costs("", machine=costs.MACHINES["cpu"])
    assert model.sparse(4096, 4, 32, 0.1) == pytest.approx(70, rel=0.2)
    assert model.sparse(4096, 4, 32, 0.3, pooled=1.0) == pytest.approx(195, rel=0.2)
    assert model.sparse(4096, 4, 32, 0.3) < model.dense(4096, 4, 32) < model.sparse(4096, 4, 32, 0.6)
    # 256 tokens: dense 1.9, sparse 2.7 and more whatever is kept.
    assert model.sparse(256, 4, 32, 0.05) > model.dense(256, 4, 32)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"rows": []}', json.dumps({"rows": ROWS[:1]}), '{"rows": [{"dim": 1}]}']
)
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "kernels_x_202611.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="is not a cost table"):
        costs.load(file)


def test_short_sequences_are_dense_by_the_table_of_a_card() -> None:
    """Tables begin at 32k tokens; the launches of sparse attention do not shrink with the square of the length."""
    assets = Path(costs.__file__).parent / "assets"
    for file in assets.glob(costs.PATTERN):
        prices = costs.load(file)
        assert prices.sparse(2048, 12, 128, 0.1) > prices.dense(2048, 12, 128)
        assert prices.sparse(32768, 12, 128, 0.6) < prices.dense(32768, 12, 128)
        assert json.loads(file.read_text()) == json.loads((RESULTS / file.name).read_text()), "copy the newer one"
