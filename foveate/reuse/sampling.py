"""What sampled rows see at a step: the newest states of a layer on them, and their probe, for the meter to compare.

Shapes: B batch, S tokens of this process, R sampled rows, P its parts, H heads, G key/value heads, D head dim.
"""

import torch
from torch import Tensor

from foveate.attention import AttnState, attend
from foveate.reuse.branch import Branch
from foveate.reuse.keys import Keys, at_rows, joined


def measure(
    branch: Branch, index: int, q: Tensor, k: Tensor, v: Tensor, states: list[AttnState] | None, own: AttnState | None
) -> None:
    """Compare the sampled rows' newest states with what extrapolation gave, where anything asks for it.

    states: the layer's, of all rows; None where it is held whole. own: every part's attention to its own keys, where
    that is a piece of the output: it is the probe then.
    """
    config, rows = branch.config, branch.rows
    any_fresh = any(any(row) for row in branch.fresh[index])
    if not branch.measuring or not (any_fresh or config.adaptive or config.audit):
        return
    queries = q[:, rows.index]
    probing = config.adaptive or config.audit or own is not None  # else nothing asks for drift
    if own is not None:
        probe = at_rows(own, rows.index)
    else:
        probe = near(queries, k, v, rows.parts, config.backend) if probing else AttnState.empty_like(queries)
    meter, ahead = branch.meters[index], branch.ahead[index]
    if not any_fresh and not config.audit:
        branch.sums[index] = meter.glance(AttnState(probe.out.float(), probe.lse), ahead)
        return
    if config.audit:
        sampled = _computed(branch, queries, Keys(branch.layout, q, k, v, None, config.backend))
    elif states is None:
        sampled = [AttnState.empty_like(queries)]
    else:
        sampled = [at_rows(state, rows.index) for state in states]
    new = AttnState(
        torch.stack([state.out.float() for state in (*sampled, probe)]),
        torch.stack([state.lse for state in (*sampled, probe)]),
    )
    fresh = branch.fresh_mask[index]
    seen = torch.ones_like(fresh) if config.audit else fresh.clone()
    seen[:, -1] = probing
    again = any(flag for row in branch.again[index] for flag in row)
    branch.sums[index] = meter.observe(new, seen, fresh, ahead, again=again)


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


def _computed(branch: Branch, queries: Tensor, keys: Keys) -> list[AttnState]:
    """Every bundle's state of the sampled rows, computed for an audit whether it is held or not."""
    layout, config, first, found = branch.layout, branch.config, branch.layout.mine[0], []
    for bundle in branch.bundles:
        spans = [layout.keys(first + local, bundle, config.local) for local in range(len(branch.spans))]
        pieces = [
            keys.attend(queries[:, branch.rows.of(local)], rows, spans[local])
            for local, rows in enumerate(branch.spans)
        ]
        state = joined(pieces)
        found.append(AttnState(state.out, torch.zeros_like(state.lse)) if config.whole else state)
    return found
