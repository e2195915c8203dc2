"""Generation on several hosts: reuse of held outputs against exact context parallelism, end to end, by the video.

    torchrun --nproc-per-node 8 benchmarks/bench_cluster_generate.py                               # GPUs, NCCL
    python benchmarks/emulated_hosts.py --hosts 2 --ranks 2 --mbit 20 -- \\
        benchmarks/bench_cluster_generate.py --frames 4 --steps 30 --wait 0.2 [--out FILE]         # emulated hosts

The small trained Wan (tiny_wan.py) makes one video by context parallelism over all ranks: exact (`quality=1`), and with
reuse at --quality. One rank's own video is the gate: exact may differ from it by rounding only. PSNR is against exact.

--wait: ranks of emulated hosts share cores, so a block takes at least as many seconds as a device would that needs so
many for the whole sequence, divided by the ranks that share it: numbers are computed for real, time is a wait where
that is longer. Exchanges are real. Run on one host and on two: seconds of the first over twice those of the second are
the efficiency. On two hosts also with `cfg=2`, each host computing its own branch of the guidance.
"""

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import tiny_wan
import torch.distributed as dist
from bench_cluster import join

import foveate as fv
from foveate.parallel.comm import TRAFFIC
from foveate.parallel.hosts import ask_hosts
from foveate.quality import psnr

PROMPT, SEED, GATE = "pong", 3, 45.0  # dB: what exact ranks and one rank may differ by, after all steps


class Waits:
    """Blocks that take `seconds` at least, besides what they wait for other ranks: that is not computing."""

    def __init__(self, blocks: Any, seconds: float):
        self.seconds, self._own = seconds, 0.0
        for block in blocks:
            block.register_forward_pre_hook(self._begin)
            block.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._own = time.perf_counter() - TRAFFIC.waited

    def _end(self, *_: Any) -> None:
        own = time.perf_counter() - TRAFFIC.waited - self._own
        time.sleep(max(0.0, self.seconds - own))


def run(model: Any, config: fv.ReuseConfig | None, options: argparse.Namespace, wait: float) -> dict[str, Any]:
    """One video; `config` None: by this rank alone."""
    pipe = tiny_wan.pipeline(copy.deepcopy(model))
    if wait:
        Waits(pipe.transformer.blocks, wait)
    handle = None if config is None else fv.reuse(pipe, config)
    shape = options.frames, tiny_wan.HEIGHT, tiny_wan.WIDTH
    TRAFFIC.reset()
    if handle is not None:
        dist.barrier()
    began = time.perf_counter()
    latents = tiny_wan.generate(pipe, [PROMPT], [SEED], steps=options.steps, shape=shape)
    seconds = time.perf_counter() - began
    found = {"seconds": seconds, "waited": TRAFFIC.exposed_seconds(), "mb_sent": TRAFFIC.total / 1e6, "clip": latents}
    if handle is not None:
        found["computed"] = handle.report().computed
        handle.remove()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=tiny_wan.FRAMES, help="of 480 tokens each")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--quality", type=float, default=0.96)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds of a block on one rank")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    device = join()
    ranks, hosts = dist.get_world_size(), len(set(ask_hosts().of))
    model = tiny_wan.load(device=device)
    wait = options.wait / ranks
    rows = {"exact": run(model, fv.ReuseConfig(quality=1.0), options, wait)}
    rows["reuse"] = run(model, fv.ReuseConfig(quality=options.quality), options, wait)
    if hosts == 2:  # a branch of the guidance on each host: only predictions cross the link
        rows["exact, cfg=2"] = run(model, fv.ReuseConfig(quality=1.0, cfg=2), options, 2 * wait)
        rows["reuse, cfg=2"] = run(model, fv.ReuseConfig(quality=options.quality, cfg=2), options, 2 * wait)
    alone = run(model, None, options, 0.0)["clip"] if dist.get_rank() == 0 else None
    dist.barrier()
    code = 0
    if alone is not None:
        clips = {name: tiny_wan.to_clips(row.pop("clip")) for name, row in rows.items()}
        gate = psnr(clips["exact"], tiny_wan.to_clips(alone))
        result = {
            "what": f"{options.frames * 480} tokens, {options.steps} steps, two branches", "ranks": ranks,
            "hosts": hosts, "wait_s": options.wait, "quality": options.quality, "gate_db": gate, "rows": rows,
            "times_faster": rows["exact"]["seconds"] / rows["reuse"]["seconds"],
            "exact_waits": rows["exact"]["waited"] / rows["exact"]["seconds"],
            "psnr": {name: psnr(clip, clips["exact"]) for name, clip in clips.items() if name != "exact"},
            "month": time.strftime("%Y-%m"),
        }  # fmt: skip
        code = 0 if gate >= GATE else 1
        if options.out and not code:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(
            json.dumps(result) if not code else f"the gate is red: exact ranks and one rank agree to {gate:.1f} dB only"
        )
    dist.barrier()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
