"""Captured steps, on the CPU: a graph is stood for by one that computes again what it was made of.

That replays are the same kernels on a GPU is gpu/test_gpu_captured.py's business, and the benchmark's own gate's.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import foveate as fv
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.sparsity import captured
from foveate.sparsity.captured import PATIENCE, Captured


class Recomputed:
    """In place of a CUDA graph: computes with what was pinned when it was made, into the tensors it was made with."""

    def __init__(self) -> None:
        self.replay: Callable[[], None] = lambda: None


def graphed(self: Captured, graph: Recomputed, arguments: list[Tensor | None]) -> Tensor:
    policy, weights = self._policy, list(self.model.parameters())

    def run() -> Tensor:
        loss = self.loss_of(*arguments)
        loss.backward()
        return loss.detach()

    found = run()
    gradients = [weight.grad for weight in weights]
    state = None if policy is None else (policy._pinned, policy._frozen)

    def replay() -> None:
        if policy is not None and state is not None:
            before = policy._pinned, policy._frozen, dict(policy.computed)
            policy._pinned, policy._frozen = state
        for weight in weights:
            weight.grad = None
        with quiet(self):
            found.copy_(run())
        if policy is not None and state is not None:
            policy._pinned, policy._frozen, policy.computed = before
        for mine, weight in zip(gradients, weights, strict=True):
            if mine is not None and weight.grad is not None:
                mine.copy_(weight.grad)

    graph.replay = replay
    return found


@contextmanager
def quiet(step: Captured) -> Iterator[None]:
    if step.handle is None:
        yield
        return
    with step.handle.aside():
        yield


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    unfit = captured._unfit
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recomputed)
    monkeypatch.setattr(Captured, "_graphed", graphed)

    def on_cpu(model: torch.nn.Module, arguments: list) -> str:
        return "" if (said := unfit(model, arguments)).startswith("the model and its inputs must be on") else said

    monkeypatch.setattr(captured, "_unfit", on_cpu)


def job(**options: Any) -> tuple[VideoDiT, fv.Handle, Captured, Callable[..., Tensor]]:
    torch.manual_seed(0)
    model = VideoDiT(DiTConfig(width=32, depth=2, heads=2))
    for weight in model.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, std=0.3)
    settings = {"budget": 0.25, "warmup": 3, "learn_from": 2, "often": 8, "rare": 8, "teach_every": 5} | options
    handle = fv.sparsify(model, fv.SparsityConfig(force=True, tile_shape=(4, 4, 4), **settings))

    def loss_of(video: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        return (model(video + sigma * noise, sigma) - noise).square().mean()

    return model, handle, handle.captured(loss_of), loss_of


def batch(step: int, frames: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    video, noise = torch.randn(2, 1, 3, frames, 32, 32, generator=draw)
    return video, noise, torch.rand(1, generator=draw)


def train(
    steps: int, replaying: bool, frames: Callable[[int], int] = lambda step: 4, **options: Any
) -> tuple[list[float], Any, Any]:
    model, handle, step_of, loss_of = job(**options)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        if replaying:
            loss = step_of(*batch(step, frames(step)))
        else:
            loss = loss_of(*batch(step, frames(step)))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.step(loss=loss.detach())
        losses.append(loss.item())
    return losses, handle, step_of


def test_a_captured_run_is_the_same_run(graphs: None) -> None:
    """Lessons, profiles and decisions come at the same steps, and replays follow what they change."""
    plain, ours, _ = train(26, False)
    replayed, handle, step_of = train(26, True)
    assert replayed == plain
    assert step_of.captures >= 1
    assert step_of.replays >= 8
    assert handle.policy.computed == ours.policy.computed
    assert handle.state_dict()["control"] == ours.state_dict()["control"]
    for name, tensor in ours.state_dict()["predictors"].items():
        assert torch.equal(handle.state_dict()["predictors"][name], tensor), name


def test_other_lengths_run_as_ever_until_they_stay(graphs: None) -> None:
    rare = {"teach_every": 100, "often": 100, "rare": 100}

    def later(step: int) -> int:
        return 4 if step < 12 else 8

    def mixed(step: int) -> int:
        return 4 + 4 * (step % 2)

    losses, _, step_of = train(20, True, later, **rare)
    assert losses == train(20, False, later, **rare)[0]
    assert step_of.captures == 2
    losses, _, step_of = train(12, True, mixed, **rare)
    assert losses == train(12, False, mixed, **rare)[0]
    assert step_of.captures == 0


@pytest.mark.parametrize("where", ["module", "weight", "accumulated"])
def test_hooks_and_accumulation_are_not_replayed(graphs: None, where: str) -> None:
    model, handle, step_of, _ = job(teach_every=1000, often=1000, rare=1000)
    for step in range(6 + PATIENCE):
        step_of(*batch(step))
        model.zero_grad()
        handle.step()
    assert step_of.replays > 0
    before, calls = step_of.replays, []
    if where == "accumulated":
        step_of(*batch(0))
        first = [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]
        step_of(*batch(0))
        assert step_of.replays == before + 1
        for weight, one in zip(model.parameters(), first, strict=True):
            assert (weight.grad is None) == (one is None)
            assert one is None or weight.grad is None or torch.allclose(weight.grad, 2 * one, rtol=1e-6, atol=1e-12)
        return
    if where == "module":
        removed = model.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    else:
        removed = next(model.parameters()).register_hook(lambda _: calls.append(1))
    step_of(*batch(1))
    assert calls == [1]
    assert step_of.replays == before
    removed.remove()
    model.zero_grad()
    step_of(*batch(2))
    assert step_of.replays == before + 1


@pytest.mark.parametrize("what", ["shape", "removed", "mode"])
def test_what_a_graph_does_not_hold_for_is_launched(graphs: None, what: str) -> None:
    model, handle, step_of, loss_of = job(teach_every=1000, often=1000, rare=1000)
    for step in range(6 + PATIENCE):
        step_of(*batch(step))
        model.zero_grad()
        handle.step()
    before, kept = step_of.replays, step_of(*batch(0)).item()
    model.zero_grad()
    assert step_of.replays == before + 1
    if what == "shape":
        handle.installed.tile_shape = (1, 8, 8)
    elif what == "removed":
        handle.remove()
    else:
        model.blocks[0].eval()
    found = step_of(*batch(0)).item()
    assert step_of.replays == before + 1
    assert found == loss_of(*batch(0)).item()
    assert (found != kept) == (what != "mode"), "or the test would see nothing"


def test_without_a_gpu_it_says_so_and_runs(caplog: pytest.LogCaptureFixture) -> None:
    captured.say_once.cache_clear()
    model = VideoDiT(DiTConfig(width=32, depth=1, heads=2))
    step_of = Captured(model, lambda x, sigma: model(x, sigma).square().mean())
    with caplog.at_level(logging.WARNING, "foveate"):
        for _ in range(PATIENCE + 3):
            step_of(torch.randn(1, 3, 4, 16, 16), torch.tensor([0.5]))
            model.zero_grad()
    assert step_of.captures == 0
    assert caplog.text.count("must be on a CUDA device") == 1
