"""The machine a command runs on: its device, its cores, and whether it is one process of many."""

import importlib.util
import os

import torch

RANKS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def pick_device(name: str) -> str:
    """`auto` is the GPU where there is one. ValueError for a device that does not exist, or not here."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"there is no device {name!r}; --device takes auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}, but torch sees no GPU here; use --device cpu, or see `foveate doctor`")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}, but this machine has {torch.cuda.device_count()} GPUs, counted from cuda:0")
    if device.type not in ("cpu", "cuda") and not _works(device):
        raise ValueError(f"--device {name} does not work here; it takes auto, cpu, cuda or cuda:N")
    return name


def _works(device: torch.device) -> bool:
    try:
        return bool(torch.ones(1, device=device).item() == 1)
    except (RuntimeError, NotImplementedError, AssertionError, ImportError):
        return False


def compiles(device: torch.device) -> bool:
    """Whether compiling pays by default: on GPUs, where torch.compile has the Triton that it needs."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def cores() -> int:
    """Cores that this process may use; all of the machine where the system does not tell (macOS, Windows)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def refuse_many_processes(command: str) -> None:
    """ValueError where torchrun, srun or mpirun started several of us, who would all write the same files."""
    for name in RANKS:
        if os.environ.get(name, "").strip() not in ("", "0", "1"):
            raise ValueError(
                f"`foveate {command}` is one process, and {name} is {os.environ[name]}: start it without torchrun, "
                "srun or mpirun. Many GPUs need a loop of your own, with fv.sparsify and fv.parallelize "
                "(examples/context_parallel.py)"
            )
