"""Sparse training on many ranks: the lines of examples/own_loop.py, and context parallelism, marked. Any backend.

torchrun --nproc-per-node 2 examples/context_parallel.py [--head 1] [--sequence 2] [--steps 40]
"""

import argparse
import logging

import torch
import torch.distributed as dist
from own_loop import moving_pattern
from torch.distributed.fsdp import fully_shard

import foveate as fv
from foveate.models.dit import DiTConfig, VideoDiT


def main(head: int, sequence: int, steps: int):
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_node_local_rank())
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(0)  # the same weights everywhere
    model = VideoDiT(DiTConfig(width=64, depth=2, heads=2, patch=(1, 2, 2))).to(device)
    config = fv.SparsityConfig(tolerance=0.02, warmup=10, learn_from=5, often=5, rare=20)
    sparse = fv.sparsify(model, config)  # 1: ranks decide alike
    parallel = fv.parallelize(model, fv.ParallelConfig(head=head, sequence=sequence))  # 2: after sparsify
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)  # over all ranks: its mean of gradients is the one that context parallelism wants
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        clip = moving_pattern(step * parallel.ranks.replicas + parallel.replica).to(device)  # 3: data by replica
        draw = parallel.generator(0, step)  # 4: noise and noise level are the same inside a replica
        noise, sigma = (torch.randn(clip.shape, generator=draw).to(device), torch.rand(1, generator=draw).to(device))
        loss = (model((1 - sigma) * clip + sigma * noise, sigma) - (noise - clip)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sparse.step()
        parallel.step()  # 5: plans anew from time to time
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        print(sparse)
        print(parallel.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    main(options.head, options.sequence, options.steps)
