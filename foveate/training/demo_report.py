"""The page of a demo, from the files of its folder."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean

import numpy as np
from torch import Tensor

from foveate import quality
from foveate.data import to_uint8
from foveate.report import ClipPanel, ReportData, Speed, write_report
from foveate.training import folder
from foveate.training.checkpoint import load_weights
from foveate.training.demo_findings import SPEEDUP, TOLERANCE, Findings, checks, histories, switch_step
from foveate.training.recipes import TrainConfig
from foveate.training.record import LEVEL


def write(out: Path) -> Path:
    """`out`/report.html of the demo in `out`, which may not have turned sparse. ValueError where there is none."""
    found, clips = Findings.load(out)
    config, rows = folder.load_config(out / "sparse"), histories(out)
    return write_report(
        out / "report.html",
        ReportData(
            title="A small video model turns sparse",
            summary=summary(config, rows["sparse"], sum(found.spent.values())),
            made=made(found.made, found.version),
            figures=figures(found, rows["sparse"]) if found.losses else (),
            clips=panels(clips) if clips else (),
            clips_title="A held-out clip, denoised",
            clips_text=f"Each model gets the same clip under {100 * LEVEL:.0f} % noise, one that no run was trained "
            "on, and restores it with the attention that it was trained with.",
            speeds=[Speed(x.tokens, min(x.sparse), min(x.dense)) for x in found.timings],
            speed_limit=SPEEDUP,
            runs=rows,
            allowed=TOLERANCE,
            tolerance=config.sparsity.goal,
            held_out=held_out(found) if found.losses else {},
            kept=kept(out / "sparse"),
            checks=[(x.name, x.passed, x.detail) for x in checks(found, rows["sparse"])],
            tables=tables(config, found),
            notes=notes(),
        ),
    )


def made(when: str, version: str) -> str:
    """The line about when and by what."""
    day = datetime.fromisoformat(when)
    return f"{day.day} {day:%B %Y, %H:%M}, {version}"


def kept(run: Path) -> list[tuple[int, np.ndarray]]:
    """From plans.jsonl: what every head computes, each time that training acted on a plan that was new."""
    plans = [row for row in folder.rows(run / folder.PLANS) if row["active"] and "kept" in row]
    new = [row for before, row in zip([{}, *plans], plans, strict=False) if row["kept"] != before.get("kept")]
    return [(row["step"], np.asarray(row["kept"], float)) for row in new]


def summary(config: TrainConfig, history: Sequence[Mapping], seconds: float) -> str:
    switch = switch_step(history)
    tokens = config.model.grid(config.frames, config.height, config.width).tokens
    turn = "it never turned sparse" if switch is None else f"it turned sparse after step {switch}"
    return (
        f"{config.steps} steps on clips of {config.frames} frames, {config.height} × {config.width} pixels, {tokens:,} "
        f"tokens; {turn}. {seconds / 60:.1f} minutes in all."
    )


def figures(found: Findings, history: Sequence[Mapping]) -> list[tuple[str, str, str]]:
    """The headline row."""
    longest, sparse = found.timings[-1], [row["kept"] for row in history if row["kept"] < 1]
    return [
        ("Training step", f"{longest.faster:.2f}× faster", f"on clips of {longest.tokens:,} tokens"),
        ("Loss on held-out clips", f"{100 * found.gap('sparse'):+.2f} %", "against the same training without sparsity"),
        ("Attention computed", f"{100 * fmean(sparse):.0f} %", "of all comparisons, in sparse steps"),
        ("Chosen at random", f"{100 * found.gap('random'):+.1f} %", "loss, computing as much, but anything"),
    ]


def held_out(found: Findings) -> dict[str, list[tuple[float, float]]]:
    dense = found.losses["dense"]
    return {
        name: [(level, x / y - 1) for level, x, y in zip(found.levels, found.losses[name], dense, strict=True)]
        for name in ("sparse", "random")
    }


def panels(clips: Mapping[str, Tensor]) -> list[ClipPanel]:
    """A held-out clip, what the models were given, and what they make of it."""
    clip, dense = clips["clip"], clips["dense"]
    shown = [
        ClipPanel("The clip", to_uint8(clip), "held out: no run was trained on it", reference=True),
        ClipPanel("With noise", to_uint8(clips["noisy"]), f"{100 * LEVEL:.0f} %: what the models get"),
    ]
    for name, title in (("dense", "Dense"), ("sparse", "Sparse"), ("random", "Random tiles")):
        note = f"{quality.psnr(clips[name], clip):.1f} dB to the clip"
        if name != "dense":
            note += f", {quality.psnr(clips[name], dense):.1f} dB to dense"
        shown.append(ClipPanel(title, to_uint8(clips[name]), note, reference=name == "dense"))
    error = (8 * (clips["sparse"] - dense).abs() - 1).clamp(-1, 1)
    return [*shown, ClipPanel("Sparse minus dense, × 8", to_uint8(error), "black: no difference", derived=True)]


def tables(config: TrainConfig, found: Findings) -> dict[str, Mapping[str, object]]:
    keep = ("steps", "batch", "lr", "ema", "seed")
    tables: dict[str, Mapping[str, object]] = {
        "Machine": found.machine,
        "Versions": found.packages,
        "Run": {"command": found.command, **{name: getattr(config, name) for name in keep}},
        "Minutes": {name: f"{seconds / 60:.1f}" for name, seconds in found.spent.items()},
        "What sparsify was told": changed(config),
    }
    if config.start_from is not None and config.start_from.is_file():
        about = load_weights(config.start_from)[1]
        tables["Checkpoint it continues from"] = {k: v for k, v in about.items() if k != "model"}
    return tables


def changed(config: TrainConfig) -> dict[str, object]:
    """Dials of sparsity that are not as they come."""
    plain = type(config.sparsity)()
    return {name: value for name, value in vars(config.sparsity).items() if value != getattr(plain, name)}


def notes() -> list[str]:
    return [
        "A model of an hour's age is hardly sparse, and two processor cores do not train one from nothing in minutes: "
        "this run continues from a small checkpoint that was trained before on a GPU, on the training part of the same "
        "clips (the table below says how). Held-out clips are in neither.",
        "The dense and the random run share the sparse run's first steps, which are dense: they continue from its "
        "checkpoint there, which is bit for bit what training them from the first step gives.",
        "Steps are timed on one model in turns, sparse and dense, and the shortest time of each counts: other load on "
        "the machine makes steps longer, never shorter. dB is PSNR: higher is nearer.",
    ]
