"""What this machine can run, which backend attention takes, and why."""

import importlib.metadata
import os
import platform

import torch
from rich.table import Table

from foveate.attention import BACKENDS, choose_backend, unavailable

PACKAGES = ("foveate", "torch", "triton", "diffusers", "flash-attn-4", "av", "safetensors")


def examine() -> Table:
    """A table of machine, packages, and backends with the reason where one cannot run."""
    table = Table("what", "found", title="foveate doctor")
    for name, value in machine().items():
        table.add_row(name, value)
    for name, value in packages().items():
        table.add_row(name, value)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in BACKENDS:
        table.add_row(f"backend {name}", unavailable(name, device) or "ready")
    name, reason = choose_backend(device)
    table.add_row("auto takes", f"{name}: {reason}")
    return table


def machine() -> dict[str, str]:
    """Processor, cores, memory, Python, GPUs."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    found = {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "processor": f"{len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} torch threads",
        "memory": f"{pages / 2**30:.0f} GiB",
    }
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        capability = f"sm_{about.major}{about.minor}"
        found[f"GPU {index}"] = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, {capability}"
    return found


def packages() -> dict[str, str]:
    """Versions of the packages that matter."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
