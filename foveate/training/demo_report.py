"""The demo's findings as a report. Shapes: L layers, H heads, K budgets of a profile."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from foveate import quality
from foveate.data import to_uint8
from foveate.report import ClipPanel, ReportData, write_report
from foveate.sparsity.profile import BUDGETS
from foveate.training.checkpoint import load_weights
from foveate.training.demo_runs import Check, Generated, Run, switch_step, times_faster
from foveate.training.doctor import machine, packages
from foveate.training.recipes import TrainConfig

SHARE_OF_MASS = 0.9


def write(path: Path, runs: list[Run], clips: dict[str, Generated], checks: list[Check], seconds: float) -> Path:
    """The page of a demo, finished or not."""
    config = runs[0].trainer.config
    return write_report(
        path,
        ReportData(
            title="foveate demo: a small video model turns sparse",
            summary=summary(config, switch_step(runs[0].history), seconds),
            figures=figures(runs, clips) if clips else (),
            checks=[(check.name, check.passed, check.detail) for check in checks],
            runs={run.name: run.history for run in runs},
            gap_limit=config.gap,
            profiles=profiles(config),
            density_means=f"Share of key tiles that hold {100 * SHARE_OF_MASS:.0f} % of the attention",
            clips=panels(runs, clips) if clips else (),
            tables=tables(config, seconds),
            notes=notes(),
        ),
    )


def summary(config: TrainConfig, switch: int | None, seconds: float) -> str:
    tokens = config.model.grid(config.frames, config.height, config.width).tokens
    turn = "it never turned sparse" if switch is None else f"it turned sparse after step {switch}"
    return (
        f"{config.steps} steps on clips of {config.frames} frames, {config.height} × {config.width} pixels, {tokens:,} "
        f"tokens; {turn}, computing {100 * config.budget:.0f} % of the attention tiles in "
        f"{config.model.depth - len(config.dense_layers)} of {config.model.depth} layers. "
        f"{seconds / 60:.1f} minutes in all."
    )


def figures(runs: list[Run], clips: dict[str, Generated]) -> list[tuple[str, str, str]]:
    """The headline row."""
    sparse, dense, random = runs
    gap, control = (100 * (run.validation / dense.validation - 1) for run in (sparse, random))
    exact, fast = clips["exact"], clips["sparse"]
    psnr = float(quality.psnr(fast.video, exact.video))
    return [
        (
            "Training step",
            f"{times_faster(runs):.2f}× faster",
            "sparse against dense, steps in turns, median",
        ),
        ("Validation loss", f"{gap:+.2f} %", "against the dense twin: same seed, same steps"),
        ("Random tiles", f"{control:+.1f} %", "the control: as many tiles, chosen at random"),
        (
            "Generation",
            f"{exact.seconds / fast.seconds:.2f}× faster",
            f"{psnr:.1f} dB PSNR to the same model run dense",
        ),
    ]


def profiles(config: TrainConfig) -> list[dict]:
    """profiles.jsonl as the report wants it: at each step (L, H) of recall and error at the run's budget, and need."""
    file = config.out / "profiles.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    error = "error_pool" if config.periphery == "pool" else "error_drop"
    found = []
    for line in lines:
        stacked = {name: np.array([layer[name] for layer in line["layers"]]) for name in ("recall_predicted", error)}
        recall = stacked["recall_predicted"]
        found.append(
            {
                "step": line["step"],
                "recall": at_budget(recall, config.budget),
                "error": at_budget(stacked[error], config.budget),
                "density": needed(recall, SHARE_OF_MASS),
            }
        )
    return found


def at_budget(values: np.ndarray, budget: float) -> np.ndarray:
    """(L, H, K) at the profile's budgets -> (L, H) at another, interpolated."""
    return np.apply_along_axis(lambda row: np.interp(budget, BUDGETS, row), -1, values)


def needed(recall: np.ndarray, share: float) -> np.ndarray:
    """(L, H): the budget at which recall (L, H, K) reaches `share`, interpolated; all tiles hold everything."""
    budgets = [0.0, *BUDGETS, 1.0]
    return np.apply_along_axis(
        lambda row: np.interp(share, [0.0, *np.maximum.accumulate(row), 1.0], budgets), -1, recall
    )


def panels(runs: list[Run], clips: dict[str, Generated]) -> list[ClipPanel]:
    """Generated clips side by side, and a real one."""
    exact = clips["exact"].video
    shown = []
    for name, title in (
        ("sparse", "sparse training, sparse attention"),
        ("exact", "the same model, dense attention"),
        ("dense twin", "the dense twin"),
    ):
        made = clips[name]
        note = f"{made.seconds:.1f} s"
        if name != "exact":
            psnr, error = quality.psnr(made.video, exact), quality.relative_error(made.video, exact)
            note += f"; to the middle clip {float(psnr):.1f} dB PSNR, relative error {float(error):.3f}"
        shown.append(ClipPanel(title, to_uint8(made.video), note=note))
    real = runs[0].trainer.validation[0].clips[0]
    return [*shown, ClipPanel("a real clip, held out", to_uint8(real), note="from the validation part")]


def tables(config: TrainConfig, seconds: float) -> dict[str, Mapping[str, object]]:
    keep = (
        "budget",
        "dense_layers",
        "periphery",
        "rank",
        "steps",
        "batch",
        "lr",
        "gap",
        "stage1",
        "check_every",
        "seed",
    )
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
        "The dense twin and the random control share the sparse run's first stage, which is dense: they continue from "
        "its checkpoint at the switch, which is bit for bit what training them from the first step gives.",
    ]
