"""Where a model's tokens enter and leave its blocks: what context parallelism needs to know, as data.

parallel/shard.py reads it. Nothing is said of arguments that are the same for all tokens, nor of cross-attention.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PerToken:
    """An argument of every block with one entry a video token (a rotary table, modulations by token).

    dim: where its tokens are. ndim: only tensors of so many dimensions have them; None: any. A tuple of tensors is
    taken one by one. A size of 1 there is left alone: it serves all tokens.
    """

    name: str
    dim: int
    ndim: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """blocks: regular expression of the transformer blocks' names. `video`, `text`: the blocks' arguments that hold the
    tokens themselves, (B, tokens, width), and what they return, in this order. per_token: see `PerToken`.
    grid: the block's argument that holds the VideoGrid; None where the adapter's processors know it.
    in_tile_order: tokens and per-token arguments come in tile order already, else in raster order.
    enters: where whole tokens come in, as pairs of a regular expression of blocks and the name of their argument;
    empty: `video` of the first block. leaves: name of the module behind the blocks whose first argument is to be whole
    again; empty: what the last block returns.
    packed: video and other tokens are one sequence (`Packed`), of which every rank has its own video tokens and
    all others; else, where `text` is None, whatever blocks take and return besides the video is whole on every rank.
    whole: arguments that say where tokens lie in the whole sequence: with them given a model cannot be sharded.
    """

    blocks: str
    video: str = "hidden_states"
    text: str | None = None
    per_token: tuple[PerToken, ...] = ()
    grid: str | None = None
    in_tile_order: bool = False
    enters: tuple[tuple[str, str], ...] = ()
    leaves: str = ""
    packed: bool = False
    whole: tuple[str, ...] = ()
