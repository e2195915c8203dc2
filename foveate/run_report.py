"""`foveate report`: the page of a training run, or of a demo, from the files of its folder."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import median

from foveate import quality, video
from foveate.compare import run as comparison
from foveate.data import to_uint8
from foveate.generation.builtin import load_model, make_sparse
from foveate.generation.page import generated, of_clips
from foveate.report import ClipPanel, ReportData, write_report
from foveate.training import demo_report, folder
from foveate.training.demo_findings import FILE, switch_step
from foveate.training.flow import fixed_batches
from foveate.training.loop import choose_conditions, open_clips
from foveate.training.recipes import TrainConfig
from foveate.training.record import LEVEL, denoised
from foveate.version import described

log = logging.getLogger("foveate")

CALM = 5  # steps, of which the median is shown as the time of one


def report(run: Path, denoise_steps: int, device: str) -> Path:
    """Write `run`/report.html. ValueError where the folder holds neither a run nor a demo.

    A held-out clip is denoised in so many steps, dense and sparse, where weights and data are still there: a clip that
    cannot be made is left out, with a warning. 0: none.
    """
    if (run / FILE).is_file():
        return demo_report.write(run)
    if (run / comparison.FILE).is_file():
        return comparison.report(run)
    if generated(run):
        return write_report(run / "report.html", of_clips(run))
    if not (run / folder.CONFIG).is_file():
        raise ValueError(
            f"{run} holds no run: there is no {folder.CONFIG}, no {FILE} and no {comparison.FILE} in it, and no clip "
            "by `foveate generate`"
        )
    rows = folder.rows(run / folder.HISTORY)
    if not rows:
        raise ValueError(f"{run} holds a run of no steps yet: there is nothing to report")
    newest = datetime.fromtimestamp((run / folder.HISTORY).stat().st_mtime).astimezone()
    data = ReportData(
        title=f"Training run {run.resolve().name}",
        made=f"Last step on {newest.day} {newest:%B %Y, %H:%M}; report by {described()}",
        figures=figures(rows),
        clips=sampled_panels(run),
        clips_title="A held-out clip",
        runs={"sparse" if any(row["kept"] < 1 for row in rows) else "dense": rows},
        kept=demo_report.kept(run),
    )
    if folder.trains_a_pipeline(run):
        return write_report(
            run / "report.html", of_a_pipeline(data, json.loads((run / folder.CONFIG).read_text()), rows)
        )
    config = folder.load_config(run)
    shown = denoised_panels(config, denoise_steps, device) if denoise_steps else []
    tokens = config.model.grid(config.frames, config.height, config.width).tokens
    size = f"clips of {config.frames} frames, {config.height} × {config.width} pixels, {tokens:,} tokens"
    text = f"Denoised from {100 * LEVEL:.0f} % noise by the averaged weights; no step was trained on it."
    return write_report(
        run / "report.html",
        replace(
            data,
            summary=f"{progress(rows, config.steps, config.sparse)} Batches of {config.batch}, on {size}.",
            clips=[*shown, *data.clips],
            clips_text=text if shown else "",
            tolerance=config.sparsity.goal if config.sparse else None,
            tables=tables(config),
        ),
    )


def of_a_pipeline(data: ReportData, config: Mapping, rows: Sequence[Mapping]) -> ReportData:
    """A run that trains a transformer of diffusers. Its clips are latents: none is shown."""
    sparsity = config.get("sparsity") or {}
    told = {name: value for name, value in sparsity.items() if value is not None}
    dials = {name: value for name, value in config.items() if name != "sparsity" and value is not None}
    tables = {"Run": dials} | ({"What sparsify was told": told} if told else {})
    return replace(data, summary=progress(rows, config.get("steps"), bool(told)), tables=tables)


def progress(rows: Sequence[Mapping], steps: int | None, sparse: bool) -> str:
    """How far a run has come, and whether it is sparse, or why not."""
    switch = switch_step(rows)
    turn = "dense throughout" if switch is None else f"sparse after step {switch}"
    if sparse and switch is None:
        reason = next((row["reason"] for row in reversed(rows) if "reason" in row), "")
        turn = f"dense so far{': ' if reason else ''}{reason}"
    return f"{rows[-1]['step']:,}{f' of {steps:,}' if steps else ''} steps; {turn}."


def figures(rows: Sequence[Mapping]) -> list[tuple[str, str, str]]:
    """Loss, validation, and what sparse steps bring, where there are any. The newest of each."""
    last = rows[-1]
    newest = median(row["loss"] for row in rows[-CALM:])
    found = [("Training loss", f"{newest:.4g}", f"median of the last {CALM} steps")]
    judged = [row for row in rows if "validation" in row]
    if judged:
        found.append(("Loss on held-out clips", f"{judged[-1]['validation']:.4g}", f"at step {judged[-1]['step']:,}"))
    dense, sparse = ([row["seconds"] for row in rows if (row["kept"] < 1) == on] for on in (False, True))
    if sparse and len(dense) > 1:
        times = median(dense[1:]), median(sparse[-10 * CALM :])
        found.append(("Training step", f"{times[0] / times[1]:.2f}× faster", f"{times[1]:.3g} s for {times[0]:.3g} s"))
    else:
        found.append(("Training step", f"{median(row['seconds'] for row in rows[-10 * CALM :]):.3g} s", "median"))
    found.append(("Attention computed", f"{100 * last['kept']:.0f} %", f"of all comparisons, at step {last['step']:,}"))
    return found


def denoised_panels(config: TrainConfig, steps: int, device: str) -> list[ClipPanel]:
    """A held-out clip as the run's model restores it from noise, dense and, where it turned sparse, sparse."""
    try:
        clips, held_out = (open_clips(config, split) for split in ("train", "val"))
        conditions = choose_conditions(config, clips, held_out, None)
        batch = fixed_batches(held_out, 1, conditions=conditions)[0].to(device)
        model = load_model(config.out / folder.WEIGHTS, device)[0]
    except (ValueError, OSError, ImportError) as error:
        log.warning("the report is without a denoised clip: %s", error)
        return []
    clip = batch.clips[0].cpu()
    noisy, dense = (x[0].cpu() for x in denoised(model, batch.clips, batch.condition, steps=steps))
    note = f"{quality.psnr(dense, clip):.1f} dB to the clip"
    shown = [
        ClipPanel("The clip", to_uint8(clip), "held out", reference=True),
        ClipPanel("With noise", to_uint8(noisy), f"{100 * LEVEL:.0f} %: what the model gets"),
        ClipPanel("Denoised dense", to_uint8(dense), note, reference=True),
    ]
    if not (config.out / folder.SPARSE).is_dir():
        return shown
    make_sparse(model, config.out / folder.SPARSE)
    sparse = denoised(model, batch.clips, batch.condition, steps=steps)[1][0].cpu()
    note = f"{quality.psnr(sparse, clip):.1f} dB to the clip, {quality.psnr(sparse, dense):.1f} dB to dense"
    error = (8 * (sparse - dense).abs() - 1).clamp(-1, 1)
    return [
        *shown,
        ClipPanel("Denoised sparse", to_uint8(sparse), note),
        ClipPanel("Sparse minus dense, × 8", to_uint8(error), "black: no difference", derived=True),
    ]


def sampled_panels(run: Path) -> list[ClipPanel]:
    """What the newest of samples/ shows: a held-out clip, restored (by the built-in model), and one generated."""
    files = sorted((run / "samples").glob("step-*.mp4"))
    if not files:
        return []
    clip = video.probe(video.Clip(files[-1].name, files[-1]))
    frames, _ = video.decode(clip, 0, clip.frames)
    step = int(files[-1].stem.split("-")[1])
    names = (
        ("Held out", "Generated") if folder.trains_a_pipeline(run) else ("Held out", "Restored from noise", "Generated")
    )
    width = frames.shape[2] // len(names)
    return [
        ClipPanel(name, frames[:, :, place * width : (place + 1) * width], f"samples/, step {step:,}")
        for place, name in enumerate(names)
    ]


def tables(config: TrainConfig) -> dict[str, Mapping[str, object]]:
    """What was asked for, where it is not as it comes."""
    plain = TrainConfig(data=config.data, out=config.out)
    dials = {k: v for k, v in vars(config).items() if v != getattr(plain, k) and k not in ("model", "sparsity")}
    found: dict[str, Mapping[str, object]] = {"Run": {"data": config.data, "out": config.out, **dials}}
    found["Model"] = vars(config.model)
    if config.sparse:
        found["What sparsify was told"] = demo_report.changed(config) or {"all dials": "as they come"}
    return found
