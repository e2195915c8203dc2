"""Attention as a value: partial results `(out, lse)` that merge exactly, the public `attend`, the policy seam.

Shapes: B batch, S tokens in tile order, H heads, G key/value heads (G divides H), D head dim.
"""

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad
from torch.nn.functional import pad

from foveate import costs
from foveate.kernels import dense, fa4, reference
from foveate.kernels.periphery import constants_gradient
from foveate.tiles import Selection, VideoGrid

log = logging.getLogger("foveate")

HEAD_DIMS = (32, 64, 96, 128, 256)  # of GPU kernels; others are filled up with zeros
MASK_COLUMNS = 8  # beside the head dim, where keys are masked: kernels want multiples of 8
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PERIPHERIES = {"drop": -torch.inf, "pool": 0.0}
Periphery = str | float | Sequence[str | float] | Tensor


@dataclass(frozen=True, eq=False)
class AttnState:
    """Attention over some set of keys: `out` (B, S, H, D) and `lse` (B, H, S), its float32 log-sum-exp (natural).

    States over disjoint key sets merge exactly. The empty state is out = 0, lse = -inf.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def empty_like(cls, q: Tensor) -> "AttnState":
        """The state of no keys for queries q (B, S, H, D): the identity of `merge`."""
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, device=q.device)
        return cls(torch.zeros_like(q), lse)


def merge(first: AttnState, *others: AttnState) -> AttnState:
    """The state over the union of disjoint key sets; new tensors, differentiable, float32 inside (float64 kept).

    Merge many states in one call (or keep `out` in float32 between calls): rounding then happens once. An lse of
    -inf counts for nothing, whatever its `out` holds, an lse of +inf for everything.
    """
    states = (first, *others)
    dtype = torch.promote_types(torch.float32, first.out.dtype)
    lses = torch.stack([state.lse for state in states])
    top = lses.detach().amax(0)
    # inf - inf would be NaN: where the largest lse is infinite, only the states that reach +inf weigh.
    infinite = top.isinf()
    gap = torch.where(infinite, torch.where((lses == top) & (top > 0), 0.0, -torch.inf), lses - top)
    weights = gap.exp()
    total = weights.sum(0)
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)
    shares = (weights / safe).transpose(-1, -2).unsqueeze(-1)
    outs = (state.out.to(dtype).masked_fill(share == 0, 0) for share, state in zip(shares, states, strict=True))
    out = sum(share.to(dtype) * out for share, out in zip(shares, outs, strict=True))
    lse = torch.where(infinite, top, safe.log() + top)
    return AttnState(torch.as_tensor(out).to(first.out.dtype), lse)


@dataclass(frozen=True)
class Layer:
    """What a policy is told about the attention it serves: which layer, and where denoising stands, as far as known.

    step, sigma: the denoising step and its noise level. branch: of classifier-free guidance.
    """

    index: int
    name: str
    grid: VideoGrid
    step: int | None = None
    branch: str = ""
    sigma: float | None = None


class Policy(Protocol):
    """How a self-attention is computed. q (B, S, H, D), k and v (B, S, G, D), S in tile order -> out (B, S, H, D).

    A policy for models whose video attends jointly with other tokens has a method `state` too, of the same arguments:
    it returns the `AttnState`, whose lse takes part in gradients (`state_of`).
    """

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Dense:
    """The policy that leaves attention as it is: every query attends to every key."""

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v).out

    def state(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> AttnState:
        return attend(q, k, v)


def state_of(policy: Policy, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> AttnState:
    """What a policy computes, with its lse, to be merged with attention to other keys. ValueError without `state`."""
    state = getattr(policy, "state", None)
    if state is None:
        raise ValueError(
            f"{layer.name or f'layer {layer.index}'} attends to video and other tokens together, and a "
            f"{type(policy).__name__} gives no lse to merge the two by; give it a method state(layer, q, k, v) that "
            "returns the AttnState (docs/adding-a-model.md)"
        )
    return state(layer, q, k, v)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | None = None,
    *,
    scale: float | None = None,
    periphery: Periphery = "drop",
    backend: str = "auto",
    deterministic: bool = False,
) -> AttnState:
    """Attention of q (B, S, H, D) over the selected tiles of k, v (B, S, G, D); dense without a selection.

    S is in tile order where a selection is given; any strides; float32, float16, bfloat16, and float64, which only
    `reference` serves (`auto` takes it). D is at most 256.
    scale: of the logits, 1 / sqrt(D) by default. periphery: what happens to tiles that are not selected, one value or
    one a head: `drop`, `pool` (each takes part as one mean key and value, log(tokens) added to its logit), or a number,
    a constant added to those logits besides (0 is `pool`, -inf `drop`, less than 0 trusts the means less); or a float
    tensor (H,) of such constants on the device, which CUDA graphs want and which may be learned.
    backend: `reference` (slow oracle), `torch` (any device), `triton` (NVIDIA), `fa4` (flash-attn-4, 128-token tiles),
    or `auto`, whose choice is logged once. Dense attention has two: torch's own kernels, behind all names but `fa4`,
    and flash-attn-4's; `auto` takes the faster by the card's cost table (foveate/costs.py). deterministic: only
    backends whose backward repeats bit by bit.

    Gradients flow to q, k, v from `out` and from `lse`. A NaN or Inf in a key or value reaches the queries that keep
    its tile, or pool it, and no other. Raises ValueError for inputs a backend cannot serve exactly, NotImplementedError
    under forward-mode differentiation and the transforms of torch.func, which `reference` alone can follow.
    """
    if backend == "auto" and q.dtype == torch.float64:
        backend = "reference"
    _check(q, k, v, selection, backend)
    if backend != "reference":
        _refuse_transforms(q, k, v)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    pooled = periphery_constants(periphery, q.shape[2], q.device)
    if selection is None:
        pooled = None  # nothing is left out, so there is no periphery
    if backend == "reference":
        words, (query_tile, kv_tile) = (None, (64, 64)) if selection is None else (selection.words, _tiles(selection))
        options = {"query_tile": query_tile, "kv_tile": kv_tile, "scale": scale, "pooled": pooled}
        return AttnState(*reference.forward(q, k, v, words, **options))
    if deterministic and backend == "auto":
        backend = REPEATABLE
    if selection is None:
        return AttnState(*_attend(q, k, v, None, None, backend, 64, 64, scale, deterministic))
    return AttnState(*_attend(q, k, v, selection.words, pooled, backend, *_tiles(selection), scale, deterministic))


def attend_masked(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> AttnState:
    """Dense attention of q (B, M, H, D) to those keys of k, v (B, S, G, D) that `valid`, bool (B, S), names; D <= 240.

    A sequence without a valid key has an lse of about -1e5 or less, which weighs nothing where it is merged. Whatever
    stands in keys and values that are not valid, NaN included, reaches nothing. None: all are.

    Kernels need no mask for it: further columns of the head dim hold a constant in queries, and in keys 0, or what
    makes the logit so low that its exponential is exactly 0. They are made again in the backward, not kept.
    """
    if valid is None:
        return attend(q, k, v)
    _check(q, k, v, None, "auto")
    _refuse_transforms(q, k, v)
    return AttnState(*_Masked.apply(q, k, v, valid))  # type: ignore[misc]


class _Masked(torch.autograd.Function):
    """`attend_masked` with a mask."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        dim = q.shape[-1]
        out, lse = _attend(*_with_mask(q, k, v, valid), None, None, "auto", 64, 64, dim**-0.5, False)
        out = out[..., :dim].contiguous()
        ctx.save_for_backward(q, k, v, valid, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        q, k, v, valid, out, lse = ctx.saved_tensors
        dim, (dout, dlse) = q.shape[-1], grads
        dout = torch.zeros_like(out) if dout is None else dout
        dout, out = (pad(x, (0, MASK_COLUMNS)) for x in (dout, out))
        wide = _with_mask(q, k, v, valid)
        dqkv = _attend_backward(dout, dlse, *wide, out, lse, None, None, "auto", 64, 64, dim**-0.5)
        dq, dk, dv = (x[..., :dim] for x in dqkv)
        gone = ~valid[:, :, None, None]
        return dq, dk.masked_fill(gone, 0), dv.masked_fill(gone, 0), None


def _with_mask(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with MASK_COLUMNS more."""
    gone = ~valid[:, :, None, None]
    k, v = (x.masked_fill(gone, 0) for x in (k, v))
    bias = torch.where(gone, -32768.0, 0.0).to(k.dtype).expand(*k.shape[:3], 1)
    k = pad(torch.cat([k, bias], -1), (0, MASK_COLUMNS - 1))
    return pad(q, (0, MASK_COLUMNS), value=256.0), k, pad(v, (0, MASK_COLUMNS))


@torch.library.custom_op("foveate::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    words: Tensor | None,
    pooled: Tensor | None,
    kernel: str,
    query_tile: int,
    kv_tile: int,
    scale: float,
    deterministic: bool,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """A kernel's forward as one operator: what torch.compile, checkpointing and CUDA graphs see. Contiguous results.

    wide: a result in float32, not rounded to q's dtype before if the kernel can help it, for merging.
    """
    batch, tokens, heads, dim = q.shape
    if not batch:
        return torch.empty_like(q, dtype=torch.float32 if wide else None), q.new_empty(0, heads, tokens).float()
    q, k, v = _fill_up(q, k, v, dense=words is None and kernel != "fa4")
    module, options = _load(kernel, q, words, kv_tile), _options(words, pooled, query_tile, kv_tile, scale)
    if hasattr(module, "check"):
        checked = {name: value for name, value in options.items() if name != "words"}
        module.check(q, k, v, deterministic=deterministic, **checked)
    with no_autocast(q.device):  # kernels choose their own precisions
        out, lse = module.forward(q, k, v, **options, **_width(module, wide))
    return out[..., :dim].to(torch.float32 if wide else q.dtype).contiguous(), lse.contiguous()


@_attend.register_fake
def _(q, k, v, words, pooled, kernel, query_tile, kv_tile, scale, deterministic, wide=False):
    batch, tokens, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format, dtype=torch.float32 if wide else None)
    return out, q.new_empty((batch, heads, tokens), dtype=torch.float32)


@torch.library.custom_op("foveate::attend_backward", mutates_args=())
def _attend_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    words: Tensor | None,
    pooled: Tensor | None,
    kernel: str,
    query_tile: int,
    kv_tile: int,
    scale: float,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The one backward, of every kernel: it takes the (out, lse) that the forward returned. wide: as there."""
    dim, dtype = q.shape[-1], torch.float32 if wide else q.dtype
    if not len(q):
        return torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype), torch.empty_like(v, dtype=dtype)
    dout, q, k, v, out = _fill_up(dout, q, k, v, out, dense=words is None and kernel != "fa4")
    module, options = _load(kernel, q, words, kv_tile), _options(words, pooled, query_tile, kv_tile, scale)
    with no_autocast(q.device):
        grads = module.backward(dout, dlse, q, k, v, out, lse, **options, **_width(module, wide))
    dq, dk, dv = (grad[..., :dim].to(dtype).contiguous() for grad in grads)
    return dq, dk, dv


@_attend_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, words, pooled, kernel, query_tile, kv_tile, scale, wide=False):
    dtype = torch.float32 if wide else None
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format, dtype=dtype) for x in (q, k, v))
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, words, pooled, *ctx.options, _, wide = inputs
    assert not wide, "parts are merged, and differentiated, by who asked for them"
    ctx.save_for_backward(q, k, v, *output, words, pooled)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    q, k, v, out, lse, words, pooled = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    grads = _attend_backward(dout, dlse, q, k, v, out, lse, words, pooled, *ctx.options)
    constants = None
    if ctx.needs_input_grad[4]:
        _, *sizes = ctx.options
        constants = constants_gradient(dout, dlse, q, k, v, out, lse, **_options(words, pooled, *sizes))
    return *grads, None, constants, None, None, None, None, None, None


def _refuse_second_derivatives(ctx: Any, *grads: Tensor | None) -> tuple:
    raise NotImplementedError("attend has no second derivatives; backend='reference' has them")


_attend.register_autograd(_differentiate, setup_context=_keep)
_attend_backward.register_autograd(_refuse_second_derivatives)


def _refuse_transforms(*tensors: Tensor) -> None:
    """NotImplementedError where torch would run the operator below a transform, whose derivative would then be 0."""
    if torch.compiler.is_compiling():
        return
    wrapped = any(functorch.is_gradtrackingtensor(x) or functorch.is_batchedtensor(x) for x in tensors)
    if wrapped or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "attend knows reverse-mode autograd only, no forward mode and no transform of torch.func "
            "(jvp, grad, vmap); backend='reference' follows them all"
        )


def no_autocast(device: torch.device) -> AbstractContextManager:
    """Autocast switched off on this device, where its type (`meta` has none) knows autocast."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def kernel_dim(dim: int, device: str) -> int:
    """The head dim that kernels compute in: any on the CPU, elsewhere the next of `HEAD_DIMS`."""
    return dim if device == "cpu" else next(size for size in HEAD_DIMS if size >= dim)


def _fill_up(*tensors: Tensor, dense: bool) -> list[Tensor]:
    """Zero columns up to `kernel_dim`: they change no logit, and what comes out of them is cut off.

    torch's dense kernels take any multiple of 8, and above 128 it matters: a mask's columns, and those of an lse's
    gradient, would not fit beside 256.
    """
    dim = tensors[0].shape[-1]
    most = kernel_dim(dim, tensors[0].device.type)
    spare = (-dim % 8 if dense and most > 128 else most - dim) if most > dim else 0
    return [pad(x, (0, spare)) if spare else x for x in tensors]


def _options(
    words: Tensor | None, pooled: Tensor | None, query_tile: int, kv_tile: int, scale: float
) -> dict[str, Any]:
    if words is None:
        return {"scale": scale}
    return {"words": words, "pooled": _constants(pooled), "query_tile": query_tile, "kv_tile": kv_tile, "scale": scale}


def _width(module: ModuleType, wide: bool) -> dict[str, torch.dtype]:
    return {"dtype": torch.float32} if wide and hasattr(module, "RETURNS_FLOAT32") else {}


def _tiles(selection: Selection) -> tuple[int, int]:
    return selection.query_tile, selection.kv_tile


def _check(q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, backend: str) -> None:
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}, got {backend!r}")
    if not (q.dim() == k.dim() == v.dim() == 4) or k.shape != v.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q must be (B, S, H, D) and k, v (B, S, G, D), got {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch or head dim")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"the {q.shape[2]} query heads do not divide into {k.shape[2]} key/value heads")
    allowed = (*DTYPES, torch.float64) if backend == "reference" else DTYPES
    if q.dtype not in allowed or not (q.dtype == k.dtype == v.dtype):
        raise ValueError(
            f"q, k, v must share one of {', '.join(map(str, allowed))}, got {q.dtype}, {k.dtype}, {v.dtype}"
            + ("; backend='reference' takes float64" if q.dtype == torch.float64 else "")
        )
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}")
    if not 1 <= q.shape[-1] <= max(HEAD_DIMS):
        raise ValueError(f"head dim must lie in 1 ... {max(HEAD_DIMS)}, got {q.shape[-1]}")
    if q.shape[1] == 0 or k.shape[1] == 0:
        raise ValueError("attention needs at least one query and one key")
    if selection is not None:
        _check_selection(q, k, selection)


def _check_selection(q: Tensor, k: Tensor, selection: Selection) -> None:
    batch, tokens, heads, _ = q.shape
    if selection.grid.tokens != tokens or k.shape[1] != tokens:
        raise ValueError(
            f"the selection is for {selection.grid.tokens} tokens ({selection.grid}), q has {tokens}, k {k.shape[1]}"
        )
    if selection.words.shape[:2] != (batch, heads):
        raise ValueError(
            f"the selection is for batch, heads {tuple(selection.words.shape[:2])}, q has {(batch, heads)}; "
            "expand the mask before Selection.from_dense"
        )
    if selection.words.device != q.device:
        raise ValueError(f"the selection is on {selection.words.device}, q on {q.device}; use selection.to(q.device)")


def periphery_constants(periphery: Periphery, heads: int, device: torch.device) -> Tensor | None:
    """float32 (H,): the constant of each head's periphery, -inf where it is dropped; None where all are."""
    if isinstance(periphery, Tensor):
        if periphery.dtype not in (torch.bool, torch.float32) or periphery.shape != (heads,):
            raise ValueError(
                f"periphery as a tensor must be float32 or bool ({heads},), got {periphery.dtype} {periphery.shape}"
            )
        return _constants(periphery)
    listed = [periphery] * heads if isinstance(periphery, str | int | float) else list(periphery)
    if len(listed) != heads or not all(_is_periphery(one) for one in listed):
        raise ValueError(
            "periphery must be 'drop', 'pool' or a number below infinity, or one of them for each of "
            f"{heads} heads, got {periphery!r}"
        )
    constants = [PERIPHERIES[one] if isinstance(one, str) else float(one) for one in listed]
    return None if max(constants) == -torch.inf else torch.tensor(constants, device=device)


def _constants(pooled: Tensor | None) -> Tensor | None:
    """Pooled heads, bool (H,), as constants: 0 where True, -inf where False."""
    if pooled is None or pooled.dtype != torch.bool:
        return pooled
    return torch.where(pooled, 0.0, -torch.inf)


def _is_periphery(one: object) -> bool:
    return one in PERIPHERIES if isinstance(one, str) else isinstance(one, int | float) and one < torch.inf


BACKENDS: dict[str, str] = {
    "reference": "foveate.kernels.reference",
    "torch": "foveate.kernels.torch_sparse",
    "triton": "foveate.kernels.triton_sparse",
    "fa4": "foveate.kernels.fa4",
}
REPEATABLE = "auto, repeatable"  # what `auto` is called among ourselves where gradients must repeat bit by bit
PACKAGES = {"triton": "triton", "fa4": "flash_attn"}


def _load(name: str, q: Tensor, words: Tensor | None, kv_tile: int) -> ModuleType:
    """The kernel module of a backend. Called at run time, so torch.compile need not see what `auto` chooses."""
    kind, tile = q.device.type, 0 if words is None else kv_tile
    if name in ("auto", REPEATABLE):
        repeats = name == REPEATABLE or torch.are_deterministic_algorithms_enabled()
        name, reason = choose_backend(kind, tile, tuple(q.shape[1:]), q.dtype, repeats)
        _say_once(f"backend {name} for {'sparse' if tile else 'dense'} attention on {kind}: {reason}")
    elif name != "dense" and (missing := unavailable(name, kind)) is not None:
        raise ValueError(f"backend {name} {missing}")
    return importlib.import_module(BACKENDS[name]) if tile or name == "fa4" else dense


def unavailable(name: str, device: str) -> str | None:
    """Why a backend cannot run on a device type here, None if it can."""
    if name in ("reference", "torch"):
        return None
    if device != "cuda":
        return "needs an NVIDIA GPU"
    needed = (9, 0) if name == "fa4" else (8, 0)
    if (found := torch.cuda.get_device_capability()) < needed:
        return f"needs compute capability {needed[0]}.{needed[1]} or newer, this card has {found[0]}.{found[1]}"
    if importlib.util.find_spec(PACKAGES[name]) is None:
        return f"needs {PACKAGES[name]}: pip install 'foveate[{'gpu' if name == 'triton' else name}]'"
    return None


@lru_cache(maxsize=1024)
def choose_backend(
    device: str,
    kv_tile: int = 64,
    shape: tuple[int, int, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    repeats: bool = False,
) -> tuple[str, str]:
    """The backend that `auto` takes on a device type, and why.

    kv_tile: of the selection, 0 for dense attention. shape: tokens, heads, head dim, where the table is to be asked.
    repeats: gradients must repeat bit by bit, as torch.use_deterministic_algorithms asks too.
    """
    missing = unavailable("fa4", device) or _unfit_for_fa4(dtype, shape, repeats)
    if kv_tile == 0:
        return ("torch", f"torch's own kernel; fa4 {missing}") if missing else _faster_dense(shape)
    if kv_tile == 128 and missing is None:
        missing = fa4.lists_refused(torch.device(device))
    if kv_tile == 128 and missing is None:
        return "fa4", "the kernels for key tiles of 128 tokens"
    lacking = unavailable("triton", device)
    if lacking is None:
        return "triton", "fused block-sparse kernels for this card" + (f"; fa4 {missing}" if kv_tile == 128 else "")
    return "torch", f"skips tiles on any device; triton {lacking}"


def _unfit_for_fa4(dtype: torch.dtype, shape: tuple[int, int, int] | None, repeats: bool) -> str | None:
    if repeats:
        return "sums gradients of queries in any order, and these are to repeat bit by bit"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"takes no {dtype}"
    return None if shape is None or shape[2] in fa4.HEAD_DIMS else f"takes no head dim {shape[2]}"


def _faster_dense(shape: tuple[int, int, int] | None) -> tuple[str, str]:
    """torch's dense kernel or flash-attn-4's, by the saved table of this card."""
    prices = costs.for_device("cuda", torch.cuda.get_device_name())
    times = {name: prices.kernel(f"{name} dense", *(shape or (32768, 8, 128))) for name in ("cudnn", "fa4")}
    if times["cudnn"] is None or times["fa4"] is None:
        return "torch", f"torch's own kernel; {prices.source} has no time of flash-attn-4's"
    return ("fa4" if times["fa4"] < times["cudnn"] else "torch"), f"the faster one in {prices.source}"


@cache
def _say_once(message: str) -> None:
    log.info(message)
