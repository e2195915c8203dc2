"""A job of many ranks: how it starts, how its model is sharded by FSDP2, and how whole weights come back.

Weights are sharded over all ranks, context-parallel ones too: the mean of gradients over all of them is the one that
context parallelism wants (shard.py). Weights are computed with in `dtype`, gradients are reduced in float32.
"""

import os
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foveate.models import adapters
from foveate.parallel.comm import TIMEOUT
from foveate.parallel.hosts import adopt_launcher


def launched() -> bool:
    """Whether torchrun, srun or mpirun started several of us; then torchrun's variables are set."""
    adopt_launcher()
    return int(os.environ.get("WORLD_SIZE") or 1) > 1


def start(device: str, timeout: float = TIMEOUT) -> torch.device:
    """Join the job, where that is not done yet, and this rank's device; gloo too beside NCCL, for checkpoints."""
    cuda = device != "cpu" and torch.cuda.is_available()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    if not cuda:
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK") or 0)
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def rank_and_size() -> tuple[int, int]:
    """This process's, 0 and 1 where it is alone."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def saving_group() -> Any:
    """A group of its own for checkpoints that are written beside training. None where this process is alone."""
    return dist.new_group(backend="gloo", group_desc="foveate checkpoints") if dist.is_initialized() else None


def wait_for_all(group: Any) -> None:
    """Until every rank is here."""
    if group is not None:
        dist.barrier(group)


def shard(model: nn.Module, device: torch.device, dtype: torch.dtype, over: str = "all") -> None:
    """`fully_shard` a transformer, block by block. over: "all" ranks, or those of a "host", repeated on each host.

    Time embeddings that the model keeps in float32 stay so. ValueError where hosts have unequal numbers of ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    size = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or size)
    if over == "host" and size % local:
        raise ValueError(f"--shard host: {size} ranks are not whole hosts of {local}; use --shard all")
    shape = (size // local, local) if over == "host" and size > local else (size,)
    names = ("hosts", "ranks")[-len(shape) :]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    low = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    kept = {name for name in getattr(model, "_keep_in_fp32_modules", None) or () if name.endswith("embedder")}
    for name, module in model.named_modules():
        if low is not None and name.rpartition(".")[2] in kept:
            fully_shard(module, mesh=mesh, mp_policy=exact)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, as the adapter's row names them; none where it does not."""
    sharding = adapters.find(model).sharding
    if sharding is None:
        return []
    return [m for name, m in model.named_modules() if re.fullmatch(sharding.blocks, adapters.clean_name(name))]


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's part of each, sharing its memory."""
    from torch.distributed.tensor import DTensor

    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sharded tensors as whole ones on the CPU, on rank 0; empty elsewhere. On all ranks alike."""
    from torch.distributed.tensor import DTensor

    rank, _ = rank_and_size()
    found = {}
    for name, x in tensors.items():
        full = x.full_tensor() if isinstance(x, DTensor) else x
        if rank == 0:
            found[name] = full.detach().cpu()
    return found
