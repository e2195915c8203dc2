"""What every kernel must get right before bench_attention.py and bench_frontier.py time it, in the same process.

Against the oracle in float64: a plain length; for ours also a length with short last tiles, query heads that share
key/value heads, a tile that nobody keeps and that is full of NaN, and repeats (bit-equal, but for gradients through
flash-attn-4, which sums those of queries in any order). Empty buffers are poisoned meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attention_kernels import KERNELS, Case, first, is_ours, tensors
from torch import Tensor

from foveate.kernels import bits, reference

OUT_BAR, GRAD_BAR = 4e-3, 8e-3
ATOMIC_BAR = 2e-3  # of gradients through flash-attn-4 from run to run
PLAIN = "plain"
TRIALS = {PLAIN: (2048, 2, 2), "short tiles": (1111, 2, 2), "shared heads": (1500, 4, 2), "poisoned": (1111, 2, 2)}


def gate(names: list[str]) -> tuple[dict[str, str], bool]:
    """What each kernel may not be timed for (missing, wrong), and whether all of ours are right."""
    verdicts: dict[str, str] = {}
    with poisoned_buffers():
        for name in names:
            for dim in (128,) if name == "flex" else (64, 128):  # flex takes half a minute to compile
                for what in TRIALS if is_ours(name) else (PLAIN,):
                    if what == "poisoned" and "pooled" in name:
                        continue  # a tile's mean is of all its tokens
                    verdict = verdict_of(name, what, dim)
                    if verdict:
                        verdicts.setdefault(name, f"{what}, {dim}: {verdict}")
    return verdicts, not any(is_ours(name) and "not installed" not in text for name, text in verdicts.items())


def verdict_of(name: str, what: str, dim: int) -> str | None:
    """None if a kernel is right in a trial, else what is wrong."""
    try:
        out, grads, repeats = errors(name, trial(what, dim))
    except ImportError as error:
        return f"not installed: {error}"
    except Exception as error:  # a peer may fail in any way; it is named and left out
        return f"{type(error).__name__}: {str(error)[:200]}"
    print(f"gate: {name}, {what}, {dim}: output {out:.1e}, gradients {grads:.1e}, repeats {repeats:.1e}", flush=True)
    steady = repeats <= (ATOMIC_BAR if "fa4" in name else 0.0) or not is_ours(name)
    return None if out <= OUT_BAR and grads <= GRAD_BAR and steady else f"output {out}, gradients {grads}, {repeats}"


def trial(what: str, dim: int) -> Case:
    length, heads, groups = TRIALS[what]
    q, k, v, dout = tensors(length, heads, dim)
    k, v = k[:, :, :groups].contiguous(), v[:, :, :groups].contiguous()
    if what != "poisoned":
        return Case(length, heads, dim, 0.3, inputs=(q, k, v, dout))
    k[:, 256:384] = v[:, 256:384] = float("nan")
    return Case(length, heads, dim, 0.3, inputs=(q, k, v, dout), unwanted=(256, 384))


def errors(name: str, case: Case) -> tuple[float, float, float]:
    """Relative L2 errors against the oracle in float64: output, the worst gradient; and of a second run against this.

    NaN anywhere counts as infinitely wrong.
    """
    build, query_tile, kv_tile = KERNELS[name]
    forward, backward = build(case)
    got = results(name, forward, backward)
    q, k, v, dout = (x.double() for x in case.inputs)
    leaves = [x.nan_to_num().requires_grad_() for x in (q, k, v)]
    words = bits.pack(case.mask(query_tile, kv_tile)) if query_tile and kv_tile else None
    pooled = torch.zeros(case.heads, device="cuda") if "pooled" in name else None
    tiles = {"query_tile": query_tile or 64, "kv_tile": kv_tile or 64}
    out, _ = reference.forward(leaves[0], leaves[1], leaves[2], words, scale=case.dim**-0.5, pooled=pooled, **tiles)
    expected = [out, *torch.autograd.grad(out, leaves, dout)]
    worst = [relative(a, b) for a, b in zip(got, expected, strict=True)]
    again = [relative(a, b) for a, b in zip(results(name, forward, backward), got, strict=True)]
    return worst[0], max(worst[1:]), max(again)


def results(name: str, forward, backward) -> list[Tensor]:
    """Output and gradients, (B, S, H, D)."""
    got = [first(forward()), *backward()]
    return got if is_ours(name) or name.startswith("fa4") else [x.transpose(1, 2) for x in got]


def relative(a: Tensor, b: Tensor) -> float:
    error = float((a.double() - b.double()).norm() / b.double().norm())
    return error if error == error else float("inf")


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """torch.empty gives NaN, so that what nobody wrote is seen."""
    fill: Any = torch.utils.deterministic
    before = fill.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    fill.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        fill.fill_uninitialized_memory = before[0]
        torch.use_deterministic_algorithms(before[1])
