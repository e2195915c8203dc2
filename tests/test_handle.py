"""sparsify() in training loops and generation that are not ours: what it must not disturb, what it must remember."""

import copy
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from foveate.attention import Layer
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.sample import generate
from foveate.sparsity import pairs
from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.handle import Handle, sparsify
from foveate.sparsity.policy import Sparse
from foveate.sparsity.predictor import Moments
from foveate.sparsity.sight import Sight
from foveate.tiles import VideoGrid

SIZE = (1, 3, 8, 16, 16)  # 512 tokens in patches of 2 x 2, 8 tiles
FAST = {"warmup": 3, "learn_from": 2, "often": 2, "rare": 4, "pairs": 1, "force": True}


def make_model(dropout: float = 0.0) -> VideoDiT:
    torch.manual_seed(0)
    model = VideoDiT(DiTConfig(width=64, depth=2, heads=2, patch=(1, 2, 2)))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.05)
    if dropout:
        for block in model.blocks:
            block.mlp.append(nn.Dropout(dropout))
    return model


def clip(seed: int, size: tuple[int, ...] = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, steps: range, after: Callable[[Tensor], None], lr: float = 1e-2) -> list[float]:
    """A plain loop that draws its noise from the global generator, as most do."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in steps:
        x, sigma = clip(step), torch.rand(1)
        noise = torch.randn_like(x)
        loss = (model((1 - sigma) * x + sigma * noise, sigma) - (noise - x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(loss.detach())
        losses.append(loss.item())
    return losses


def sparse_handle(model: nn.Module, **more) -> Handle:
    """A handle whose training is sparse from now on."""
    handle = sparsify(model, SparsityConfig(**{**FAST, "budget": 0.25, **more}))
    train(model, range(5), lambda _: handle.step(), lr=0.0)
    assert handle.decision.active
    return handle


def test_dense_training_is_bit_by_bit_what_it_was() -> None:
    """Lessons, profiles and pairs (with dropout) change neither weights nor random numbers."""
    plain, watched = make_model(0.1), make_model(0.1)
    torch.manual_seed(1)
    expected = train(plain, range(8), lambda _: None)
    handle = sparsify(watched, SparsityConfig(tolerance=1e-9, **{**FAST, "warmup": 2}))
    torch.manual_seed(1)
    losses = train(watched, range(8), lambda _: handle.step())
    assert handle.policy.computed["sparse"] >= 2
    assert not handle.decision.active
    assert losses == expected


def test_it_goes_sparse_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    scalars: dict[str, list] = {}
    with caplog.at_level(logging.INFO, "foveate"):
        model = make_model()
        config = SparsityConfig(tolerance=0.05, **FAST)
        handle = sparsify(model, config, log=lambda name, *point: scalars.setdefault(name, []).append(point))
        train(model, range(16), lambda _: handle.step())
    assert handle.decision.active
    assert handle.policy.computed["sparse"] > 8
    assert 0 < handle.control.gap <= 0.05  # type: ignore[operator]
    assert any("the gap held twice" in record.message for record in caplog.records)
    assert scalars["foveate/kept"][-1][0] < 0.6
    assert len(scalars["foveate/gap"]) >= 2
    text = str(handle)
    assert text.count("sparse") >= 3
    assert "pooled" in text


def test_short_sequences_stay_dense_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    with caplog.at_level(logging.INFO, "foveate"):
        handle = sparsify(model, SparsityConfig(**{**FAST, "budget": 0.9, "force": False}))
        train(model, range(8), lambda _: handle.step())
    assert not handle.decision.active
    assert handle.policy.mode == "dense"
    assert any("does not pay" in record.message for record in caplog.records)


def test_dense_layers_run_dense_and_must_exist() -> None:
    model = make_model()
    handle = sparse_handle(model, dense_layers=(0,))
    before = dict(handle.policy.computed)
    train(model, range(1), lambda _: None)
    ran = {mode: count - before[mode] for mode, count in handle.policy.computed.items()}
    assert ran == {"dense": 1, "sparse": 1}
    handle.remove()
    with pytest.raises(ValueError, match="count from 0"):
        sparsify(model, SparsityConfig(budget=0.1, dense_layers=(2,)))
    sparsify(model, SparsityConfig(budget=0.1, dense_layers=(1,))).remove()  # the refusal left nothing behind


def due_now(handle: Handle) -> None:
    """The next step measures, at whatever length."""
    for track in handle.tracks.values():
        track.control = replace(track.control, due=0)
    handle._schedule()


def spy_pairs(monkeypatch: pytest.MonkeyPatch) -> list[pairs.Pair]:
    """The pairs that handles measure from now on."""
    found: list[pairs.Pair] = []
    of = pairs.Pair.of
    monkeypatch.setattr(pairs.Pair, "of", classmethod(lambda cls, *runs: found.append(of(*runs)) or found[-1]))
    return found


@pytest.mark.parametrize("given", ["gradient", "loss", "closure"])
def test_paired_losses_are_those_of_the_loss_function(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the optimiser did since, under dropout, and at a loss scale of 700 where the loss is given."""
    model = make_model(0.2)
    handle = sparse_handle(model)
    measured = spy_pairs(monkeypatch)
    due_now(handle)
    scale = 700.0 if given == "loss" else 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2 / scale)
    x, target, sigma = clip(1), clip(2), torch.tensor([0.4])
    before = torch.get_rng_state()

    def plain() -> Tensor:
        return (model(x, sigma) - target).square().mean()

    loss = scale * plain()
    loss.backward()
    optimizer.step()
    after = torch.get_rng_state()
    if given == "closure":
        torch.set_rng_state(before)
        handle.step(plain)
    else:
        handle.step(loss=loss if given == "loss" else None)
        assert torch.equal(torch.get_rng_state(), after)
    (pair,) = measured
    for mode, found in (("dense", pair.dense), ("sparse", pair.sparse)):
        torch.set_rng_state(before)
        with torch.no_grad(), handle.policy.using(mode):
            assert found == pytest.approx(scale * plain().item(), rel=1e-4)


FRAMES = torch.linspace(0.5, 1.5, SIZE[2])[:, None, None]
COVER = (clip(77, (2, 1, *SIZE[2:])) > 0).float()
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda r: 1000 * r.square().mean(),
    "accumulated over six": lambda r: r.square().mean() / 6,
    "summed": lambda r: r.square().sum(),
    "summed over frames": lambda r: r.square().mean((0, 1, 3, 4)).sum(),
    "half masked": lambda r: (COVER * r.square()).sum() / COVER.sum(),
    "masked": lambda r: (COVER * r.square()).mean(),
    "by an odd number": lambda r: 0.37 * r.square().mean(),
    "weighted by noise level": lambda r: (torch.tensor([0.3, 2.0])[:, None, None, None, None] * r.square()).mean(),
    "weighted by frame": lambda r: (FRAMES * r.square()).mean(),
    "huber": lambda r: nn.functional.smooth_l1_loss(r, torch.zeros_like(r)),
    "absolute": lambda r: r.abs().mean(),
    "two terms": lambda r: r.square().mean() + 0.1 * (r[:, :, 1:] - r[:, :, :-1]).square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_reconstructed_or_training_stops_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a closure: the gap is the closure's, or the first step says what to do."""
    known, model, function = list(LOSSES).index(name) < 6, make_model(), LOSSES[name]
    for weight in model.parameters():  # what sparse attention changes must show beside rounding
        nn.init.normal_(weight, std=0.3)
    size = (2, *SIZE[1:])
    handle = sparsify(model, SparsityConfig(tolerance=0.99, periphery="drop", **FAST))
    measured = spy_pairs(monkeypatch)

    def loss(step: int = 9) -> Tensor:
        return function(model(clip(step, size), torch.tensor([0.2, 0.6])) - clip(step + 50, size))

    def train(step: int) -> None:
        model.zero_grad()
        loss(step).backward()
        torch.optim.SGD(model.parameters(), lr=1e-9).step()
        handle.step()

    if not known:
        with pytest.raises(ValueError, match="closure"):
            train(0)
        train(1)
        assert not handle.decision.active
        return
    for step in range(10):
        train(step)
    assert handle.decision.active
    before, config = len(measured), handle.config
    due_now(handle)
    train(9)
    handle.step(loss) if len(measured) > before else None
    due_now(handle)
    handle.step(loss)
    ours, theirs = measured[before], measured[-1]
    assert ours.sparse - ours.dense == pytest.approx(theirs.sparse - theirs.dense, rel=0.1)
    assert pairs.gap([ours], config.shift) > 0


def test_the_gap_counts_the_shift_of_a_model_bent_to_its_pattern() -> None:
    assert pairs.gap([pairs.Pair(1.0, 1.02, 0.01), pairs.Pair(1.0, 1.0, 0.01)]) == pytest.approx(0.01)
    assert pairs.gap([pairs.Pair(1.0, 0.9, 0.1)]) == pytest.approx(0.1)
    assert pairs.gap([pairs.Pair(1.0, 0.99, 0.1)], weight=0.2) == pytest.approx(0.02)
    assert pairs.Pair.of((1.0, None), (0.9, None)).shift == pytest.approx(0.1)


@pytest.mark.parametrize("kind", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT])
@pytest.mark.parametrize("forwards", [1, 2])
def test_checkpointing_recomputes_the_same_selection_and_teaches_once(kind: CheckpointImpl, forwards: int) -> None:
    def gradients(model: nn.Module, handle: Handle) -> list[Tensor]:
        handle.policy.learning = True
        xs = [clip(7 + index).requires_grad_() for index in range(forwards)]
        sum(model(x, torch.tensor([0.3])).square().mean() for x in xs).backward()  # type: ignore[union-attr]
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    plain, wrapped = make_model(), make_model()
    whole = sparse_handle(plain)
    handle = sparse_handle(wrapped)
    handle.policy.load_state_dict(whole.policy.state_dict())
    for index, block in enumerate(wrapped.blocks):
        wrapped.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=kind)
    for model in (plain, wrapped):
        model.zero_grad()
    chosen = spy(handle.policy)
    expected, found = gradients(plain, whole), gradients(wrapped, handle)
    assert [float(lesson.weight) for lesson in handle.policy.lessons.values()] == [forwards] * 2
    for words in chosen.values():  # forwards in their order, recomputations in the opposite one
        assert len(words) == 2 * forwards
        assert all(torch.equal(a, b) for a, b in zip(words, reversed(words), strict=True))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def spy(policy: Sparse) -> dict[int, list[Tensor]]:
    """Words of every layer's selections, in the order in which they are computed with."""
    chosen: dict[int, list[Tensor]] = {}
    compute = policy.compute

    def watch(layer, mode, selection, *qkv):
        chosen.setdefault(layer.index, []).append(selection.words)
        return compute(layer, mode, selection, *qkv)

    policy.compute = watch  # type: ignore[method-assign]
    return chosen


def test_recomputation_keeps_its_tiles_when_the_predictor_has_moved_on() -> None:
    torch.manual_seed(0)
    grid = VideoGrid(8, 8, 16)
    policy = Sparse(1, 2, 32, budget=0.2, start=1)
    q, k, v = (torch.randn(1, grid.tokens, 2, 32, requires_grad=True) for _ in range(3))
    policy.learners[0].learn(Sight(q, k), grid, seed=0)
    policy.mode = "sparse"
    chosen = spy(policy)
    out = torch.utils.checkpoint.checkpoint(lambda *x: policy(Layer(0, "x", grid), *x), q, k, v, use_reentrant=False)
    policy.learners[0].load_state_dict({n: -t for n, t in policy.learners[0].state_dict().items()})
    out.sum().backward()
    first, again = chosen[0]
    assert torch.equal(first, again)


@pytest.mark.parametrize("training", [True, False])
def test_training_is_what_a_backward_comes_to(training: bool) -> None:
    """Whatever mode the module is in: LoRA recipes train in eval(), evaluations may leave gradients on."""
    model = make_model().train(training)
    handle = sparsify(model, SparsityConfig(**FAST))
    with torch.no_grad():
        model(clip(0), torch.tensor([0.5]))
    model(clip(0), torch.tensor([0.5]))
    handle.step()
    assert [float(learner.moments.count) for learner in handle.policy.learners] == [0, 0]
    expected = Moments(2, 32)
    model.policy = lambda layer, q, k, v: (expected.update(q, k) if layer.index == 0 else None, v)[1]
    out = model(clip(1), torch.tensor([0.5]))
    model.policy = handle.installed
    del out
    model(clip(1), torch.tensor([0.5])).square().mean().backward()
    handle.step()
    assert [float(learner.moments.count) for learner in handle.policy.learners] == [1, 1]
    torch.testing.assert_close(handle.policy.learners[0].moments.cq, expected.cq)


def test_a_model_in_eval_mode_goes_sparse() -> None:
    model = make_model().eval()
    handle = sparsify(model, SparsityConfig(budget=0.25, **FAST))
    train(model, range(6), lambda _: handle.step())
    assert handle.decision.active
    assert handle.policy.computed["sparse"] > 0


def test_remove_restores_and_it_can_be_done_again() -> None:
    model = make_model()
    with torch.no_grad():
        before = model(clip(0), torch.tensor([0.5]))
    policy, keys = model.policy, list(model.state_dict())
    for _ in range(3):
        handle = sparse_handle(model)
        with pytest.raises(ValueError, match="already"):
            sparsify(model)
        state = handle.state_dict()
        handle.remove()
        assert model.policy is policy
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        assert list(model.state_dict()) == keys
        again = sparsify(model, SparsityConfig(budget=0.25, **FAST))
        again.load_state_dict(state)
        assert again.decision == handle.decision
        again.remove()
        with torch.no_grad():
            assert torch.equal(model(clip(0), torch.tensor([0.5])), before)


def test_models_may_be_made_on_meta_and_copied() -> None:
    with torch.device("meta"):
        model = VideoDiT(make_model().config)
    handle = sparsify(model, SparsityConfig(budget=0.25, **FAST))
    model.to_empty(device="cpu").load_state_dict(make_model().state_dict())
    train(model, range(6), lambda _: handle.step())
    assert handle.decision.active
    copied = copy.deepcopy(model).eval()
    plain = make_model().eval()
    plain.load_state_dict(model.state_dict())
    before = dict(handle.policy.computed)
    with torch.no_grad():
        expected, found = (its(clip(1), torch.tensor([0.5])) for its in (plain, copied))
    assert torch.equal(expected, found)
    assert handle.policy.computed == before


def test_another_size_in_one_process_uses_nothing_stale() -> None:
    model = make_model()
    handle = sparse_handle(model)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    for size in (SIZE, (2, 3, 4, 16, 32), (1, 3, 5, 14, 18), SIZE):
        model.zero_grad()
        model(clip(3, size), torch.full((size[0],), 0.3)).square().mean().backward()
        handle.step()
    assert handle.policy.computed["sparse"] >= 16


def test_a_step_of_infinite_gradients_is_left_out() -> None:
    model = make_model()
    handle = sparse_handle(model)
    steps, decision, profile = handle.profile.steps, handle.decision, handle.profile
    due_now(handle)
    (model(clip(0), torch.tensor([0.3])).square().mean() * float("inf")).backward()
    handle.step()
    assert handle.profile is profile
    assert handle.profile.steps == steps
    assert handle.decision is decision


def test_autocast_pairs_run_in_the_training_forwards_precision() -> None:
    model, seen = make_model(), []
    handle = sparse_handle(model)
    model.register_forward_hook(lambda _, args, out: seen.append(torch.is_autocast_enabled("cpu")))
    due_now(handle)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(clip(0), torch.tensor([0.3])).square().mean()
    loss.backward()
    handle.step()
    assert seen == [True, True, True]


def test_compiled_whole_without_breaks_or_recompilation() -> None:
    model = make_model()
    handle = sparsify(model, SparsityConfig(budget=0.25, **FAST))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    graphs = []
    for step in range(8):
        model.zero_grad()
        (compiled(clip(step), torch.tensor([0.3])) - clip(99)).square().mean().backward()
        handle.step(lambda step=step: (compiled(clip(step), torch.tensor([0.3])) - clip(99)).square().mean())
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert handle.decision.active
    assert graphs[3:] == graphs[3:4] * 5  # sparse or dense, other budgets, other predictors: one graph
    handle.policy.learning = False
    plan = handle.decision.plan
    assert plan is not None
    for index in range(2):
        handle.policy.assign(index, [0.4, 0.2], [True, index > 0], True)
    results = []
    for run in (compiled, model):
        model.zero_grad()
        out = run(clip(5), torch.tensor([0.3]))
        out.square().mean().backward()
        results.append([out.detach(), *(weight.grad.clone() for weight in model.parameters())])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs[-1]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_compiled_and_checkpointed_recomputes_the_same_selection() -> None:
    model, plain = make_model(), make_model()
    handle, whole = sparse_handle(model), sparse_handle(plain)
    handle.policy.load_state_dict(whole.policy.state_dict())
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    chosen = spy(handle.policy)
    for run, its in ((torch.compile(model, backend="aot_eager", fullgraph=True), handle), (plain, whole)):
        its.policy.learning = True
        run.zero_grad()
        run(clip(3), torch.tensor([0.3])).square().mean().backward()
    assert [float(lesson.weight) for lesson in handle.policy.lessons.values()] == [1, 1]
    for first, again in chosen.values():
        assert torch.equal(first, again)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_sparsifying_the_compiled_module_measures_without_a_closure() -> None:
    model = make_model()
    compiled = torch.compile(model, backend="aot_eager")
    handle = sparsify(compiled, SparsityConfig(budget=0.25, **FAST))  # type: ignore[arg-type]
    train(compiled, range(6), lambda _: handle.step())  # type: ignore[arg-type]
    assert handle.decision.active
    assert handle.control.gap is not None


def test_inference_with_the_saved_predictor(tmp_path: Path) -> None:
    model = make_model()
    handle = sparse_handle(model)
    state = handle.state_dict()
    save_file(state["predictors"], tmp_path / "predictor.safetensors")
    (tmp_path / "control.json").write_text(state["control"])
    other = make_model().eval()
    loaded = sparsify(other, SparsityConfig(budget=0.25, force=True))
    saved = (tmp_path / "control.json").read_text()
    loaded.load_state_dict({"predictors": load_file(tmp_path / "predictor.safetensors"), "control": saved})
    with torch.no_grad():
        expected, found = (m.eval()(clip(1), torch.tensor([0.5])) for m in (model, other))
    assert loaded.policy.computed == {"dense": 0, "sparse": 2}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    third = sparsify(make_model(), SparsityConfig(budget=0.5, force=True))
    third.load_state_dict(state)
    assert third.policy.default.budgets[0].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="rank"):
        sparsify(make_model(), SparsityConfig(budget=0.5, rank=8)).load_state_dict(state)


def test_training_free_generation_teaches_in_its_first_steps() -> None:
    model = make_model().eval()
    handle = sparsify(model, SparsityConfig(budget=0.4, training_free_steps=4, force=True))
    state = torch.get_rng_state()
    clips = []
    for _ in range(2):
        handle.restart()
        clips.append(generate(model, clip(0), steps=6))  # 11 model calls, two a step but for the last
    assert torch.equal(torch.get_rng_state(), state)
    assert handle.policy.computed == {"dense": 2 * 8 * 2, "sparse": 2 * 3 * 2}
    assert handle.policy.learners[0].tuned > 8
    assert torch.equal(clips[0], clips[1])  # nothing of the first is used in the second
    learned = handle.policy.learners[0].predictor
    assert torch.equal(handle.policy.predictor(0).a, learned.a)  # it is what chooses
    handle.remove()
    exact = generate(model, clip(0), steps=6)
    assert (clips[0] - exact).norm() / exact.norm() < 0.02


def test_training_free_steps_count_from_where_a_model_begins() -> None:
    """The second of a pipeline's two transformers begins in the middle."""
    model = make_model().eval()
    handle = sparsify(model, SparsityConfig(budget=0.4, training_free_steps=2, force=True))
    for step in (7, 8, 9, 10, 5, 6, 7):  # and a generation that begins at step 5, as strength does
        handle.installed.set_context(step=step)
        with torch.no_grad():
            model(clip(step), torch.tensor([0.5]))
    assert handle.policy.computed == {"dense": 2 * 4, "sparse": 2 * 3}


def test_training_free_steps_are_those_of_the_pipeline_where_it_tells_them() -> None:
    model = make_model().eval()
    handle = sparsify(model, SparsityConfig(budget=0.4, training_free_steps=2, force=True))
    for step in (0, 1, 2, 3, 0):  # the last one is another generation
        for branch in ("cond", "uncond"):
            handle.installed.set_context(step=step, branch=branch)
            with torch.no_grad():
                model(clip(step), torch.tensor([0.5]))
    assert handle.policy.computed == {"dense": 2 * 2 * 3, "sparse": 2 * 2 * 2}


RANKS = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, "tests")
from test_handle import FAST, SparsityConfig, clip, make_model, sparsify

dist.init_process_group("gloo")
rank, kind = dist.get_rank(), sys.argv[1]

def mean(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()

def drop_influence(control):  # each rank's own, until a measurement takes the mean
    return {**json.loads(control), "influence": None}

def shard(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)

model, config = make_model(), SparsityConfig(tolerance=0.1, **FAST)
if kind == "fsdp_first":
    model = shard(model)
if kind == "ddp":
    model = DistributedDataParallel(model)
handle = sparsify(model, config, reduce=mean if kind == "ddp" else None)
if kind == "fsdp_last":
    model = shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(16):  # the first four look for a shape of tiles, of which one rank's sequences have enough
    x = clip(100 * step + rank, (1, 3, 8, 16, 16 + 16 * rank))  # of another length on each rank
    (model(x, torch.tensor([0.3])) + x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    handle.step()
assert handle.decision.active and handle.policy.computed["sparse"] > 4, handle.decision
found = [None] * 2
state = handle.state_dict()
dist.all_gather_object(found, [state["control"], state["predictors"]])
(control, mine), (other, theirs) = [[drop_influence(c), p] for c, p in found]
assert control == other, found
assert "tiles" in handle.search.said
assert {c: track.tokens for c, track in handle.tracks.items()} == {9: 512, 10: 1024}
assert all(track.decision.active for track in handle.tracks.values())
assert all(torch.equal(mine[name], theirs[name]) for name in mine)
assert not torch.equal(mine["0.moments.cq"], torch.zeros_like(mine["0.moments.cq"]))
print("same on both ranks", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["fsdp_first", "fsdp_last", "ddp"])
def test_ranks_decide_alike_on_different_data(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(script),
        kind,
    ]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same on both ranks") == 2


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    import own_loop

    for name, value in (("sparsify", sparsify), ("SparsityConfig", SparsityConfig)):
        monkeypatch.setattr(own_loop.fv, name, value, raising=False)
    handle = own_loop.main(steps=26)
    assert handle.control.due > 20
    assert handle.profile.steps[0] >= 20
