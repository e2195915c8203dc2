"""The demo's findings as a report."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from foveate import quality
from foveate.data import to_uint8
from foveate.report import ClipPanel, ReportData, write_report
from foveate.training.checkpoint import load_weights
from foveate.training.demo_runs import Check, Restored, Run, Timing, switch_step
from foveate.training.doctor import machine, packages
from foveate.training.recipes import TrainConfig
from foveate.training.record import LEVEL


def write(
    path: Path,
    runs: list[Run],
    timings: Sequence[Timing],
    restored: Restored | None,
    checks: list[Check],
    seconds: float,
) -> Path:
    """The page of a demo, finished or not."""
    config = runs[0].trainer.config
    return write_report(
        path,
        ReportData(
            title="foveate demo: a small video model turns sparse",
            summary=summary(runs, seconds),
            figures=figures(runs, timings) if timings else (),
            checks=[(check.name, check.passed, check.detail) for check in checks],
            runs={run.name: run.history for run in runs},
            gap_limit=config.sparsity.goal,
            clips=panels(restored) if restored else (),
            tables=tables(config, seconds),
            notes=notes(),
        ),
    )


def summary(runs: list[Run], seconds: float) -> str:
    config, switch = runs[0].trainer.config, switch_step(runs[0].history)
    tokens = config.model.grid(config.frames, config.height, config.width).tokens
    turn = "it never turned sparse" if switch is None else f"it turned sparse after step {switch}"
    return (
        f"{config.steps} steps on clips of {config.frames} frames, {config.height} × {config.width} pixels, {tokens:,} "
        f"tokens; {turn}. {seconds / 60:.1f} minutes in all."
    )


def figures(runs: list[Run], timings: Sequence[Timing]) -> list[tuple[str, str, str]]:
    """The headline row."""
    sparse, dense, random = runs
    gap, control = (100 * (run.validation / dense.validation - 1) for run in (sparse, random))
    last = [row["kept"] for row in sparse.history][-1]
    longest = timings[-1]
    return [
        ("Training step", f"{longest.faster:.2f}× faster", f"at {longest.tokens:,} tokens, sparse against dense"),
        ("Validation loss", f"{gap:+.2f} %", "against the same training without sparsity"),
        ("Attention computed", f"{100 * last:.0f} %", "of all pairs of tiles, in the last step"),
        ("Random tiles", f"{control:+.1f} %", "loss with as many tiles, chosen at random"),
    ]


def panels(restored: Restored) -> list[ClipPanel]:
    """A held-out clip, what the models were given, and what they make of it."""
    dense = restored.by["dense"]
    shown = [
        ClipPanel("Held-out clip", to_uint8(restored.clip), note="from the part that no run was trained on"),
        ClipPanel("What the models get", to_uint8(restored.noisy), note=f"{100 * LEVEL:.0f} % noise"),
    ]
    for name, title in (
        ("dense", "Trained and run dense"),
        ("sparse", "Trained and run sparse"),
        ("random", "Random tiles"),
    ):
        made = restored.by[name]
        note = f"{float(quality.psnr(made, restored.clip)):.1f} dB PSNR to the held-out clip"
        if name != "dense":
            note += f", {float(quality.psnr(made, dense)):.1f} dB to the dense one"
        shown.append(ClipPanel(title, to_uint8(made), note=note))
    error = 8 * (restored.by["sparse"] - dense).abs() - 1
    return [*shown, ClipPanel("Sparse minus dense, × 8", to_uint8(error.clamp(-1, 1)), note="black: no difference")]


def tables(config: TrainConfig, seconds: float) -> dict[str, Mapping[str, object]]:
    keep = ("steps", "batch", "lr", "ema", "seed", "sparsity")
    tables: dict[str, Mapping[str, object]] = {
        "Machine": {**machine(), "threads": torch.get_num_threads(), "minutes": f"{seconds / 60:.1f}"},
        "Versions": packages(),
        "Run": {"command": " ".join(sys.argv), **{name: getattr(config, name) for name in keep}},
    }
    if config.start_from is not None:
        about = load_weights(config.start_from)[1]
        tables["Checkpoint it continues from"] = {k: v for k, v in about.items() if k != "model"}
    return tables


def notes() -> list[str]:
    return [
        "A model of an hour's age is hardly sparse, and two processor cores do not train one from nothing in minutes: "
        "this run continues from a small checkpoint that was trained before on a GPU, on the training part of the same "
        "clips (the table below says how). Validation clips are in neither.",
        "The dense and the random run share the sparse run's first steps, which are dense: they continue from its "
        "checkpoint there, which is bit for bit what training them from the first step gives.",
    ]
