"""Does the loader of `foveate train --model` keep a 1.3B model at 32,760 tokens fed? Tokens a second of one replica.

    python benchmarks/bench_loader.py /tmp/loader [--out benchmarks/results/loader_cpu_202612.json]

Samples as `foveate encode` leaves them for Wan 2.1 at 81 x 480 x 832: latents 16 x 21 x 60 x 104, captions of 20 to 400
tokens of width 4,096, bfloat16. Needed are the tokens of a step over the shortest 32,768-token step of a Wan-1.3B shape
in benchmarks/results/train_step_h200_202611.json. The gate: each batch holds the stored bits and noise
drawn by (seed, step); a loader that begins in the middle gives the same bits; an epoch takes every sample once.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from foveate.finetune.encode import ABOUT, EMPTY, INDEX, shard_file
from foveate.finetune.encoded import Encoded, Forwards, Order
from foveate.training.flow import stream

SHAPE, WIDTH, LENGTH, TOKENS, SHARD = (16, 21, 60, 104), 4096, 512, 21 * 30 * 52, 32
STEPS = Path(__file__).parent / "results" / "train_step_h200_202611.json"


def write(folder: Path, count: int) -> None:
    """An encoding of random clips."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, rows = torch.Generator().manual_seed(0), []
    for number in range(count // SHARD):
        tensors = {}
        for place in range(SHARD):
            length = int(torch.randint(20, 400, (), generator=draw))
            tensors[f"latents.{place}"] = torch.randn(SHAPE, generator=draw).bfloat16()
            tensors[f"text.{place}"] = torch.randn(length, WIDTH, generator=draw).bfloat16()
            tensors[f"mask.{place}"] = torch.ones(length, dtype=torch.bool)
            rows.append({
                "shard": number, "place": place, "clip": f"{number}-{place}.mp4", "start": 0, "caption": "",
                "fps": 16.0, "shape": list(SHAPE), "tokens": TOKENS, "text": place, "text_tokens": length, "more": [],
            })  # fmt: skip
        save_file(tensors, shard_file(folder, number))
    save_file({"text": torch.zeros(1, WIDTH).bfloat16(), "mask": torch.ones(1, dtype=torch.bool)}, folder / EMPTY)
    (folder / INDEX).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / ABOUT).write_text(json.dumps({"pipeline": "WanPipeline", "shards": count // SHARD}))


def needed() -> float:
    """Tokens a second that the fastest measured step eats, sparse or dense."""
    for row in json.loads(STEPS.read_text())["summary"]:
        if row["tokens"] == 32768:
            sparse = [told["amortised_s"] for told in row.values() if isinstance(told, dict) and "amortised_s" in told]
            return row["tokens"] / min(row["dense_s"], *sparse)
    raise SystemExit(f"{STEPS} has no step of 32,768 tokens")


def gate(forwards: Forwards, folder: Path, order: Order) -> dict[str, bool]:
    middle = order.steps // 2
    [(sample, noise, u)] = next(iter(forwards.loader(range(middle, middle + 1), 0)))
    [(place,)] = order.step(middle)
    row = forwards.data.rows[place]
    kept = load_file(shard_file(folder, row["shard"]))
    draw = stream(order.seed, middle, 0)
    same_u, _ = torch.rand(1, generator=draw), torch.rand(1, generator=draw)
    begun = list(forwards.loader(range(middle + 1), 1))[-1][0]
    text = kept[f"text.{row['text']}"]
    stored = torch.equal(sample.latents[0], kept[f"latents.{row['place']}"].float())
    stored &= torch.equal(sample.text[0, : len(text)], text) and not sample.text[0, len(text) :].any()
    taken = sorted(place for step in range(order.steps) for [place] in order.step(step))
    return {
        "stored bits": stored,
        "noise by seed and step": torch.equal(u, same_u) and torch.equal(noise[0], torch.randn(SHAPE, generator=draw)),
        "the same from the middle": torch.equal(begun[0].latents, sample.latents) and torch.equal(begun[1], noise),
        "every sample once": taken == list(range(len(order.places))),
    }  # fmt: skip


def speed(forwards: Forwards, steps: int, workers: int) -> float:
    """Tokens a second of the steps behind the first, which starts the workers."""
    batches = iter(forwards.loader(range(steps), workers))
    next(batches)
    began = time.perf_counter()
    took = sum(len(u) * TOKENS for step in batches for _, _, u in step)
    return took / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--samples", type=int, default=4 * SHARD)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not (options.work / ABOUT).is_file():
        write(options.work, options.samples)
    data = Encoded(options.work)
    places = np.arange(len(data))
    order = Order(places, data.bucket, data.tokens, batch=1, micro=1, seed=0)
    forwards = Forwards(data, order, replica=0, replicas=1, drop=0.0, text_length=LENGTH)
    green, need = gate(forwards, options.work, order), needed()
    found = {f"{workers} workers": speed(forwards, order.steps, workers) for workers in (0, 1)}
    green |= {"three times what is needed": min(found.values()) >= 3 * need}
    times = {name: value / need for name, value in found.items()}
    told = {
        "tokens a second": found,
        "needed": need,
        "times": times,
        "samples": len(data),
        "threads": torch.get_num_threads(),
    }
    if options.out:
        options.out.write_text(json.dumps(told | {"gate": green}, indent=1) + "\n")
    print(json.dumps(told | {"gate": green}))
    sys.exit(0 if all(green.values()) else 1)


if __name__ == "__main__":
    main()
