"""The sparse policy as one operator, for torch.compile: the compiler sees q, k, v go in and the output come out.

Everything that changes in a run (dense or sparse, budgets, predictors, whether this call teaches) is looked up when the
operator runs, so a compiled model is compiled once. Eager code does not come here.

Shapes: B batch, S tokens in tile order, H heads, G key/value heads, D head dim, R query tiles, W words of a row.
"""

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from foveate.attention import AttnState, Layer
from foveate.kernels.bits import WORD
from foveate.sparsity.influence import squares
from foveate.tiles import VideoGrid

if TYPE_CHECKING:
    from foveate.sparsity.policy import Sparse

_policies: "WeakValueDictionary[int, Sparse]" = WeakValueDictionary()


def register(policy: "Sparse") -> int:
    """A number by which the operator finds the policy."""
    token = 1 + max(_policies, default=0)
    _policies[token] = policy
    return token


def attention(token: int, query_tile: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> AttnState:
    """Attention of q (B, S, H, D) over k, v (B, S, G, D) by policy `token`, traceable."""
    grid = layer.grid
    sizes = [grid.frames, grid.height, grid.width, grid.text]
    step = -1 if layer.step is None else layer.step
    grad = torch.is_grad_enabled()
    return AttnState(*_policy(q, k, v, token, query_tile, layer.index, sizes, list(grid.cube), step, grad)[:2])


@torch.library.custom_op("foveate::policy", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _policy(
    q: Tensor, k: Tensor, v: Tensor, token: int, query_tile: int, index: int, sizes: list[int], cube: list[int],
    step: int, grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse, and what its backward needs: words (B, H, R, W), constants of the periphery (H,), and on the CPU
    (sparse, any pooled)."""
    policy = _policies[token]
    grid = VideoGrid(*sizes, cube=(cube[0], cube[1], cube[2]))
    layer = Layer(index, str(index), grid, None if step < 0 else step)
    policy.inside_graphs += grad
    mode, selection = policy.choose(layer, q.detach(), k.detach(), v.detach(), grad)
    state = policy.compute(layer, mode, selection, q, k, v)
    # Copies: the compiler may write into what it is given, and the policy keeps its own.
    words = _no_words(q, query_tile) if selection is None else selection.words.clone()
    setting = policy.setting(grid.tokens)
    facts = torch.tensor([selection is not None, not setting.drops[index]])
    return state.out.contiguous(), state.lse.contiguous(), words, setting.constants[index].clone(), facts


@_policy.register_fake
def _(q, k, v, token, query_tile, index, sizes, cube, step, grad):
    batch, tokens, heads, _ = q.shape
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        q.new_empty((batch, heads, tokens), dtype=torch.float32),
        _no_words(q, query_tile),
        q.new_empty((heads,), dtype=torch.float32),
        torch.empty(2, dtype=torch.bool, device="cpu"),
    )


@torch.library.custom_op("foveate::policy_backward", mutates_args=())
def _policy_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, words: Tensor,
    constants: Tensor, facts: Tensor, token: int, query_tile: int, index: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv by the backward of the kernel that computed the forward."""
    policy = _policies[token]
    if policy.weighs:
        policy.influence.note(index, squares(out), dout)
    sparse, any_pooled = facts.tolist()
    backend, scale = policy.backend, q.shape[-1] ** -0.5
    parts: tuple[Any, ...] = (words, constants if any_pooled else None, backend) if sparse else (None, None, "auto")
    return torch.ops.foveate.attend_backward(dout, dlse, q, k, v, out, lse, *parts, query_tile, query_tile, scale)


@_policy_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, words, constants, facts, token, query_tile, index):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, ctx.token, ctx.query_tile, ctx.index, *_ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *others: Tensor) -> tuple:
    dout = torch.zeros_like(ctx.saved_tensors[3]) if dout is None else dout.contiguous()
    dqkv = _policy_backward(dout, dlse, *ctx.saved_tensors, ctx.token, ctx.query_tile, ctx.index)
    return *dqkv, None, None, None, None, None, None, None


_policy.register_autograd(_differentiate, setup_context=_keep)


def _no_words(q: Tensor, query_tile: int) -> Tensor:
    tiles = (q.shape[1] + query_tile - 1) // query_tile  # of queries and of keys
    return q.new_zeros((q.shape[0], q.shape[2], tiles, (tiles + WORD - 1) // WORD), dtype=torch.int32)
