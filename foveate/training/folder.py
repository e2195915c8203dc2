"""The folder of a run: whose it is, whether it can be written, what may change when the run goes on.

config.json       the configuration, absolute paths        checkpoints/    the newest, and switch/ for good
history.jsonl     a row a step                             plans.jsonl     what sparsify decided, and why
model.safetensors, sparse/                                 samples/, events/   where asked for
report.html      where asked for                           skipped.json     files of the data that are not used, and why
"""

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from foveate.training.recipes import TrainConfig

log = logging.getLogger("foveate")

CONFIG, HISTORY, PLANS, SKIPPED = "config.json", "history.jsonl", "plans.jsonl", "skipped.json"
CHECKPOINTS, SWITCH = "checkpoints", "switch"
WEIGHTS, SPARSE = "model.safetensors", "sparse"
SIGNS = (CONFIG, HISTORY, WEIGHTS, CHECKPOINTS)  # any of them: here was a run
OWN = (
    CONFIG, HISTORY, PLANS, SKIPPED, WEIGHTS, "sparse/predictors.safetensors", "sparse/sparse.json",
    "samples/step-*.mp4", "events/events.out.tfevents.*", "report.html",
    "wandb.txt",
)  # fmt: skip
OWN_FOLDERS = ("checkpoints/*step-*", "switch/step-*")
MAY_CHANGE = {
    "out", "steps", "device", "workers", "validate_every", "validation_clips", "checkpoint_every", "keep",
    "sample_every", "tensorboard", "wandb", "compile", "capture",
}  # fmt: skip


def check(out: Path, *, resume: bool = False, overwrite: bool = False, need: int = 0) -> None:
    """Whether a run may write into `out`, before any work is done and without a trace.

    need: bytes that its checkpoints will take. Raises ValueError, with what to do, for a folder that cannot be written,
    a disk that is too full, or a folder that holds a run (unless it is resumed or overwritten).
    """
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is a file, so {out} cannot be a folder; give another --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{there} cannot be written (read-only, or not yours); give another --out")
    free = shutil.disk_usage(there).free
    if free < need:
        raise ValueError(
            f"{there} has {free / 2**30:.1f} GiB free, the checkpoints of this run need {need / 2**30:.1f}; "
            "give another --out, or keep fewer by --keep"
        )
    if resume or overwrite:
        return
    held = [name for name in SIGNS if (out / name).exists()]
    if held:
        raise ValueError(
            f"{out} already holds a run ({', '.join(held)}). Go on with it by --resume, replace it by --overwrite, "
            "or give another --out"
        )


@contextmanager
def claimed(out: Path, *, overwrite: bool) -> Iterator[None]:
    """`out` as this process's own for the length of a `with`; ValueError where another one trains there."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / ".lock"
    with path.open("a+") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # no such locks on this system
            pass
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                log.warning("%s cannot be locked (%s): nothing keeps a second run out of it", out, error)
            else:
                file.seek(0)
                raise ValueError(f"process {file.read().strip()} trains into {out} now; give another --out") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        if overwrite:
            clear(out)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def clear(out: Path) -> None:
    """Remove what a run wrote, and nothing else."""
    for pattern in OWN:
        for file in out.glob(pattern):
            file.unlink()
    for pattern in OWN_FOLDERS:
        for folder in out.glob(pattern):
            if (folder / "state.json").is_file():
                shutil.rmtree(folder)


def list_skipped(out: Path, skipped: Sequence[tuple[str, str]]) -> None:
    """skipped.json: every file of the data that is not used, with the reason; the log shows only some of many."""
    if skipped:
        (out / SKIPPED).write_text(json.dumps(list(skipped), indent=1, ensure_ascii=False))
        log.info("%d files of the data are not used: %s says why", len(skipped), out / SKIPPED)


class Config(Protocol):
    """What a run's folder has to know of a configuration. MAY_CHANGE: dials beside those here that may."""

    @property
    def out(self) -> Path: ...
    def to_dict(self) -> dict[str, Any]: ...
    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Any: ...


def load_config(out: Path, kind: type[Config] = TrainConfig) -> Any:
    """The configuration of the run in `out`, to be resumed there. ValueError where there is none."""
    file = out / CONFIG
    if not file.is_file():
        raise ValueError(f"{out} holds no run to resume: there is no {CONFIG} in it; train without --resume first")
    return kind.from_dict({**json.loads(file.read_text()), "out": str(out)})


def trains_a_pipeline(out: Path) -> bool:
    """Whether the run in `out` trains a diffusers pipeline, not the built-in model."""
    try:
        return isinstance(json.loads((out / CONFIG).read_text()).get("model"), str)
    except (OSError, ValueError, AttributeError):
        return False


def changes(config: Config, allow: Sequence[str] = ()) -> list[str]:
    """What differs between a configuration and that of the run it resumes, each as `name: before -> now`.

    Raises ValueError naming the flags that would make another run of it and are not in `allow`.
    """
    before, now = (_flat(found.to_dict()) for found in (load_config(config.out, type(config)), config))
    unknown = sorted(set(allow) - set(now))
    if unknown:
        raise ValueError(f"there is no dial {', '.join(unknown)} that could change; there are {', '.join(now)}")
    differ = [name for name in now if before.get(name) != now[name]]
    lines = {name: f"{name}: {before.get(name)} -> {now[name]}" for name in differ}
    may = MAY_CHANGE | getattr(type(config), "MAY_CHANGE", set())
    refused = [name for name in differ if name not in may and name not in allow]
    if refused:
        flags = ", ".join(f"--{name.replace('_', '-')} ({lines[name]})" for name in refused)
        raise ValueError(
            f"the run in {config.out} was begun with other values: {flags}. Leave them out (--resume reads the run's "
            f"own), or insist: --allow-change {' '.join(refused)}"
        )
    return [line for name, line in lines.items() if name != "out"]


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Dials of model and sparsity by their dotted names."""
    flat = {}
    for name, value in values.items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def rows(file: Path) -> list[dict]:
    """The rows of a JSON-lines file; a last line that was torn by a kill is left out."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def keep_until(file: Path, step: int) -> None:
    """Drop the rows of a JSON-lines file after `step`: they were written, but their checkpoint was not."""
    if file.exists():
        text = "".join(json.dumps(row) + "\n" for row in rows(file) if row["step"] <= step)
        fresh = file.with_suffix(".partial")
        fresh.write_text(text)
        os.replace(fresh, file)
