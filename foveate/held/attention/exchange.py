"""Who needs whose keys at one layer of one step: one schedule for anchors and for steps in between. Pure.

All ranks work it out from the same plan, so nobody tells anybody what is wanted. In round d every rank may receive from
the rank d places before it; rounds in which nobody does are left out, and so is every shard that nobody uses.
"""

from collections.abc import Sequence

from foveate.held.attention.layout import Layout, Span


def needed(layout: Layout, bundles: Sequence[Span], fresh: Sequence[Sequence[bool]], local: str) -> list[list[int]]:
    """The parts whose keys each part must be sent, ascending. fresh: by part and bundle."""
    found = []
    for part in range(layout.parts):
        spans = [
            span for b, bundle in enumerate(bundles) if fresh[part][b] for span in layout.keys(part, bundle, local)
        ]
        if local == "fresh":
            spans.append(layout.group(layout.group_of[part]))
        others = (other for other in range(layout.parts) if other != part)
        found.append([other for other in others if any(a <= layout.bounds[other] < b for a, b in spans)])
    return found


def rounds(needs: Sequence[Sequence[int]]) -> list[tuple[int, list[bool]]]:
    """(d, by rank whether it receives from the rank d places before) of every round in which somebody does."""
    parts = len(needs)
    found = []
    for away in range(1, parts):
        receives = [(rank - away) % parts in needs[rank] for rank in range(parts)]
        if any(receives):
            found.append((away, receives))
    return found
