"""Speed against fidelity of generation: ours and its peers on the small trained Wan, 50 steps with guidance.

    python benchmarks/bench_generate.py [--out benchmarks/results] [--quick] [--minutes 10] [--dtype float16]

Every method runs in diffusers' own WanPipeline from the same noise as the exact run, and is judged by the finished
video: PSNR and SSIM against that exact run, a video at a time. Its cost is the self-attention it really executed,
counted where kernels are called (query-key pairs over those of the exact run), and its time. Our schedules and
MagCache's ratios are calibrated on videos of their own; settings are chosen on others (those that no other of their
family beats in both fidelity and cost), and reported on yet others, of other prompts and seeds.

A gate comes first, and once more at the end: `quality=1` must give the plain pipeline's video and execute the same
attention, and a repeated plain run the same; or the exit code is 1. Not covered: several GPUs, and what bookkeeping
costs at real sizes (bench_reuse_overhead.py). The model is small and float32, so its times say little about large
models; on a CPU they are processor time. --quick is a small setting for CPUs. Writes generate_<machine>_<yyyymm>.json
and a plot; the last line printed is JSON.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import generation_methods as methods
import tiny_wan
import torch
from generation_methods import Method
from generation_summary import OURS, Outcome, chosen, plain, plot, print_table, targets, together

import foveate as fv
import foveate.attention
from foveate.kernels.bits import unpack
from foveate.quality import psnr, ssim
from foveate.tiles import TILE

SHARES = (0.24, 0.28, 0.32, 0.36, 0.4, 0.44, 0.48, 0.54, 0.6, 0.66, 0.72, 0.8)  # of the calls, of our schedules
GATE_DB = {"float32": 60.0, "float16": 30.0}  # dB that rounding alone leaves of equal runs, through all steps


@dataclass
class Counter:
    """Query-key pairs x heads x batch of self-attention executed since it was last set to 0."""

    pairs: int = 0


@contextmanager
def counting() -> Iterator[Counter]:
    """Count at the two places where kernels are called: torch's function (diffusers) and foveate's operator."""
    counter, plain, ours = Counter(), torch.nn.functional.scaled_dot_product_attention, foveate.attention._attend

    def by_head(query: Any, key: Any, *rest: Any, **options: Any) -> Any:
        if key.shape[2] > tiny_wan.WORDS:  # keys that are no text
            counter.pairs += query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        return plain(query, key, *rest, **options)

    def by_token(q: Any, k: Any, v: Any, words: Any, pooled: Any, *rest: Any) -> Any:
        batch, tokens, heads, _ = q.shape
        dense = batch * heads * tokens * k.shape[1]
        if words is None:
            counter.pairs += dense
        else:
            tiles = -(-k.shape[1] // TILE)
            kept = unpack(words, tiles).float().mean().item()
            means = 0 if pooled is None else batch * tokens * tiles * int(torch.as_tensor(pooled).expand(heads).sum())
            counter.pairs += round(dense * kept) + means
        return ours(q, k, v, words, pooled, *rest)

    changed: Any = foveate.attention
    torch.nn.functional.scaled_dot_product_attention, changed._attend = by_head, by_token
    try:
        yield counter
    finally:
        torch.nn.functional.scaled_dot_product_attention, changed._attend = plain, ours


@dataclass
class Bench:
    """The model, how to sample from it, and exact videos by (prompts, seeds)."""

    model: Any
    steps: int
    shape: tuple[int, int, int]
    counter: Counter
    exact: dict[Any, torch.Tensor] = field(default_factory=dict)

    def generate(self, method: Method, prompts: Sequence[str], seeds: Sequence[int]) -> tuple[torch.Tensor, Outcome]:
        pipe = tiny_wan.pipeline(copy.deepcopy(self.model))
        self.counter.pairs = 0
        with method.install(pipe) as handle:
            settle(self.model.device)
            clock = time.perf_counter if self.model.device.type == "cuda" else time.process_time  # CPUs are shared
            began = clock()
            latents = tiny_wan.generate(pipe, prompts, seeds, steps=self.steps, shape=self.shape)
            settle(self.model.device)
            seconds = clock() - began
            report = handle.report() if hasattr(handle, "report") else None
        moved = None
        if report is not None:  # where outputs are held, what is computed moves all that exact attention moves
            wanted = report.bytes_moved + report.bytes_saved
            moved = report.bytes_moved / wanted if wanted else report.computed
        done = Outcome(method.family, method.setting, [], [], float(self.counter.pairs), seconds, moved)
        return tiny_wan.to_clips(latents), done

    def judge(self, method: Method, prompts: Sequence[str], seeds: Sequence[int]) -> Outcome:
        """Against the exact run of the same noise, which is made when first asked for."""
        key = tuple(prompts), tuple(seeds)
        if key not in self.exact:
            self.exact[key] = self.generate(methods.exact()[0], prompts, seeds)[0]
        clips, outcome = self.generate(method, prompts, seeds)
        pairs = list(zip(clips, self.exact[key], strict=True))
        outcome.psnr, outcome.ssim = [psnr(a, b) for a, b in pairs], [ssim(a, b) for a, b in pairs]
        line = f"{method.name:44} {outcome.db:6.2f} dB  attention {outcome.attention / self.whole(len(clips)):6.3f}"
        print(f"{line}  {outcome.seconds:6.2f} s", flush=True)
        return outcome

    def whole(self, batch: int) -> float:
        """Pairs of an exact run: layers, heads, two branches, steps, tokens squared."""
        config = self.model.config
        tokens = self.shape[0] * (self.shape[1] // 4) * (self.shape[2] // 4)
        return batch * config.num_layers * config.num_attention_heads * 2.0 * self.steps * tokens**2


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gate(bench: Bench, prompts: Sequence[str], seeds: Sequence[int], least: float) -> dict[str, Any]:
    """Everything fresh is the plain pipeline; counted attention is all of it. Run first and, for leaks, last."""
    plain, ours = (bench.judge(method, prompts, seeds) for method in methods.exact())
    whole = bench.whole(len(prompts))
    green = min(plain.psnr) >= least and min(ours.psnr) >= least and plain.attention == ours.attention == whole
    return {"plain again, dB": min(plain.psnr), "quality 1, dB": min(ours.psnr), "least": least, "green": green}


@dataclass
class Prepared:
    """What runs on yet other videos gave: our calibration, and MagCache's ratios."""

    plan: Any = None
    ratios: list[float] = field(default_factory=list)


def prepare(bench: Bench, prompts: Sequence[str], seeds: Sequence[int]) -> Prepared:
    def run(pipe: Any) -> None:
        tiny_wan.generate(pipe, prompts, seeds, steps=bench.steps, shape=bench.shape)

    pipe = tiny_wan.pipeline(copy.deepcopy(bench.model))
    plan = fv.calibrate(pipe, lambda _: run(pipe), clips=1)  # a batch
    return Prepared(plan, methods.magnitudes(run, tiny_wan.pipeline(copy.deepcopy(bench.model)), bench.steps))


def schedules(ready: Prepared) -> dict[str, Any]:
    """Noise levels, and by share of the calls the steps that compute."""
    plan = ready.plan
    return {"sigmas": plan.sigmas, "anchors": {f"{share:g}": plan.schedule(share).anchors for share in SHARES}}


def candidates(steps: int, quick: bool, ready: Prepared) -> list[Method]:
    """Families in turn, so that a time limit leaves something of each: what does not fit is left out from the end."""
    found = every_candidate(steps, quick, ready)
    families = [[one for one in found if one.family == name] for name in dict.fromkeys(one.family for one in found)]
    return [one for row in zip_longest(*families) for one in row if one is not None]


def every_candidate(steps: int, quick: bool, ready: Prepared) -> list[Method]:
    if quick:
        return [
            *methods.fixed((2, 4)), *methods.by_quality((0.9,), (0.9,)), *methods.scheduled(ready.plan, (0.4, 0.55)),
            *methods.sea((0.3,)), *methods.mag(ready.ratios, (0.06,), (3,)),
            *methods.first_block((0.1, 0.3)),
            *methods.taylorseer((2,)), *methods.pab((2,), ((100, 900),)), *methods.cache_dit((0.2,), steps=steps),
            *methods.ditango((0.5,), steps=steps),
        ]  # fmt: skip
    return [
        *methods.fixed(methods.INTERVALS),
        *methods.by_quality((0.98, 0.96, 0.93, 0.9, 0.99, 0.85, 0.8, 0.7), (0.97, 0.93, 0.9, 0.85, 0.8, 0.7)),
        *methods.variants(), *methods.scheduled(ready.plan, SHARES), *methods.parts(ready.plan),
        *methods.nodes(methods.INTERVALS),
        *methods.sea((0.1, 0.2, 0.35, 0.6)), *methods.mag(ready.ratios, (0.03, 0.06, 0.12, 0.24), (2, 4)),
        *methods.first_block((0.01, 0.02, 0.03, 0.05, 0.08)), *methods.taylorseer((2, 3, 4, 5)),
        *methods.pab((2, 3, 4), ((100, 800), (0, 950))), *methods.cache_dit((0.02, 0.04, 0.07, 0.12), steps=steps),
            *methods.ditango((0.3, 0.5, 0.7, 0.9), steps=steps),
    ]  # fmt: skip


def divided(found: list[Method], file: Path | None) -> tuple[list[Method], list[Method]]:
    """Settings that need no choosing, as an earlier run chose them or as all are reported, and the rest."""
    before = [] if file is None else json.loads(file.read_text())["results"]
    names = {(x["family"], x["setting"]) for x in before if x["attention"] < 0.99}  # others skip nothing
    families = {x["family"] for x in before}
    always = "foveate schedule", methods.PARTS, methods.NODES
    settled = [one for one in found if one.family in always or (one.family, one.setting) in names]
    if file is not None:  # ours has changed since, and its settings are few
        settled += [one for one in found if one.family == "foveate" and one not in settled]
        families |= {"variant", "states, undamped"}
    settled.sort(key=lambda one: one.family not in (*always, "foveate"))  # ours first, should time run out
    return settled, [one for one in found if one not in settled and one.family not in families]


def choose(
    bench: Bench, tried: list[Method], batch: tuple[Any, Any], spent: Callable[[], bool]
) -> tuple[list[Outcome], dict[str, str]]:
    """Outcomes on the choosing seeds, and what a peer that broke said; an error of ours ends the run."""
    outcomes, failed = [], {}
    for method in tried:
        if spent():
            break
        try:
            outcomes.append(bench.judge(method, *batch))
        except Exception as error:
            if method.family in OURS:
                raise
            failed[method.name] = repr(error)
            print(f"{method.name} failed: {error!r}", flush=True)
    return outcomes, failed


def report(
    bench: Bench, picked: list[Method], batches: list[tuple[Any, Any]], spent: Callable[[], bool]
) -> list[Outcome]:
    """The chosen settings on the reported seeds, costs as shares of the exact run's."""
    exact = together([bench.judge(methods.exact()[0], *batch) for batch in batches])
    results = [exact]
    for method in picked:
        if spent():
            print(f"out of time: {method.name} and what follows were not reported", flush=True)
            break
        results.append(together([bench.judge(method, *batch) for batch in batches]))
    whole, seconds = exact.attention, exact.seconds
    for one in results:
        one.attention, one.seconds = one.attention / whole, one.seconds / seconds
    return results


def predictions(bench: Bench, prompts: Sequence[str], seeds: Sequence[int]) -> dict[str, float]:
    """How often the predicted error of held attention states is within 2 x of the actual one, if that is > 1e-3."""
    pipe = tiny_wan.pipeline(copy.deepcopy(bench.model))
    with methods.states(audit=True)(pipe) as handle:
        tiny_wan.generate(pipe, prompts, seeds, steps=bench.steps, shape=bench.shape)
        share, count = handle.report().within(2.0)
    return {"within 2 x": share, "of": count}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--quick", action="store_true", help="few settings, short clips, few steps: minutes on a CPU")
    parser.add_argument("--minutes", type=float, default=60.0, help="settings that do not fit are left out, and named")
    parser.add_argument("--dtype", choices=list(GATE_DB), default="float32", help="float16 has 40 dB of rounding")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--frames", type=int)
    parser.add_argument(
        "--prompts", type=int, help="in a reported batch, at most 4; half as many others to choose settings on"
    )
    parser.add_argument("--families", nargs="+", default=[""], help="those whose names begin so")
    parser.add_argument(
        "--chosen", type=Path, help="an earlier run's file: settings of families that it reports are those, unchosen"
    )
    parser.add_argument("--batches", type=int, default=1, help="of reported videos, other seeds each")
    parser.add_argument("--checkpoint", type=Path, default=tiny_wan.CHECKPOINT)
    options = parser.parse_args(arguments)
    began, device = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu"
    dtype = options.dtype
    steps, frames = options.steps or (20 if options.quick else 50), options.frames or (2 if options.quick else 12)
    count = options.prompts or (2 if options.quick else 4)
    model = tiny_wan.load(options.checkpoint, device=device, dtype=getattr(torch, dtype))
    prompts, others = tiny_wan.GAMES[::2][:count], tiny_wan.GAMES[1::2][: max(1, count // 2)]
    choosing = others, range(1000, 1000 + len(others))
    reported = [(prompts, range(first, first + len(prompts))) for first in range(0, 100 * options.batches, 100)]

    def spent(share: float) -> bool:
        return time.monotonic() - began > 60 * options.minutes * share

    with counting() as counter:
        bench = Bench(model, steps, (frames, tiny_wan.HEIGHT, tiny_wan.WIDTH), counter)
        checks = [gate(bench, *choosing, GATE_DB[dtype])]
        ready = prepare(bench, tiny_wan.GAMES[1::2][:count], range(2000, 2000 + count))
        tried = [
            one for one in candidates(steps, options.quick, ready) if one.family.startswith(tuple(options.families))
        ]
        settled, tried = divided(tried, options.chosen)
        outcomes, failed, results, said = [], {}, [], {}
        if checks[0]["green"]:
            outcomes, failed = choose(bench, tried, choosing, lambda: spent(0.45))
            results = report(bench, [*settled, *chosen(outcomes, tried)], reported, lambda: spent(0.95))
            said = targets(results) | {"predictions": predictions(bench, *reported[0])}
            checks.append(gate(bench, *choosing, GATE_DB[dtype]))
    card = torch.cuda.get_device_name().split()[-1].lower() if device == "cuda" else "cpu"
    reached = {(one.family, one.setting) for one in outcomes}
    left_out = [one.name for one in tried if (one.family, one.setting) not in reached]
    green = all(check["green"] for check in checks)
    whole = bench.whole(len(choosing[0]))
    record = {
        "machine": card, "dtype": dtype, "torch": torch.__version__, "steps": steps, "frames": frames, "gate": checks,
        "schedules": schedules(ready), "left out": left_out, "failed": failed, "targets": said,
        "chosen on": [{**vars(one), "dB": one.db, "attention": one.attention / whole} for one in outcomes],
        "results": [{**vars(one), "dB": one.db} for one in results],
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    stem = f"generate_{card}_{time.strftime('%Y%m')}"
    (options.out / f"{stem}.json").write_text(json.dumps(plain(record), indent=1))
    if green:
        plot(results, options.out / f"{stem}.png")
        print_table(results)
    print(json.dumps(plain({"green": green, "gate": checks, "left out": left_out, "failed": failed, "targets": said})))
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
