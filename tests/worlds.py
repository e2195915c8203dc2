"""Real gloo processes for the tests of foveate/parallel, started once a size and used by many tests.

A task is a function of a test module, run by every rank with the same arguments; results come back by rank. A task that
hangs fails after a minute instead, and the world that hung is ended.
"""

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

PRELOAD = ["torch", "torch.distributed.fsdp", "foveate.parallel.handle", "foveate.held.handle", "foveate.models.dit"]
PRELOAD += [f"diffusers.models.transformers.{name}" for name in ("transformer_wan", "cogvideox_transformer_3d")]
PRELOAD += ["diffusers.pipelines.wan.pipeline_wan", "foveate.generation.run"]  # and transformers
LIMIT, START = 60.0, 240.0  # seconds a task may take, and the start of ranks beside other work


class World:
    """`size` processes with a gloo process group. `run(task, *args)` -> list of results by rank."""

    def __init__(self, size: int, timeout: float = LIMIT):
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        # A server that has imported torch once makes ranks start fast; but a fork of it could not use a GPU.
        context = mp.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        context.set_forkserver_preload(PRELOAD)
        store = str(Path(self._folder.name) / "store")
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, size, store, there, timeout), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self._started = False

    def run(self, task: Callable, *args: Any, limit: float = LIMIT) -> list[Any]:
        if not self._started:
            self._started = True
            self.run(os.getpid, limit=START)
        for pipe in self.pipes:
            pipe.send((task, args))
        found: dict[int, Any] = {}
        while len(found) < self.size:
            ready = wait([pipe for rank, pipe in enumerate(self.pipes) if rank not in found], limit)
            if not ready:
                missing = sorted(set(range(self.size)) - set(found))
                self.stop()
                raise TimeoutError(f"ranks {missing} of {self.size} have not answered in {limit:.0f} s")
            for pipe in ready:
                found[self.pipes.index(pipe)] = pipe.recv()
        failed = {rank: text for rank, (ok, text) in found.items() if not ok}
        if failed:
            self.stop()  # ranks that failed may have left others inside a collective
            raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items())))
        return [found[rank][1] for rank in range(self.size)]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class Worlds:
    """Worlds by size, started when first asked for and again after one has failed."""

    def __init__(self) -> None:
        self._made: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        if size not in self._made or not self._made[size].alive:
            self._made[size] = World(size)
        return self._made[size]

    def stop(self) -> None:
        for world in self._made.values():
            world.stop()


def serve(rank: int, size: int, store: str, pipe, timeout: float) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    options = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=timeout)}
    dist.init_process_group("gloo", init_method=f"file://{store}", **options)
    while True:
        try:
            task, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, task(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
