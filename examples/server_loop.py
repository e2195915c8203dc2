"""A server's loop: requests of changing size, steps and guidance through one pipeline, some cancelled in mid-run.

    python examples/server_loop.py --requests 30 --check

`foveate.reuse` and `foveate.sparsify` are called once, when the server starts; every request begins anew by itself.
Here the model is a tiny Wan with random weights, so that it runs on a CPU. --check makes every finished clip once more
in a process of its own that has made nothing before, and compares bit by bit; memory must not grow. Exit code 1 where
one of them fails.
"""

import argparse
import gc
import multiprocessing
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from torch import Tensor

import foveate as fv


@dataclass(frozen=True)
class Request:
    """cancel: the step after which the client goes away; None: it stays."""

    seed: int
    height: int
    width: int
    steps: int
    guidance: float
    cancel: int | None


SPARE = 4096  # bytes: requests of more steps, and of other sizes, have longer tables


class Cancelled(Exception):  # noqa: N818 - not an error
    """The client has gone away."""


def model() -> WanTransformer3DModel:
    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=8,
        freq_dim=8, ffn_dim=64, num_layers=1, rope_max_seq_len=32,
    ).eval()  # fmt: skip


def start() -> tuple[Any, fv.ReuseHandle]:
    """What a server does once: the pipeline, sparse attention, reuse."""
    none: Any = None
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe = WanPipeline(
        tokenizer=none, text_encoder=none, vae=none, scheduler=scheduler, transformer=model()  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    fv.sparsify(pipe.transformer, fv.SparsityConfig(budget=0.5, training_free_steps=2, force=True))
    return pipe, fv.reuse(pipe, fv.ReuseConfig(interval=2))  # by quality with trained weights


@torch.inference_mode()
def answer(pipe: Any, request: Request) -> Tensor:
    """The clip of a request. Raises Cancelled."""

    def after_step(_: Any, step: int, time: Any, given: dict[str, Any]) -> dict[str, Any]:
        if request.cancel is not None and step >= request.cancel:
            raise Cancelled
        return given

    draw = torch.Generator().manual_seed(request.seed)
    text = {name: torch.randn(1, 6, 8, generator=draw) for name in ("prompt_embeds", "negative_prompt_embeds")}
    return pipe(
        **text, height=request.height, width=request.width, num_frames=5, num_inference_steps=request.steps,
        guidance_scale=request.guidance, generator=draw, output_type="latent", callback_on_step_end=after_step,
    ).frames  # fmt: skip


def alone(request: Request) -> Any:
    """The clip of a request that is the first and last of its process, as an array."""
    torch.set_num_threads(1)
    return answer(start()[0], request).numpy()


def requests(count: int, seed: int) -> Iterator[Request]:
    draw = random.Random(seed)
    for number in range(count):
        steps = draw.randint(4, 7)
        cancel = draw.randrange(steps - 1) if draw.random() < 0.3 else None
        height, width = draw.choice(((64, 128), (128, 64), (128, 128)))
        yield Request(number, height, width, steps, draw.choice((1.0, 3.0, 6.0)), cancel)


def tensors() -> int:
    """Bytes of all tensors alive."""
    gc.collect()
    return sum(x.nbytes for x in gc.get_objects() if type(x) is Tensor)


def resident() -> float:
    """MiB of this process, where the system says; else 0."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * 4096 / 2**20 if file.exists() else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="compare every finished clip with a fresh process's")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in the other processes: sums in another order are other sums
    others = multiprocessing.get_context("forkserver")
    others.set_forkserver_preload([Path(__file__).stem])  # each is a fork of one that has imported this, and no more
    pipe, handle = start()
    finished = cancelled = different = 0
    shares, alive, rss = [], [], []
    for request in requests(options.requests, options.seed):
        try:
            clip = answer(pipe, request)
            finished += 1
            shares.append(handle.report().hit_rate)
            if options.check:
                with ProcessPoolExecutor(1, mp_context=others) as fresh:
                    different += not torch.equal(clip, torch.from_numpy(fresh.submit(alone, request).result()))
            del clip
        except Cancelled:
            cancelled += 1
        handle.forget()
        alive.append(tensors())
        rss.append(resident())
    half = len(alive) // 2
    grown = max(alive[half:]) - max(alive[:half])
    print(
        f"{finished} finished, {cancelled} cancelled, {different} differ from a fresh process; "
        f"{sum(shares) / len(shares):.0%} of the calls held; tensors grew by {grown} bytes, "
        f"the process by {rss[-1] - rss[half]:.1f} MiB in the second half"
    )
    return 0 if not different and grown <= SPARE else 1


if __name__ == "__main__":
    sys.exit(main())
