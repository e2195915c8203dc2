"""What this machine can run, which backend attention takes, and why."""

import importlib.metadata
import os
import platform

import torch

from foveate.attention import BACKENDS, choose_backend, unavailable
from foveate.training.machine import cores

PACKAGES = ("torch", "triton", "diffusers", "flash-attn-4", "safetensors", "av", "rich", "tyro", "matplotlib")


def examine() -> dict[str, str]:
    """Machine, packages, and backends with the reason where one cannot run; by name, in the order of reading."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = {f"backend {name}": unavailable(name, device) or "ready" for name in BACKENDS}
    chosen = ": ".join(choose_backend(device))
    return machine() | packages() | backends | {"auto takes": chosen}


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
