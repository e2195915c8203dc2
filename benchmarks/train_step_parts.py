"""What bench_train_step.py times by itself: one layer's dense attention, lessons of a predictor, profiles."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from train_step_model import Shape, dense_attention, grid_of, now, reset_peak

from foveate.sparsity.learner import Learner
from foveate.sparsity.profile import profile
from foveate.sparsity.sight import Sight


def repeated(job: Callable[[], Any], device: str, times: int = 3) -> float:
    """Median milliseconds of a job, after one run that warms up."""
    job()
    found = []
    for _ in range(times):
        began = now(device)
        job()
        found.append(1e3 * (now(device) - began))
    return statistics.median(found)


def qkv(shape: Shape, tokens: int, device: str) -> list[Tensor]:
    torch.manual_seed(tokens)
    size = (1, tokens, shape.heads, shape.dim)
    return [torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(3)]


def dense_ms(shape: Shape, tokens: int, device: str, backend: SDPBackend | None) -> tuple[float, float]:
    """Milliseconds of one layer's dense attention, forward and backward."""
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in qkv(shape, tokens, device))

    def attention() -> Tensor:
        with torch.no_grad():
            return scaled_dot_product_attention(q, k, v)

    with dense_attention(backend):
        forward = repeated(attention, device, 2)
        out = scaled_dot_product_attention(q, k, v)
        dout = torch.randn_like(out)
        return forward, repeated(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), device, 2)


def lesson_ms(shape: Shape, tokens: int, device: str) -> dict[str, float]:
    """Of one layer: a closed-form observation, a fine-tuning lesson, a profile; the extra GiB that each needs."""
    q, k, v = qkv(shape, tokens, device)
    grid, found = grid_of(tokens), {}
    first = Learner(shape.heads, shape.dim, start=1 << 30, device=device)
    tuned = Learner(shape.heads, shape.dim, start=1, device=device)
    tuned.learn(Sight(q, k), grid, seed=0)
    drawn = torch.Generator(device)
    jobs = {
        "closed form": lambda: first.learn(Sight(q, k), grid, seed=0),
        "lesson": lambda: tuned.learn(Sight(q, k), grid, seed=0),
        "profile": lambda: profile(q, k, v, grid, predictor=tuned.predictor, generator=drawn.manual_seed(0)),
    }
    for name, job in jobs.items():
        found[f"{name} ms"] = repeated(job, device)
        if device == "cuda":
            before = torch.cuda.memory_allocated()
            reset_peak(device)
            job()
            found[f"{name} GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return found
