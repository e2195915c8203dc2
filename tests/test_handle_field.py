"""What loops, copies, threads and lengths do to a sparsified model, as its users do it."""

import copy
import pickle
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_handle import FAST, SIZE, clip, make_model, sparse_handle, train
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import foveate as fv
from foveate.attention import Dense, Layer
from foveate.costs import Costs, Machine
from foveate.models import dit
from foveate.sparsity import cadence, probe
from foveate.sparsity import profile as profiles
from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.handle import Handle, sparsify
from foveate.sparsity.plan import Decision
from foveate.sparsity.predictor import Lesson, Predictor
from foveate.sparsity.profile import profile
from foveate.tiles import VideoGrid

HALF = torch.tensor([0.5])
IMAGE, VIDEO = (1, 3, 1, 16, 16), (1, 3, 8, 32, 32)  # 64 and 2,048 tokens


@pytest.fixture(autouse=True)
def _said_anew() -> None:
    probe.say_once.cache_clear()


def outputs(*models: torch.nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return [model.eval()(clip(1), HALF) for model in models]


# Lengths


def sparse_video_steps(every: int) -> tuple[int, Handle]:
    """Of 12 steps on videos of 2,048 tokens how many were sparse; every so many steps one on an image comes between."""
    prices = Costs("test", machine=Machine(1e9, 0.05, 1.0, 0.05, 0.1, 0.02, 0.05))
    model, videos, sparse, step = make_model(), 0, 0, 0
    dials = {**FAST, "force": False, "rare": 2, "tile_shape": (4, 4, 4)}
    handle = sparsify(model, SparsityConfig(tolerance=0.2, **dials), costs=prices)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while videos < 12:
        image, before = bool(every) and step % every == 0, handle.policy.computed["sparse"]
        x = clip(step, IMAGE if image else VIDEO)
        model.zero_grad()
        loss = (model(x, HALF) + x).square().mean()
        videos, sparse = videos + (not image), sparse + (handle.policy.computed["sparse"] == before + 2)
        loss.backward()
        optimizer.step()
        handle.step()
        step += 1
    return sparse, handle


def test_short_batches_leave_the_decisions_about_long_ones_alone() -> None:
    """One image in five: the videos are sparse as long as without, the images dense, where sparse does not pay."""
    pure, _ = sparse_video_steps(0)
    mixed, handle = sparse_video_steps(5)
    assert mixed >= pure >= 4
    assert handle.tracks[11].decision.active
    assert handle.decision == handle.tracks[11].decision
    assert handle.tracks[6].profile.steps[0] > 0
    assert not handle.tracks[6].decision.active
    assert "tokens" in str(handle)


class VideoDiT(torch.nn.Module):
    """Named as the adapter table knows it: one layer of one head, whose queries and keys are given."""

    def __init__(self, grid: VideoGrid) -> None:
        super().__init__()
        self.grid, self.config, self.policy = grid, SimpleNamespace(width=32), Dense()
        block = torch.nn.Linear(32, 32)
        block.heads = 1
        torch.nn.init.eye_(block.weight)
        self.blocks = torch.nn.ModuleList([block])

    def forward(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        return self.policy(Layer(0, "blocks.0", self.grid), q, k, self.blocks[0](x).unsqueeze(2)).squeeze(2)


def test_heads_that_look_at_one_tile_keep_little_and_hold_the_tolerance() -> None:
    """Every tile's queries ask for another tile of 80: 2.6 % and less within a tolerance of 0.5 %, nothing pooled."""
    grid, draw = VideoGrid(4, 32, 40), torch.Generator().manual_seed(0)
    places = torch.nn.functional.normalize(torch.randn(1, grid.tiles(), 1, 32, generator=draw), dim=-1)
    q, k = (x.repeat_interleave(64, 1) for x in (12 * 32**0.5 * places.roll(7, 1), places))
    model = VideoDiT(grid)
    dials = {**FAST, "often": 1, "learn_from": 1, "tile_shape": (4, 4, 4), "periphery": "drop"}
    handle = sparsify(model, SparsityConfig(tolerance=0.005, **dials))

    def loss() -> Tensor:
        x, noise = torch.randn(2, 1, grid.tiles(), 32, generator=draw).repeat_interleave(64, 2)
        return (model(q, k, x) - x.roll(7 * 64, 1) - noise).square().mean()

    for _ in range(7):
        loss().backward()
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        handle.step()
    assert handle.decision.active
    assert handle.decision.plan is not None
    assert 1 / 80 <= handle.decision.plan.kept <= 0.026
    with torch.no_grad():
        selection = handle.policy.selection(Layer(0, "blocks.0", grid), q, k)
        assert float(selection.to_dense().float().mean()) <= 0.026
        state, losses = draw.get_state(), []
        for mode in ("dense", "sparse"):
            draw.set_state(state)
            with handle.policy.using(mode):
                losses.append(float(loss()))
    assert abs(losses[1] / losses[0] - 1) <= 0.005
    assert handle.control.gap is not None
    assert 0 <= handle.control.gap <= 0.005


# What is said once


def test_a_loop_gone_wrong_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def said(part: str) -> int:
        return sum(part in record.message for record in caplog.records)

    model = make_model()
    handle = sparsify(model, SparsityConfig(budget=0.5))
    handle.step()
    handle.step()
    assert said("no forward and backward") == 1
    train(model, range(8), lambda _: None)
    assert said("no handle.step()") == 1
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)  # of another copy
    for step in range(40):
        model(clip(step, IMAGE), HALF).square().mean().backward()
        optimizer.step()
        handle.step()
    assert said("no weight of the model has changed") == 1
    handle.remove()
    handle = sparsify(model, SparsityConfig(budget=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        model(clip(step, IMAGE), HALF).square().mean().backward()
        if step % 4 == 0:
            optimizer.step()
        handle.step()
    assert said("after each optimiser step, not after every backward") == 1


def test_fused_optimisers_are_no_false_alarm(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    handle = sparsify(model, SparsityConfig(budget=0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # does not count its changes of a tensor
    for step in range(40):
        model(clip(step, IMAGE), HALF).square().mean().backward()
        optimizer.step()
        handle.step()
    assert "changed" not in caplog.text


def test_compiled_whole_afterwards_is_told_at_the_first_step() -> None:
    model = make_model()
    handle = sparsify(model, SparsityConfig(budget=0.5))
    torch.compile(model, backend="eager")(clip(0, IMAGE), HALF).square().mean().backward()
    with pytest.raises(ValueError, match=r"sparsify\(torch.compile\(model\)\)"):
        handle.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"rank": 48}, "rank"), ({"budget": [0.1] * 3}, "2 heads"), ({"dense_layers": [7]}, "count from 0")],
)
def test_what_is_refused_leaves_the_model_as_it_was(arguments: dict, message: str) -> None:
    model = make_model()
    policy = model.policy
    with pytest.raises(ValueError, match=message):
        sparsify(model, SparsityConfig(**arguments))
    with pytest.raises(ValueError, match="float64"):
        sparsify(copy.deepcopy(model).double())
    assert model.policy is policy
    assert not model._forward_hooks
    sparsify(model).remove()


# Statistics


def test_lessons_that_are_not_finite_are_left_out() -> None:
    """At every stage: nothing learned changes, and nothing that is saved is ever NaN."""
    for good in (0, 1, 6):
        model = make_model()
        handle = sparsify(model, SparsityConfig(budget=0.25, **{**FAST, "warmup": 100}))
        train(model, range(good), lambda _, handle=handle: handle.step(), lr=0.0)
        before = {n: x.clone() for n, x in handle.policy.state_dict().items() if not n.endswith("seen")}
        for value in (float("inf"), float("nan")):
            model(torch.full(SIZE, value), HALF).square().mean().backward()
            handle.step()
        after = handle.policy.state_dict()
        if good != 1:  # there the closed form is due, and made of the one that was good
            assert all(torch.equal(x, after[name]) for name, x in before.items())
        train(model, range(6), lambda _, handle=handle: handle.step(), lr=0.0)
        assert handle.policy.ready
        assert all(x.isfinite().all() for x in handle.policy.state_dict().values())
        assert "NaN" not in handle.state_dict()["control"]


def test_lessons_add_up_over_forwards_and_ranks() -> None:
    a, b = (Lesson.of(torch.full((2, 1, 2, 2), x), n) for x, n in ((1.0, 1), (4.0, 2)))
    bad = Lesson.of(torch.full((2, 1, 2, 2), torch.nan))
    assert torch.equal((a + b + bad).mean(), torch.full((2, 1, 2, 2), 3.0))
    assert float((a + b + bad).weight) == 3


def test_training_free_steps_run_in_inference_mode_and_serve_training_later() -> None:
    model = make_model().eval()
    handle = sparsify(model, SparsityConfig(budget=0.4, training_free_steps=3, force=True))
    with torch.inference_mode():
        for step in range(5):
            model(clip(step), HALF)
    assert handle.policy.computed == {"dense": 6, "sparse": 4}
    assert not any(x.is_inference() for x in handle.policy.state_dict().values())
    assert handle.policy.learners[0].tuned > 0


# Copies, saving, threads


def test_copies_and_pickles_are_plain_and_may_be_sparsified_or_follow() -> None:
    model = make_model()
    handle = sparse_handle(model)
    plain = make_model()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = dict(handle.policy.computed)
        expected, found = outputs(plain, other)
        assert torch.equal(expected, found)
        assert handle.policy.computed == before
        assert not torch.equal(found, outputs(model)[0])
        own = sparsify(other, SparsityConfig(budget=0.5, **FAST))
        train(other, range(5), lambda _, own=own: own.step(), lr=0.0)
        assert own.decision.active
        own.remove()
        followed = handle.follow(other)
        assert torch.equal(*outputs(model, other))
        followed.remove()
        assert torch.equal(*outputs(plain, other))


def test_the_artifact_makes_inference_sparse_and_knows_its_model(tmp_path: Path) -> None:
    model = make_model()
    handle = sparse_handle(model)
    handle.save(tmp_path / "sparse")
    other = make_model()
    with fv.load_sparse(other, tmp_path / "sparse") as loaded:
        assert torch.equal(*outputs(model, other))
        assert isinstance(loaded.policy, fv.Sparse)
        assert loaded.policy.computed["sparse"] == 2
        with torch.no_grad():  # a length that training did not see follows the nearest
            other(clip(0, (1, 3, 8, 16, 32)), HALF)
        assert loaded.policy.computed["sparse"] == 4
    assert torch.equal(*outputs(make_model(), other))
    wrong = dit.VideoDiT(dit.DiTConfig(width=64, depth=3, heads=2, patch=(1, 2, 2)))
    with pytest.raises(ValueError, match="layers 2, not 3"):
        fv.load_sparse(wrong, tmp_path / "sparse")
    with pytest.raises(ValueError, match="holds no sparse attention"):
        fv.load_sparse(wrong, tmp_path)
    sparsify(wrong).remove()
    with pytest.raises(ValueError, match=r"handle\.save"):
        handle.load_state_dict(handle.state_dict()["predictors"])


def test_torch_distributed_checkpoint_loads_the_handle(tmp_path: Path) -> None:
    """Into a handle that has seen nothing yet."""
    handle = sparse_handle(make_model())
    dcp.save({"handle": handle}, checkpoint_id=tmp_path, no_dist=True)
    fresh = sparsify(make_model(), SparsityConfig(**{**FAST, "budget": 0.25}))
    assert fresh.state_dict().keys() == handle.state_dict().keys()
    dcp.load({"handle": fresh}, checkpoint_id=tmp_path, no_dist=True)
    assert fresh.decision == handle.decision
    theirs = handle.policy.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in fresh.policy.state_dict().items())


def test_threads_with_their_own_sizes_do_not_disturb_each_other() -> None:
    """Landscape and portrait of equal length too, which nothing but their grid tells apart."""
    pytest.importorskip("diffusers", reason="needs diffusers: pip install 'foveate[diffusers]'")
    from tiny_models import CASES, make

    model, _ = make("wan")
    inputs = [CASES["wan"].inputs(grid) for grid in ((3, 6, 10), (3, 10, 6), (2, 5, 4))]
    handle = sparsify(model, SparsityConfig(budget=0.5, **FAST))
    handle.policy.mode, handle.policy.active = "sparse", None
    with torch.no_grad():
        expected = [model(**one).sample for one in inputs]
    wrong: list[str] = []

    def run(index: int) -> None:
        try:
            for _ in range(6):
                with torch.no_grad():
                    found = model(**inputs[index]).sample
                if not torch.equal(found, expected[index]):
                    wrong.append(f"size {index} is off by {(found - expected[index]).abs().max()}")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Costs


@pytest.mark.parametrize("tokens", [4096, 32768, 131072])
def test_checks_and_lessons_take_at_most_a_twentieth_by_the_saved_costs(tokens: int) -> None:
    table = Costs("test", machine=Machine(5.6e14, 0.01, 1.2, 0.04, 0.1, 0.04, 0.2))
    work = cadence.Work(tokens, 8, 8, 64, 30_000_000)
    dense, forward = (
        8 * table.dense(tokens, 8, 64, passes=p) for p in (("forward_ms", "backward_ms"), ("forward_ms",))
    )
    sparse = 8 * table.sparse(tokens, 8, 64, 0.1, pooled=1.0)
    for now, ours in ((dense, forward), (sparse, forward * sparse / dense)):
        found = cadence.plan(work, table, (now, ours), pairs=2)
        assert found.share <= 1.02 * cadence.SHARE
        assert found.often >= cadence.OFTEN
        assert "4.0 %" in str(replace(found, share=0.04))
    assert cadence.plan(work, table, (dense, forward), 2, often=7, rare=9, teach_every=2).often == 7
    every, share = cadence.validation(forwards=64, batch=1)
    assert (every, share) == (2134, pytest.approx(0.01, rel=0.02))
    assert cadence.validation(4, 8)[0] == cadence.VALIDATE_EVERY
    assert cadence.validation(12, 2, every=8) == (8, pytest.approx(0.2))
    assert cadence.SHARE + cadence.VALIDATION <= 0.05


def test_checks_of_sparse_steps_are_not_priced_by_the_dense_ones_before() -> None:
    """The interval that a switch begins follows the cadence of the steps that are in it."""
    table = Costs("test", machine=Machine(1e11, 0.001, 0.05, 0.01, 0.01, 0.001, 0.0))
    dials = {key: value for key, value in FAST.items() if key != "often"} | {"rare": 5000}
    model = make_model()
    handle = sparsify(model, SparsityConfig(budget=0.25, **dials), costs=table)  # type: ignore[arg-type]
    train(model, range(5), lambda _: handle.step())
    track = handle.main
    assert track.decision.active
    assert track.pace is not None
    asked = handle.pricing.cadence(replace(track, control=replace(track.control, decision=Decision())))
    assert track.pace.often > 1.3 * asked.often
    assert track.control.due - track.decision.step == track.control.interval == track.pace.often


def test_steps_that_a_gradient_scaler_skips_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    handle = sparsify(model, SparsityConfig(tolerance=0.5, **FAST))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler, skipped = torch.amp.GradScaler("cpu"), 0
    for step in range(16):
        loss = (model(clip(step), HALF) - clip(99)).square().mean()
        scaler.scale(loss * torch.inf if step in (0, 1, 4, 9) else loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped += scaler.get_scale() < before
        handle.step()
    assert skipped == 4
    assert handle.decision.active
    assert handle.control.gap is not None
    assert abs(handle.control.gap) < 0.5
    assert all(x.isfinite().all() for x in handle.policy.state_dict().values())
    assert handle.policy.influence.mean is not None
    assert handle.policy.influence.mean.isfinite().all()
    assert not [record.message for record in caplog.records if "weights changed" in record.message]


def test_a_profile_of_half_a_million_tokens_needs_less_than_a_gibibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by shapes alone, on the meta device: what lives at once beside the inputs, of 12 heads x 128."""
    grid = VideoGrid(32, 128, 128)
    monkeypatch.setattr(torch, "randperm", lambda count, **_: torch.empty(count, dtype=torch.int64, device="meta"))
    nothing_forced = torch.zeros(1, grid.tiles(), dtype=torch.bool, device="meta")
    monkeypatch.setattr(profiles, "_forced", lambda grid, drawn, device: nothing_forced.expand(len(drawn), -1))
    q, k, v = (torch.empty(1, grid.tokens, 12, 128, dtype=torch.bfloat16, device="meta") for _ in range(3))
    predictor = Predictor(*torch.empty(2, 12, 128, 16, device="meta"))
    with Live(q, k, v) as live:
        profile(q, k, v, grid, predictor=predictor, generator=torch.Generator())
    assert 1 << 27 < live.peak <= 1 << 30


class Live(TorchDispatchMode):
    """Bytes of the storages that operators make, as long as they live: `now`, and `peak`."""

    def __init__(self, *before: Tensor) -> None:
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in before}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.known:
                self._hold(x.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def test_shapes_alone_run_and_teach_nothing() -> None:
    """On the meta device, as for counting or planning."""
    with torch.device("meta"):
        model = dit.VideoDiT(dit.DiTConfig(width=32, depth=2, heads=2, patch=(1, 1, 1)))
    handle = sparsify(model, SparsityConfig(budget=0.2))
    found = model(torch.empty(1, 3, 8, 16, 16, device="meta"), torch.empty(1, device="meta"))
    assert found.shape == (1, 3, 8, 16, 16)
    assert not handle.policy.ready
