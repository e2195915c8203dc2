"""`foveate generate` with a diffusers pipeline: check everything, load, place, spread, make each clip and write it.

Sparse attention, context parallelism and reuse go into the pipeline in this order and stay for all of its clips.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from foveate.attention import Dense
from foveate.data import write_mp4
from foveate.generation import memory, pipeline, ranks
from foveate.generation.config import GenerateConfig
from foveate.generation.film import about, whole
from foveate.generation.jobs import Job, jobs, rate
from foveate.generation.progress import watching
from foveate.held.config import ReuseConfig
from foveate.held.handle import ReuseHandle, reuse, transformers
from foveate.held.team import Degrees
from foveate.models import adapters
from foveate.parallel.handle import ParallelConfig, parallelize
from foveate.parallel.hosts import ask_hosts
from foveate.sparsity.artifact import load_sparse
from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.handle import sparsify

log = logging.getLogger("foveate")

DENSE_STEPS = 3  # denoising steps that are dense and show which tiles matter, where nothing was trained


@dataclass(frozen=True)
class Ready:
    """What `generate_clips` needs besides its jobs."""

    pipe: Any
    handle: ReuseHandle
    spread: ranks.Spread
    fps: float


def generate_clips(
    config: GenerateConfig, out: Path, console: Console, *, overwrite: bool = False, skip_existing: bool = False
) -> list[Path]:
    """Make every clip that the flags ask for and return the files that this process wrote.

    out: an MP4, or with --prompts a folder. ValueError, before anything is loaded where it can be known then, for what
    cannot be done. Under torchrun all ranks call it alike.
    """
    cls, index = pipeline.find_class(config)
    takes = pipeline.parameters(cls)
    todo = jobs(config, out, takes, overwrite=overwrite, skip_existing=skip_existing)
    if not todo:
        console.print("every clip is there already")
        return []
    with ranks.joined(config.device) as device:
        cfg = 2 if config.cfg_parallel else 1
        able = spreadable(cls, index)
        team = ranks.spread(ranks.share(ranks.world(), len(todo), cfg, config.ranks_per_video, able))
        mine = todo[team.team :: team.teams]
        if not mine:
            return []
        pipe = pipeline.load(cls, index, config, device, encoded=all(job.embeds is not None for job in todo))
        for job in mine:
            pipeline.check_call(pipe, job)
        pipeline.place(pipe, config, device)
        with installed(pipe, config, team, cfg) as handle:
            ready = Ready(pipe, handle, team, rate(config, cls.__name__, takes))
            return [job.out for job in mine if make(job, ready, config, console)]


def spreadable(cls: type, index: dict[str, Any]) -> bool:
    """Whether context parallelism knows this pipeline's transformer."""
    name = (index.get("transformer") or [None, None])[1]
    return any(row.model == name and row.sharding is not None for row in adapters.TABLE)


@contextmanager
def installed(pipe: Any, config: GenerateConfig, team: ranks.Spread, cfg: int) -> Iterator[ReuseHandle]:
    """Sparse attention, context parallelism and reuse, as the flags say, until the end of the `with`."""
    with ExitStack() as stack:
        for model in transformers(pipe).values():
            if config.budget is not None:
                stack.callback(sparse(model, config.budget).remove)
            if team.size > 1 and known(model):
                stack.callback(spread_model(model, team.size, cfg).remove)
        how: dict[str, Any] = {"cfg": cfg, "ranks": "together" if team.size > 1 else "independent"}
        if config.schedule is not None:
            how["schedule"] = config.schedule
        else:
            how["quality"] = config.quality or 1.0
        yield stack.enter_context(reuse(pipe, ReuseConfig(**how)))


def sparse(model: nn.Module, budget: float | Path) -> Any:
    """Sparse attention from training's folder, or of a share of the tiles that the first steps choose."""
    if isinstance(budget, Path):
        return load_sparse(model, budget)
    return sparsify(model, SparsityConfig(budget=budget, training_free_steps=DENSE_STEPS))


def known(model: nn.Module) -> bool:
    try:
        return adapters.find(model).sharding is not None
    except ValueError:
        return False


def spread_model(model: nn.Module, size: int, cfg: int) -> Any:
    """Context parallelism over the ranks of one branch of one clip."""
    found = adapters.installed(model)
    if found is None:
        with adapters.install(model, Dense()) as seen:
            heads = seen.heads
    else:
        heads = found.heads
    degrees = Degrees.choose(ReuseConfig(cfg=1), heads, size // cfg, min(size // cfg, ask_hosts().together))
    return parallelize(
        model, ParallelConfig(head=degrees.head, sequence=degrees.sequence, plan="fixed", check_inputs=False)
    )


def share(handle: ReuseHandle) -> str:
    """Of the clip that is being made; empty where nothing is ever held."""
    return "" if handle.config.exact else f"{handle.report().hit_rate:.0%} held"


def make(job: Job, ready: Ready, config: GenerateConfig, console: Console) -> bool:
    """One clip. True where this rank wrote it."""
    pipe, handle = ready.pipe, ready.handle
    quiet = console if ready.spread.writes else Console(quiet=True)
    with watching(quiet, job.out.name, lambda: share(handle)) as bar:
        pipe.progress_bar = bar
        try:
            pictures = pipeline.call(pipe, job)
        except (torch.OutOfMemoryError, MemoryError) as error:
            told = memory.advice(memory.sizes(pipe), config.offload, config.tiled, bar.stage, error)
            raise torch.OutOfMemoryError(told) from error
        finally:
            del pipe.progress_bar
    if not ready.spread.writes:
        return False
    report = handle.report()
    found = job.about | {"pipeline": type(pipe).__name__, "held": round(report.hit_rate, 4)}
    with whole(job.out) as partial:
        write_mp4(partial, pictures, ready.fps, about(found))
    console.print(f"{job.out.name}: {report.hit_rate:.0%} of the model's calls held")
    if config.cfg_parallel and len({record.branch for record in report.steps}) < 2:
        log.warning("--cfg-parallel: this clip has no second branch of guidance, so all ranks computed the same one")
    return True
