"""Held states moved by one kernel: against the definition in float64, in Triton's interpreter, and compiled."""

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from foveate import AttnState, ReuseConfig, VideoGrid, merge  # noqa: E402
from foveate.attention import Layer  # noqa: E402
from foveate.kernels import triton_states  # noqa: E402
from foveate.reuse import cache  # noqa: E402
from foveate.reuse.policy import Reuse  # noqa: E402

CLAMP, INF, NAN = 0.7, float("inf"), float("nan")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}  # relative, of the rounded result


def states(device: str, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[AttnState, AttnState, Tensor]:
    """Two states of batch 2, some rows of larger ones, lses of every kind among them, and how far to go."""
    torch.manual_seed(tokens)
    outs = torch.randn(2, 2, tokens + 9, heads, dim, device=device).to(dtype)
    lses = torch.randn(2, 2, heads, tokens + 9, device=device)
    odd = torch.tensor([[0.1, -INF, NAN, 0.1, INF, INF, 5.0], [-INF, 0.2, 0.2, NAN, INF, -INF, 0.1]], device=device)
    lses[:, :, 0, 5:12] = odd[:, None]
    new, old = (AttnState(out[:, 4:-5], lse[..., 4:-5]) for out, lse in zip(outs, lses, strict=True))
    return new, old, 2 * torch.rand(tokens, device=device) - 0.5


def definition(new: AttnState, old: AttnState, ahead: Tensor) -> tuple[Tensor, Tensor]:
    """Row by row, in float64."""
    out, lse = new.out.double(), new.lse.double()
    for b, h, s in torch.cartesian_prod(*map(torch.arange, new.lse.shape)).tolist():
        change = (new.lse[b, h, s].double() - old.lse[b, h, s].double()).item()
        if abs(change) < INF:
            far = ahead[s].double()
            out[b, s, h] += far * (out[b, s, h] - old.out[b, s, h].double())
            lse[b, h, s] += max(-CLAMP, min(CLAMP, far.item() * change))
    return out, lse


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def check(device: str, tokens: int, heads: int, dim: int, dtype: torch.dtype, result: torch.dtype) -> None:
    """The kernel and torch's passes against the definition. result: the dtype that is asked for."""
    new, old, ahead = states(device, tokens, heads, dim, dtype)
    out, lse = (
        x.to(device) for x in definition(*(AttnState(x.out.cpu(), x.lse.cpu()) for x in (new, old)), ahead.cpu())
    )
    fused = triton_states.extrapolate(new.out, old.out, ahead, new.lse, old.lse, CLAMP, dtype=result)
    plain = triton_states.extrapolate_out(new.out, old.out, ahead, dtype=result)
    unweighed = new.out.double() + ahead.double()[:, None, None] * (new.out.double() - old.out.double())
    assert fused[0].dtype == plain.dtype == result
    assert error(fused[0], out) <= TOLERANCE[result]
    assert error(plain, unweighed) <= TOLERANCE[result]
    torch.testing.assert_close(fused[1].double(), lse, rtol=0, atol=1e-6, equal_nan=True)
    if device == "cpu":
        eager = cache.extrapolate(new, old, ahead, CLAMP, result)
        assert error(eager.out, out) <= TOLERANCE[result]
        torch.testing.assert_close(eager.lse, fused[1], rtol=0, atol=1e-6, equal_nan=True)
        assert error(cache.extrapolate_out(new.out, old.out, ahead, result), unweighed) <= TOLERANCE[result]


@pytest.mark.interpreted
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(105, 2, 32), (31, 3, 96), (64, 1, 128)])
def test_the_definition(tokens: int, heads: int, dim: int) -> None:
    check("cpu", tokens, heads, dim, torch.float32, torch.float32)
    check("cpu", tokens, heads, dim, torch.float16, torch.float16)
    check("cpu", tokens, heads, dim, torch.bfloat16, torch.float32)


def check_merge(device: str, count: int, tokens: int, dim: int, dtype: torch.dtype) -> None:
    """Several states against `merge` in float64: finite lses far apart, -inf (on all sides too) and +inf."""
    torch.manual_seed(count)
    outs = torch.randn(count, 2, tokens, 3, dim, device=device).to(dtype)
    lses = 5 * torch.randn(count, 2, 3, tokens, device=device)
    lses[0, :, :, 3], lses[:, :, :, 7], lses[-1, :, 1, 9], lses[:, 1, :, 11] = -INF, -INF, INF, INF
    states = [AttnState(out, lse) for out, lse in zip(outs, lses, strict=True)]
    found = triton_states.merge_out(list(outs), list(lses))
    assert found.dtype == dtype
    exact = merge(*(AttnState(state.out.double(), state.lse.double()) for state in states)).out
    assert bool(found.isfinite().all())
    assert error(found, exact) <= TOLERANCE[dtype]


@pytest.mark.interpreted
@pytest.mark.parametrize(("count", "tokens", "dim"), [(2, 105, 32), (9, 33, 96)])
def test_merging(count: int, tokens: int, dim: int) -> None:
    check_merge("cpu", count, tokens, dim, torch.float32)
    check_merge("cpu", count, tokens, dim, torch.float16)


@pytest.mark.interpreted
@pytest.mark.parametrize("config", [{"groups": 2}, {"groups": 3, "states": 2, "local": "fresh", "clamp": 0.05}])
def test_a_policy_by_the_kernel_is_the_policy(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held layers, whole and merged from several states, as where a card takes the kernel."""
    grid, draw = VideoGrid(2, 9, 11), torch.Generator().manual_seed(0)
    base, other = (torch.randn(3, 1, grid.tokens, 2, 32, generator=draw) for _ in range(2))

    def outputs() -> list[Tensor]:
        policy = Reuse(1, ReuseConfig(hold="attention", interval=3, warmup=2, **config))
        steps = enumerate((1.0, 0.9, 0.75, 0.6, 0.4))
        return [policy(Layer(0, "x", grid, n, "", sigma), *(base + sigma * other)) for n, sigma in steps]

    with torch.no_grad():
        plain = outputs()
        launch, calls = triton_states._launch, []
        monkeypatch.setattr(triton_states, "_launch", lambda *args: calls.append("moved") or launch(*args))
        join = triton_states.merge_out
        monkeypatch.setattr(triton_states, "merge_out", lambda *args: calls.append("merged") or join(*args))
        monkeypatch.setattr(cache, "_fused", lambda device: True)
        fused = outputs()
    assert "moved" in calls
    assert ("merged" in calls) == ("states" in config)
    for ours, exact in zip(fused, plain, strict=True):
        assert error(ours, exact.double()) <= 1e-6


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_it_compiles_without_spills_in_wide_accesses(capability: int, weighed: bool, dtype: str) -> None:
    constants = {"WEIGHED": weighed, "DIM": 128, "D": 128, "ROWS": triton_states.ROWS}
    pointers = dict.fromkeys(("LSE", "OLD_LSE", "TO_LSE"), "*fp32" if weighed else "constexpr")
    pointers |= dict.fromkeys(("OUT", "OLD", "TO"), f"*{dtype}") | {"AHEAD": "*fp32", "clamp": "fp32"}
    if not weighed:
        constants |= dict.fromkeys(("LSE", "OLD_LSE", "TO_LSE"), None)
    names = triton_states._extrapolate.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    aligned = [n for n, name in enumerate(names) if name in ("OUT", "OLD", "TO", "nb", "ns", "nh", "ob", "os", "oh")]
    attributes = {(n,): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(triton_states._extrapolate, signature, constants, attributes)
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert ".local" not in ptx
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("count", [2, 9])
def test_merging_compiles_without_spills(capability: int, count: int) -> None:
    constants = {"N": count, "DIM": 128, "D": 128, "ROWS": triton_states.ROWS}
    kinds = {"OUTS": ("*bf16",) * count, "LSES": ("*fp32",) * count, "TO": "*bf16", "tokens": "i32", "heads": "i32"}
    signature = kinds | dict.fromkeys(constants, "constexpr")
    aligned = [(0, n) for n in range(count)] + [(2,)]
    source = ASTSource(
        triton_states._merge, signature, constants, {place: [["tt.divisibility", 16]] for place in aligned}
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert ".local" not in ptx
    assert ptx.count("ld.global.v4.b32") >= count
