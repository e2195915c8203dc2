"""What a pipeline's weights take, whether they fit, and what to do where memory ran out, with numbers."""

from typing import Any

import torch
from torch import nn

GIB = 2**30


def sizes(pipe: Any) -> dict[str, int]:
    """Bytes of the weights of each part of a pipeline, the largest first."""
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    found = {name: sum(x.nbytes for x in (*part.parameters(), *part.buffers())) for name, part in parts.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def needed(parts: dict[str, int], offload: str) -> int:
    """Bytes of weights that are on the device at once."""
    if offload == "sequential":
        return 0
    return max(parts.values(), default=0) if offload == "model" else sum(parts.values())


def check(parts: dict[str, int], offload: str, free: int | None) -> None:
    """ValueError where the weights alone do not fit in what is free; None: not known."""
    if free is None or needed(parts, offload) <= free:
        return
    raise ValueError(
        f"the weights take {told(needed(parts, offload))} ({described(parts)}), and {told(free)} of the device are "
        f"free: {ways_out(parts, offload, True)}"
    )


def ways_out(parts: dict[str, int], offload: str, tiled: bool, stage: str = "") -> str:
    """What takes less memory, the nearest remedy first. stage: what ran when memory ran out."""
    ways = []
    if not tiled and stage in ("", "decoding"):
        ways.append("--tiled (the video is decoded in tiles)")
    if offload == "none":
        ways.append(f"--offload model (weights on the device: {told(needed(parts, 'model'))} in place of "
                    f"{told(needed(parts, 'none'))})")  # fmt: skip
    if offload != "sequential":
        ways.append("--offload sequential (a layer at a time, slow)")
    ways.append("fewer --frames, or a smaller --height and --width")
    ways.append("more ranks for a clip (torchrun)")
    return "try " + "; ".join(ways)


def advice(parts: dict[str, int], offload: str, tiled: bool, stage: str, error: BaseException) -> str:
    """A sentence for a person whose device ran out of memory while doing `stage`."""
    peak = f", at most {told(torch.cuda.max_memory_allocated())} in use" if torch.cuda.is_available() else ""
    why = str(error).partition("\n")[0].partition(". ")[0]
    return f"while {stage}: {why}{peak}; weights {described(parts)}. {ways_out(parts, offload, tiled, stage)}"


def free_bytes(device: torch.device) -> int | None:
    """What is free on the device now; None on one that does not say."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def described(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {told(size)}" for name, size in parts.items() if size) or "none"


def told(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
