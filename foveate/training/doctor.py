"""What this machine can run, which backend attention takes, and why."""

import importlib.metadata
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from foveate import costs
from foveate.attention import BACKENDS, choose_backend, unavailable
from foveate.training.machine import cores

PACKAGES = ("torch", "triton", "diffusers", "flash-attn-4", "safetensors", "av", "rich", "tyro", "matplotlib")


def examine() -> dict[str, str]:
    """Machine, packages, and backends with the reason where one cannot run; by name, in the order of reading."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = {f"backend {name}": unavailable(name, device) or "ready" for name in BACKENDS}
    prices = costs.here(torch.device(device)) if device == "cuda" else costs.Costs("")
    chosen = {"auto takes": ": ".join(choose_backend(device, prices.tile)), "sparse tiles": tiles(prices)}
    return machine() | packages() | backends | chosen


def renew(say: Callable[[str], object]) -> Path:
    """Measure this machine's cost table; the file."""
    from foveate.training.measure import measure

    return measure(torch.device("cuda" if torch.cuda.is_available() else "cpu"), say)


def tiles(prices: costs.Costs) -> str:
    """The tiles that sparse attention takes here, and what flash-attn-4 would bring where it is not installed."""
    taken = f"{prices.tile} tokens"
    if prices.tile == 64:
        other, reason = replace(prices, absent=frozenset()).faster_tile()
        return f"{taken}; 128 with flash-attn-4 (pip install 'foveate[fa4]'): {reason}" if other == 128 else taken
    return f"{taken}: {prices.faster_tile()[1]}"


def machine() -> dict[str, str]:
    """Processor, cores, memory, Python, GPUs."""
    found = {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "processor": f"{cores()} cores, {torch.get_num_threads()} torch threads",
        "memory": memory(),
    }
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        capability = f"sm_{about.major}{about.minor}"
        found[f"GPU {index}"] = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, {capability}"
    return found


def memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (AttributeError, ValueError, OSError):  # a system that does not tell
        return "unknown"


def packages() -> dict[str, str]:
    """Versions of the packages that matter."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
