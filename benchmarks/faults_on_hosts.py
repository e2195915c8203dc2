"""What a training run does when something breaks, on emulated hosts: who is named, when, how it ends, what is left.

    sudo python benchmarks/faults_on_hosts.py [--faults killed,hung,unplugged,slow,restarted] [--out FILE]

Two hosts of two ranks (emulated_hosts.py) train the own DiT under context parallelism over all four, with a checkpoint
after every step. Then, after a few steps: a rank is killed, a rank is stopped (SIGSTOP), a host's link goes down, a
host gets slow (its ranks wait before every step). `restarted`: a rank is killed and torchrun has --max-restarts 3.
The last line is JSON: by fault the seconds until a message names it, the message, exit codes by host, and the step of
the checkpoint that is left, read back whole.
"""

import argparse
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from emulated_hosts import Hosts, why_not

FAULTS = ("killed", "hung", "unplugged", "slow", "restarted")
VICTIM = 3  # world rank, the second of host 1
STEPS, BREAKS_AT = 12, 3
NAMES = {
    "killed": rf"rank {VICTIM} did not answer|rank.*{VICTIM}.*(SIGKILL|Signal 9)|exitcode +: -9",
    "hung": rf"rank {VICTIM} did not answer",
    "unplugged": r"rank 2, 3 did not answer|store does not answer",
    "slow": r"slow: a step takes rank 2 \(host 1.*3 \(host 1",
    "restarted": r"failed \(exitcode: -9\) local_rank: 1",
}


def job(folder: Path, timeout: float, steps: int) -> None:
    """One rank. Goes on from the checkpoint that the folder holds."""
    import foveate as fv
    from foveate.models.dit import DiTConfig, VideoDiT

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = VideoDiT(DiTConfig(width=96, depth=2, heads=3, patch=(1, 2, 2), mlp_ratio=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    first, saved = 0, folder / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        first = state["step"]
        print(f"rank {rank}: goes on from step {first}", flush=True)
    parallel = fv.parallelize(model, fv.ParallelConfig(sequence=dist.get_world_size(), timeout=timeout))
    for step in range(first, steps):
        time.sleep(0.2 if not ((folder / "slow").exists() and rank >= 2) else 1.0)
        draw = parallel.generator(0, step)
        clip = torch.randn(1, 3, 4, 16, 16, generator=draw)
        model(clip, torch.rand(1, generator=draw)).square().mean().backward()
        parallel.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
        parallel.step()
        if rank == 0:  # beside the old one, then in its place
            torch.save({"model": model.state_dict(), "step": step + 1}, folder / "part")
            os.replace(folder / "part", saved)
    dist.destroy_process_group()


def try_fault(fault: str, timeout: float, limit: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, Hosts(2, mbit=200, limit=limit) as hosts:
        folder, log = Path(name), Path(name) / "log"
        steps = 10_000 if fault in ("hung", "killed", "unplugged", "slow") else STEPS
        job = [__file__, "--job", str(folder), "--timeout", str(timeout), "--steps", str(steps)]
        with log.open("w") as told:
            hosts.start(2, job, 3 * (fault == "restarted"), stdout=told, stderr=subprocess.STDOUT)
            _until(lambda: _step(folder) >= BREAKS_AT, limit / 2, "the job does not begin", log)
            began = time.monotonic()
            if fault in ("killed", "restarted", "hung"):
                kill = signal.SIGSTOP if fault == "hung" else signal.SIGKILL
                os.kill(int((folder / f"pid{VICTIM}").read_text()), kill)
            elif fault == "unplugged":
                hosts.unplug(1)
            else:
                (folder / "slow").touch()
            _until(lambda: re.search(NAMES[fault], log.read_text()), limit, f"{fault} is not named", log)
            named = time.monotonic() - began
            if fault == "slow":
                hosts.stop()
                codes: list[int | None] = []
            else:
                codes = hosts.wait()
        ended = time.monotonic() - began
        found = re.search(f".*(?:{NAMES[fault]}).*", log.read_text())
        left = torch.load(folder / "checkpoint.pt")
        whole = all(bool(x.isfinite().all()) for x in left["model"].values())
        return {
            "named_s": round(named, 1), "message": found.group()[:200] if found else "", "exit_codes": codes,
            "ended_s": round(ended, 1), "checkpoint_step": left["step"], "checkpoint_whole": whole,
            "went_on": "goes on from step" in log.read_text(),
        }  # fmt: skip


def _step(folder: Path) -> int:
    try:
        return torch.load(folder / "checkpoint.pt")["step"]
    except FileNotFoundError:
        return 0


def _until(done: Any, limit: float, what: str, log: Path) -> None:
    end = time.monotonic() + limit
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} in {limit:.0f} s:\n{log.read_text()[-4000:]}")
        time.sleep(0.3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--timeout", type=float, default=90.0, help="of a collective, in seconds")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one fault")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.job, options.timeout, options.steps)
        return 0
    reason = why_not()
    if reason:
        parser.error(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed
    found: dict[str, Any] = {}
    for fault in options.faults.split(","):
        found[fault] = try_fault(fault, options.timeout, options.limit)
        print(f"{fault}: {found[fault]}", flush=True)
    result = {"what": "2 hosts of 2 ranks, own DiT, gloo", "timeout_s": options.timeout, **found}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
