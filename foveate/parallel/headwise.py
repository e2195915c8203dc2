"""Head-wise context parallelism: from all heads of some tokens to some heads of all tokens, and back.

An all-to-all each way (DeepSpeed-Ulysses, arXiv 2309.14509), but with any number of heads a rank and any assignment, so
that heads of different cost can be spread evenly (DSV, arXiv 2502.07590, section 6).

Shapes: B batch, S tokens of the whole group in tile order, s tokens of this rank, H heads, h heads of this rank, D dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foveate.parallel.comm import Group, Shards


@dataclass(frozen=True)
class Heads:
    """Which heads every rank of a group computes: `of[rank]`, together each head exactly once."""

    of: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        flat = sorted(head for heads in self.of for head in heads)
        if flat != list(range(len(flat))) or not all(self.of):
            raise ValueError(f"every rank needs a head, and every head one rank, got {self.of}")

    @classmethod
    def contiguous(cls, heads: int, ranks: int) -> "Heads":
        """Runs of heads, as even as can be. ValueError where there are fewer heads than ranks."""
        if heads < ranks:
            raise ValueError(
                f"{heads} (key/value) heads cannot be spread over {ranks} ranks; use a smaller head degree and a "
                "larger sequence degree: ParallelConfig(head=..., sequence=...)"
            )
        even, more = divmod(heads, ranks)
        counts = [even + (rank < more) for rank in range(ranks)]
        starts = [sum(counts[:rank]) for rank in range(ranks)]
        return cls(tuple(tuple(range(s, s + n)) for s, n in zip(starts, counts, strict=True)))

    @cached_property
    def counts(self) -> list[int]:
        return [len(heads) for heads in self.of]

    @cached_property
    def order(self) -> list[int]:
        """All heads, by rank."""
        return [head for heads in self.of for head in heads]

    def expanded(self, repeats: int) -> "Heads":
        """The query heads that go with these key/value heads, `repeats` to each."""
        return Heads(tuple(tuple(h * repeats + i for h in heads for i in range(repeats)) for heads in self.of))


def tokens_to_heads(x: Tensor, heads: Heads, shards: Shards, group: Group, what: str) -> Tensor:
    """x (B, s, H, ...) of this rank's tokens -> (B, S, h, ...), its heads of the whole group's tokens. Plain function.

    shards: how S is cut over the group.
    """
    if group.size == 1:
        return _take_heads(x, heads)
    batch, tokens, rest = x.shape[0], x.shape[1], x.shape[3:]
    own = heads.counts[group.rank]
    # Heads first: what goes to one rank is then one run of memory.
    send = _take_heads(x, heads).movedim(2, 0).flatten(0, 2)
    row = batch * tokens
    sizes = [batch * size * own for size in shards.sizes]
    got = group.all_to_all(send, [row * count for count in heads.counts], sizes, what).wait()
    parts = got.split(sizes)
    return torch.cat([part.view(own, batch, -1, *rest) for part in parts], 2).movedim(0, 2)


def heads_to_tokens(x: Tensor, heads: Heads, shards: Shards, group: Group, what: str) -> Tensor:
    """x (B, S, h, ...), this rank's heads of the whole group's tokens -> (B, s, H, ...). Undoes `tokens_to_heads`."""
    if group.size == 1:
        return _put_heads(x, heads)
    batch, own, rest = x.shape[0], x.shape[2], x.shape[3:]
    tokens = shards.sizes[group.rank]
    by_rank = [part.movedim(2, 0).flatten(0, 2) for part in x.split(shards.sizes, dim=1)]
    send_rows = [own * batch * size for size in shards.sizes]
    got = group.all_to_all(torch.cat(by_rank), send_rows, [n * batch * tokens for n in heads.counts], what).wait()
    return _put_heads(got.view(-1, batch, tokens, *rest).movedim(0, 2), heads)


class ToHeads(torch.autograd.Function):
    """`tokens_to_heads` whose gradient comes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: Heads, shards: Shards, group: Group, what: str) -> Tensor:
        ctx.rest = heads, shards, group, f"gradient {what}"
        return tokens_to_heads(x, heads, shards, group, what)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return heads_to_tokens(grads[0], *ctx.rest), None, None, None, None


class ToTokens(torch.autograd.Function):
    """`heads_to_tokens` whose gradient comes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: Heads, shards: Shards, group: Group, what: str) -> Tensor:
        ctx.rest = heads, shards, group, f"gradient {what}"
        return heads_to_tokens(x, heads, shards, group, what)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return tokens_to_heads(grads[0], *ctx.rest), None, None, None, None


def exchange_qkv(
    q: Tensor, k: Tensor, v: Tensor, heads: Heads, shards: Shards, group: Group, where: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, s, H, D) and k, v (B, s, G, D) -> (B, S, h, D) and (B, S, g, D): one exchange, differentiable.

    heads: which key/value heads go to which rank; their query heads go with them.
    """
    repeats = q.shape[2] // k.shape[2]
    # One row a key/value head: its queries, its key, its value.
    fused = torch.cat([q.unflatten(2, (-1, repeats)), k.unsqueeze(3), v.unsqueeze(3)], dim=3)
    if heads.order != list(range(k.shape[2])) or group.size > 1:
        fused = ToHeads.apply(fused, heads, shards, group, f"q, k, v to heads of {where}")
    q, k, v = fused.split([repeats, 1, 1], dim=3)  # type: ignore[union-attr]
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


def return_out(out: Tensor, heads: Heads, repeats: int, shards: Shards, group: Group, where: str) -> Tensor:
    """out (B, S, h, D) -> (B, s, H, D), differentiable. heads: of keys and values, `repeats` query heads to each."""
    if group.size == 1 and heads.order == list(range(len(heads.order))):
        return out
    return ToTokens.apply(out, heads.expanded(repeats), shards, group, f"out to tokens of {where}")  # type: ignore


def own_heads(heads: Heads, repeats: int, group: Group, device: torch.device) -> Tensor:
    """int64 (h,): the query heads of this rank."""
    return torch.tensor(heads.expanded(repeats).of[group.rank], device=device)


def _take_heads(x: Tensor, heads: Heads) -> Tensor:
    """Heads of x (B, s, H, ...) in the order of the ranks they go to."""
    if heads.order == list(range(x.shape[2])):
        return x
    return x.index_select(2, _index(heads.order, x.device))


def _put_heads(x: Tensor, heads: Heads) -> Tensor:
    """Heads of x (B, s, H, ...) back from the order of ranks."""
    if heads.order == list(range(x.shape[2])):
        return x
    back = sorted(range(len(heads.order)), key=heads.order.__getitem__)
    return x.index_select(2, _index(back, x.device))


def _index(order: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(order, device=device)
