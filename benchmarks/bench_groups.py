"""Whether groups of keys pay: near ones fresh and far ones held, against whole layers and outputs, over a slow link.

    sudo python benchmarks/emulated_hosts.py --hosts 2 --ranks 2 --mbit 16 -- benchmarks/bench_groups.py --mbit 16

The small trained Wan on two emulated hosts of two ranks, heads shared inside a host, keys exchanged between them. For
every setting: PSNR of the clip against that of exact context parallelism in the same run, the bytes that the hosts'
interfaces sent, and the time. The exact run is repeated, and must give the same clip. All ranks share this machine's
cores, so times mean little; `link share` is the time that the sent bytes take at the link's rate, over the run's.
Writes groups_<hosts>x<ranks>_cpu_<yyyymm>.json; the last line printed is JSON.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import tiny_wan
import torch
import torch.distributed as dist
from emulated_hosts import DEVICE

import foveate as fv
from foveate.parallel.hosts import ask_hosts
from foveate.quality import psnr

SENT = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")


def settings(intervals: list[int]) -> dict[str, dict[str, Any]]:
    shared: dict[str, Any] = {"warmup": 3}
    found: dict[str, dict[str, Any]] = {"exact": {"quality": 1.0}, "exact again": {"quality": 1.0}}
    for n in intervals:
        found[f"outputs, every {n}"] = {"interval": n, **shared}
        found[f"whole layers, every {n}"] = {"hold": "attention", "interval": n, **shared}
        near = {"hold": "attention", "interval": n, "groups": 2, "local": "fresh", **shared}
        found[f"near fresh, far every {n}"] = near
    return found


def sent_by_hosts(hosts: tuple[int, ...]) -> float:
    """Bytes that left any host until now, all hosts together."""
    mine = int(SENT.read_text()) if SENT.exists() else 0
    told: list[Any] = [None] * len(hosts)
    dist.all_gather_object(told, mine)
    return float(sum(told[hosts.index(host)] for host in sorted(set(hosts))))


def generate(config: dict[str, Any], shape: tuple[int, int, int], steps: int) -> torch.Tensor:
    pipe = tiny_wan.pipeline(tiny_wan.load())
    with fv.reuse(pipe, fv.ReuseConfig(**config)):
        return tiny_wan.generate(pipe, tiny_wan.GAMES[:1], [0], steps=steps, shape=shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--intervals", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--mbit", type=float, default=16, help="rate of a host's link, as emulated_hosts.py has it")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    hosts = ask_hosts().of
    shape, rows = (options.frames, tiny_wan.HEIGHT, tiny_wan.WIDTH), []
    clips: dict[str, torch.Tensor] = {}
    for name, config in settings(options.intervals).items():
        dist.barrier()
        before, began = sent_by_hosts(hosts), time.monotonic()
        clips[name] = tiny_wan.to_clips(generate(config, shape, options.steps))
        dist.barrier()
        seconds = time.monotonic() - began
        row = {"setting": name, "dB": psnr(clips[name][0], clips["exact"][0]), "seconds": seconds}
        sent = (sent_by_hosts(hosts) - before) / 1e6
        share = 8 * sent / len(set(hosts)) / options.mbit / seconds
        rows.append(row | {"link MB": sent, "link share": share})
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
    green = torch.equal(clips["exact"], clips["exact again"])
    if dist.get_rank() == 0:
        record = {
            "hosts": hosts,
            "frames": options.frames,
            "steps": options.steps,
            "mbit": options.mbit,
            "green": green,
            "rows": rows,
        }
        record = json.loads(json.dumps(record).replace("Infinity", '"inf"'))
        name = f"groups_{len(set(hosts))}x{hosts.count(0)}_cpu_{time.strftime('%Y%m')}.json"
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / name).write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record))
    dist.destroy_process_group()
    raise SystemExit(0 if green else 1)


if __name__ == "__main__":
    main()
