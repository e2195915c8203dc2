"""What sampled rows see at a step: the newest states of a layer on them, and their probe, for the meter to compare.

Shapes: B batch, S tokens of this process, R sampled rows, P its parts, H heads, G key/value heads, D head dim.
"""

import torch
from torch import Tensor

from foveate.attention import AttnState, attend
from foveate.held.attention.keys import Keys, at_rows, joined
from foveate.held.attention.states import LayerStates


def measure(
    held: LayerStates,
    index: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: list[AttnState] | None,
    own: AttnState | None,
) -> None:
    """Compare the sampled rows' newest states with what extrapolation gave, where anything asks for it.

    states: the layer's, of all rows; None where it is held whole. own: every part's attention to its own keys, where
    that is a piece of the output: it is the probe then.
    """
    config, rows = held.config, held.rows
    any_fresh = any(any(row) for row in held.fresh[index])
    if not held.measuring or not (any_fresh or config.adaptive or config.audit):
        return
    queries = q[:, rows.index]
    probing = config.adaptive or config.audit or own is not None  # else nothing asks for drift
    if own is not None:
        probe = at_rows(own, rows.index)
    else:
        probe = near(queries, k, v, rows.parts, config.backend) if probing else AttnState.empty_like(queries)
    meter, ahead = held.meters[index], held.ahead[index]
    if not any_fresh and not config.audit:
        held.sums[index] = meter.glance(AttnState(probe.out.float(), probe.lse), ahead)
        return
    if config.audit:
        sampled = _computed(held, queries, Keys(held.layout, q, k, v, None, config.backend))
    elif states is None:
        sampled = [AttnState.empty_like(queries)]
    else:
        sampled = [at_rows(state, rows.index) for state in states]
    new = AttnState(
        torch.stack([state.out.float() for state in (*sampled, probe)]),
        torch.stack([state.lse for state in (*sampled, probe)]),
    )
    fresh = held.fresh_mask[index]
    seen = torch.ones_like(fresh) if config.audit else fresh.clone()
    seen[:, -1] = probing
    again = any(flag for row in held.again[index] for flag in row)
    held.sums[index] = meter.observe(new, seen, fresh, ahead, again=again)


def near(queries: Tensor, k: Tensor, v: Tensor, parts: int, backend: str) -> AttnState:
    """The probe: sampled rows (B, R, H, D), part after part, against keys of their neighbourhood, here on any rank.

    Tokens are cut into as many equal runs as there are parts: on one process those are the parts but for some tiles at
    their ends. So all of it is one call on views; equal runs become a batch.
    """
    each = k.shape[1] // parts

    def cut(x: Tensor, rows: int) -> Tensor:
        return x[:, : parts * rows].unflatten(1, (parts, rows)).flatten(0, 1)

    found = attend(cut(queries, queries.shape[1] // parts), cut(k, each), cut(v, each), backend=backend)
    lse = found.lse.unflatten(0, (-1, parts)).transpose(1, 2).flatten(2)  # (B, H, R)
    return AttnState(found.out.unflatten(0, (-1, parts)).flatten(1, 2), lse)


def _computed(held: LayerStates, queries: Tensor, keys: Keys) -> list[AttnState]:
    """Every bundle's state of the sampled rows, computed for an audit whether it is held or not."""
    layout, config, first, found = held.layout, held.config, held.layout.mine[0], []
    for bundle in held.bundles:
        spans = [layout.keys(first + local, bundle, config.local) for local in range(len(held.spans))]
        pieces = [
            keys.attend(queries[:, held.rows.of(local)], rows, spans[local]) for local, rows in enumerate(held.spans)
        ]
        state = joined(pieces)
        found.append(AttnState(state.out, torch.zeros_like(state.lse)) if config.whole else state)
    return found
