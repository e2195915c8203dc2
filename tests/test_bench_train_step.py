"""The training-step benchmark, at toy size, by the code that runs on a card; its gates must be able to fail."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from foveate.kernels import dense, torch_sparse
from foveate.sparsity import policy

pytest.importorskip("diffusers")

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("bench_train_step")
    finally:
        sys.path.remove(str(FOLDER))


def test_rehearsal(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--device", "cpu", "--toy", "--tokens", "512", "--layerwise", "1024", "--times", "1"]
    given += ["--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_train_step.py", *given])
    monkeypatch.setattr(bench, "UNIFORM", bench.UNIFORM[:1])
    assert bench.main() == 0
    (file,) = tmp_path.glob("train_step_cpu_*.json")
    result = json.loads(file.read_text())
    assert file.with_suffix(".png").stat().st_size > 1000
    whole, summed = sorted(result["summary"], key=lambda line: line["tokens"])
    assert (whole["tokens"], whole["how"]) == (512, "whole steps")
    assert summed["how"] == "sum of 6 layers timed one by one"
    rows = {(r["setting"], r["layers"]): r for r in result["rows"] if r["what"] == "step" and r["tokens"] == 512}
    kept = rows["DSV-like, drop", 6]["kept"]
    assert kept == [1.0, 1.0, 1.0, 1.0, 0.125, 1.0]  # one tile of eight is the least
    assert rows["DSV-like, drop", 6]["measurement_s"] > 0
    for line in (whole, summed):
        for name in ("DSV-like, drop", "DSV-like, pool", "uniform 10 %, drop"):
            assert line[name]["times_faster"] == pytest.approx(line["dense_s"] / line[name]["amortised_s"])
    rest, one = (result_of(result, "dense", count) for count in (0, 1))
    sparse = result_of(result, "uniform 10 %, drop", 1)
    assert summed["dense_s"] == pytest.approx(rest + 6 * (one - rest))
    expected = rest + 6 * (sparse - rest) + summed["sparse_overhead_s"]
    assert summed["uniform 10 %, drop"]["amortised_s"] == pytest.approx(expected)


def result_of(result: dict, setting: str, layers: int) -> float:
    """Seconds of the row of a model of so many layers, at the length that was timed layer by layer."""
    wanted = (setting, layers, 1024)
    rows = (row for row in result["rows"] if row["what"] == "step")
    return next(r["seconds"] for r in rows if (r["setting"], r["layers"], r["tokens"]) == wanted)


def test_kept_attention_is_not_recomputed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for module in (dense, torch_sparse):

        def watched(*args, kernel=module, forward=module.forward, **more):
            calls.append(kernel)
            return forward(*args, **more)

        monkeypatch.setattr(module, "forward", watched)
    model = bench.Model(bench.TOY, 6, "cpu", None)
    for mode, times in (("attention", 1), ("block", 2)):
        model.checkpoint(mode)
        handle = model.handle(bench.DSV[0], 64, False)
        calls.clear()
        model.step(bench.Batch.of(bench.TOY, 512, "cpu", torch.bfloat16), handle)
        assert calls.count(dense) == 5 * times
        assert calls.count(torch_sparse) == times
        handle.remove()


def test_gates_can_fail(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(bench.GateError, match="layer 4 kept"):
        bench.check_kept(dict.fromkeys(range(6), 1.0), bench.DSV[0], 6, 512)
    attend = policy.attend
    monkeypatch.setattr(policy, "attend", lambda q, k, v, *rest, **more: attend(q, k, 1.1 * v, *rest, **more))
    with pytest.raises(bench.GateError, match="gradients"):
        bench.gate(bench.TOY, 512, "cpu", None, 64)


def test_flash_attn_4_is_computed_from_its_share(bench: ModuleType, tmp_path: Path) -> None:
    import train_step_summary as made

    file = tmp_path / "attention.json"
    rows = [
        {"kernel": name, "length": 512, "dim": 128, "forward_ms": ms, "backward_ms": 3 * ms}
        for name, ms in (("cudnn dense", 10.0), ("fa4 dense", 9.0))
    ]
    file.write_text(json.dumps({"rows": rows}))
    shares = made.peers(file)
    assert shares == {512: pytest.approx(0.9)}
    timed = [{"what": "dense attention", "tokens": 512, "ms": [10.0, 30.0]}]
    assert made.with_fa4(timed, 512, "attention", 2.0, 5, 0.9) == pytest.approx(2.0 - 5 * 0.004)
    assert made.with_fa4(timed, 1024, "block", 2.0, 5, 0.9) is None  # no kernel was timed at this length
    assert made.with_fa4(timed, 512, "block", 2.0, 5, 0.9) == pytest.approx(2.0 - 5 * 0.005)


def test_own_model_rehearsal(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the compiler's minutes; the gate must be able to fail."""
    monkeypatch.syspath_prepend(str(FOLDER))
    own = importlib.import_module("bench_train_step_own")
    monkeypatch.setattr(own.VideoDiT, "compile_repeated_blocks", lambda self, compiled: None)
    monkeypatch.setattr(own, "OFTEN", 12)
    monkeypatch.setattr(own, "TIMED", 1)
    monkeypatch.setitem(own.CLIPS, "toy", (4, 32, 64))
    monkeypatch.setattr(sys, "argv", ["bench_train_step_own.py", "--device", "cpu", "--toy", "--out", str(tmp_path)])
    assert own.main() == 0
    (file,) = tmp_path.glob("train_step_own_cpu_*.json")
    result = json.loads(file.read_text())
    rows = {(row["what"], row["engine"]): row for row in result["rows"]}
    average = rows["average", "sparse, compiled, tiles of 64"]
    assert average["interval"] == 12
    assert average["checks_ms"] > average["without_lessons_ms"]
    sparse = [row for (what, _), row in rows.items() if what == "sparse"]
    best = result["summary"]["without lessons"]
    assert best["dense, eager"] == pytest.approx(rows["dense", "dense, eager"]["ms"] / min(row["ms"] for row in sparse))
    assert min(row["with_lesson_operators"] - row["operators"] for row in sparse) > 100
    attend = policy.attend
    monkeypatch.setattr(policy, "attend", lambda q, k, v, *rest, **more: attend(q, k, 1.1 * v, *rest, **more))
    assert own.main() == 1
