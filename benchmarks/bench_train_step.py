"""Whole training steps of a Wan-1.3B-shaped transformer on one card: dense against sparse, in one process.

    python benchmarks/bench_train_step.py [--out benchmarks/results] [--peers attention_h200_202611.json]
    python benchmarks/bench_train_step.py --device cpu --toy --tokens 2048 --layerwise 4096      # seconds, no GPU

diffusers' WanTransformer3DModel with random weights in bfloat16 (1536 wide, 12 heads x 128, 30 layers, feed-forward
8960, 512 text tokens), random latents, a flow-matching loss, fused AdamW, and a checkpoint a block. `dense` is the
model as diffusers runs it, with the fastest dense attention of torch here (cuDNN's and flash are timed first); `dense,
flash-attn-4` has that kernel, where it is installed, by foveate's processors. The
sparse runs are the same model object after `foveate.sparsify` in its fixed-budget mode, at two settings:

    DSV-like       layers 0, 1, 2, 3 and the last dense, the others 2.6 % kept (arXiv 2502.07590)
    uniform        10 % kept in every layer

A step is forward, backward, optimiser, and the handle's step. `checkpoint`: with `attention` the recomputation of a
block takes attention outputs from memory, dense and sparse alike, which is the fastest where they fit; `block`
recomputes everything. Lessons of the predictors and measurements of the controller are timed by themselves and
charged to the sparse step at their cadence (`amortised_s`). Of lengths in --layerwise one layer is timed, and the sum
over the model's layers is labelled as such. With --peers, a result of bench_attention.py, the dense step with
flash-attn-4 is computed from the ratio of the two kernels there, and labelled too.

Gates, in the same run: sparse attention at budget 1.0 must have gradients as exact as dense attention's (against
float32), and the tiles really computed in each layer are counted. Exits with 1 where a gate is red.

Times are wall-clock seconds with the device synchronised, medians. The JSON is rewritten after every row.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from train_step_model import FIRST_MEASURED, TOY, WAN, Batch, Model, Shape, Timing, dense_attention
from train_step_parts import dense_ms, lesson_ms
from train_step_summary import DENSE, DENSE_FA4, DSV, STAGE1, UNIFORM, Setting, peers, plot, summary

import foveate as fv
from foveate.attention import unavailable
from foveate.tiles import CUBE, TILE

SLACK = 1.2  # a sparse gradient's error may be so many times the dense one's


# Gates


@contextmanager
def counted(handle: fv.Handle) -> Iterator[dict[int, float]]:
    """The kept fraction that each layer's kernel is called with, as the forwards in a `with` find it."""
    found: dict[int, Any] = {}
    policy: Any = handle.policy
    compute = policy.compute

    def watch(layer: Any, mode: str, selection: Any, *qkv: Tensor) -> Any:
        if layer.index not in found:
            found[layer.index] = 1.0 if selection is None else selection.density().mean()
        return compute(layer, mode, selection, *qkv)

    policy.compute = watch
    try:
        yield found
    finally:
        del policy.compute
        found.update({index: float(kept) for index, kept in found.items()})


def check_kept(kept: dict[int, float], setting: Setting, layers: int, tokens: int, tile: int = TILE) -> None:
    """Every layer must have computed what the setting says, to the nearest tile."""
    dense = setting.dense_layers(layers)
    tiles = tokens // tile
    for index in range(layers):
        wanted = 1.0 if setting.budget is None or index in dense else max(1, round(setting.budget * tiles)) / tiles
        if abs(kept[index] - wanted) > 0.5 / tiles:
            raise GateError(f"{setting.name}: layer {index} kept {kept[index]:.4f} of the tiles, not {wanted:.4f}")


class GateError(RuntimeError):
    """A result is wrong: no speed is reported."""


def gate(shape: Shape, tokens: int, device: str, attention: SDPBackend | None, query_tile: int) -> dict[str, float]:
    """Relative L2 errors of all gradients against float32: dense attention in bfloat16, and sparse at budget 1.0."""
    model = Model(shape, 2, device, attention)
    model.checkpoint("attention")
    batch = Batch.of(shape, tokens, device, torch.bfloat16)
    exact = Model(shape, 2, device, None)
    exact.net.float()
    reference = gradients(exact, Batch(*(x.float() for x in vars(batch).values())))
    dense = gradients(model, batch)
    config = fv.SparsityConfig(budget=1.0, warmup=1, learn_from=1, query_tile=query_tile, tile_shape=CUBE, force=True)
    handle = fv.sparsify(model.net, config)
    gradients(model, batch)  # the dense call from which predictors begin
    handle.step()
    before = handle.policy.computed["sparse"]
    sparse = gradients(model, batch)
    if handle.policy.computed["sparse"] - before != 4:  # two layers, and once more in the recomputation
        raise GateError(f"the sparse kernel ran {handle.policy.computed['sparse'] - before} times, not 4")
    handle.remove()
    found = {"dense": dense, "sparse": sparse}
    errors = {name: float((x - reference).norm() / reference.norm()) for name, x in found.items()}
    if not errors["sparse"] <= SLACK * errors["dense"]:
        raise GateError(f"errors of gradients against float32: {errors}")
    return errors


def gradients(model: Model, batch: Batch) -> Tensor:
    model.net.zero_grad(set_to_none=True)
    with dense_attention(model.attention):
        batch.loss(model.net).backward()
    return torch.cat([weight.grad.flatten().double() for weight in model.net.parameters() if weight.grad is not None])


# The run


class Bench:
    """Rows of results, rewritten to disk after each, and the time that is left."""

    def __init__(self, options: argparse.Namespace, shape: Shape):
        self.options, self.shape, self.device = options, shape, options.device
        self.deadline = time.monotonic() + options.seconds
        self.rows: list[dict] = []
        self.facts: dict[str, Any] = {
            "what": f"Wan-shaped, {shape.layers} layers, {shape.heads} heads x {shape.dim}, ffn {shape.ffn}, bfloat16",
            "card": card(self.device), "torch": torch.__version__, "month": time.strftime("%Y-%m"),
            "layers": shape.layers, "query_tile": options.query_tile,
        }  # fmt: skip
        self.attention: SDPBackend | None = None
        self.need: dict[str, float] = {}  # name -> seconds that a further run of its kind takes, at most

    def late(self, what: str, seconds: float) -> bool:
        """Whether a part of that many seconds no longer fits; it is named then."""
        if time.monotonic() + seconds <= self.deadline:
            return False
        self.add({"what": what, "skipped": f"out of time, needs {seconds:.0f} s"})
        return True

    def add(self, row: dict) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self.write()

    def write(self) -> None:
        if self.options.out:
            self.options.out.mkdir(parents=True, exist_ok=True)
            result = {**self.facts, "summary": summary(self.rows, self.shape.layers, peers(self.options.peers))}
            text = json.dumps({**result, "rows": self.rows}, indent=1)
            self.file("json").write_text(text + "\n")

    def file(self, kind: str) -> Path:
        parts = ["train_step", self.options.tag, self.facts["card"], self.facts["month"].replace("-", "")]
        return self.options.out / f"{'_'.join(filter(None, parts))}.{kind}"

    # Attention by itself

    def choose_attention(self, tokens: int) -> None:
        """The fastest dense kernel of torch at this length becomes the dense runs' own."""
        if self.device != "cuda":
            forward, backward = dense_ms(self.shape, tokens, self.device, None)
            self.add({"what": "dense attention", "kernel": "torch", "tokens": tokens, "ms": [forward, backward]})
            return
        best = {}
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            times = dense_ms(self.shape, tokens, self.device, backend)
            best[sum(times)] = backend
            self.add({"what": "dense attention", "kernel": backend.name, "tokens": tokens, "ms": list(times)})
            torch.cuda.empty_cache()
        fastest = best[min(best)]
        self.attention, self.facts["dense_attention"] = fastest, fastest.name

    # Steps

    def steps(self, model: Model, setting: Setting, tokens: int, mode: str, times: int, measure: bool = False) -> None:
        """A row of whole steps of one setting, `times` of them timed; `measure`: one of them also measures."""
        what = f"{setting.name}, {tokens} tokens, checkpoint {mode}"
        if self.late(what, self.guess(setting, tokens, model.layers) * (times + (setting.budget is not None))):
            return
        model.checkpoint(mode)
        batch = Batch.of(self.shape, tokens, self.device, torch.bfloat16)
        row: dict[str, Any] = {"what": "step", "setting": setting.name, "tokens": tokens, "checkpoint": mode}
        row |= {"layers": model.layers}
        try:
            row |= self._timed(model, setting, batch, tokens, times, measure)
        except GateError:
            raise
        except Exception as error:  # out of memory, say: named, and the rest goes on
            row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        model.optimizer.zero_grad(set_to_none=True)
        free(self.device)
        self.add(row)

    def _timed(self, model: Model, setting: Setting, batch: Batch, tokens: int, times: int, measure: bool) -> dict:
        row: dict[str, Any] = {}
        if setting.budget is None and not setting.learns:
            with model.dense_by(setting.dense):
                model.step(Batch.of(self.shape, self.shape.short, self.device, torch.bfloat16))
                found = [model.step(batch) for _ in range(times)]
        else:
            handle = model.handle(setting, self.options.query_tile, measure)
            try:
                found = self._handled(model, batch, tokens, handle, setting, row, times, measure)
            finally:
                handle.remove()
        seconds = statistics.median(x.seconds for x in found)
        row |= {"seconds": seconds, "all": [x.seconds for x in found], "tokens_per_second": tokens / seconds}
        row |= {"peak_gib": max((x.peak for x in found if x.peak), default=None), "loss": found[-1].loss}
        return row

    def _handled(
        self, model: Model, batch: Batch, tokens: int, handle: fv.Handle, setting: Setting, row: dict, times: int,
        measure: bool,
    ) -> list[Timing]:  # fmt: skip
        """The first step has a lesson and its tiles are counted; it is timed in stage 1, where every step has one."""
        with counted(handle) as kept:
            first = model.step(batch, handle)
        check_kept(kept, setting, model.layers, tokens, handle.policy.kv_tile)
        row["tile"] = handle.policy.kv_tile
        row["kept"] = [round(kept[index], 4) for index in range(model.layers)]
        row |= memory_of_index(handle, setting, model, tokens)
        if setting.learns:
            return [first, *(model.step(batch, handle) for _ in range(times - 1))]
        row["lesson_peak_gib"] = first.peak
        found = []
        while len(found) < times or (measure and handle.steps < FIRST_MEASURED):
            measures = measure and handle.steps + 1 == FIRST_MEASURED
            timing = model.step(batch, handle)
            if measures:  # a pair and a profile, at a cadence of their own
                row["measurement_s"] = timing.handle
            found.append(replace(timing, seconds=timing.seconds - measures * timing.handle))
        return found

    def guess(self, setting: Setting, tokens: int, layers: int) -> float:
        """Seconds of a step on an H200, by arithmetic, generously."""
        if self.device != "cuda":
            return 0.0
        attention = 14 * tokens**2 * self.shape.heads * self.shape.dim / 500e12 * layers
        rest = 1e-6 * tokens * layers
        dense = len(setting.dense_layers(layers)) / layers if setting.budget else 1.0
        return attention * (dense + (1 - dense) * 1.5 * (setting.budget or 0.0)) + rest

    def parts(self, tokens: int) -> None:
        if not self.late(f"lessons, {tokens} tokens", 5):
            self.add({"what": "lessons", "tokens": tokens, **lesson_ms(self.shape, tokens, self.device)})
            free(self.device)

    def by_layer(self, tokens: int, mode: str, settings: Sequence[Setting]) -> None:
        """One layer, and a model without any, at a length where whole steps take too long."""
        for layers, setting in ((0, DENSE), *((1, setting) for setting in settings)):
            one = Setting(setting.name, setting.budget, setting.periphery)
            seconds = self.guess(one, tokens, 1)
            if self.late(f"a layer of {setting.name}, {tokens} tokens", 2 * seconds):
                continue
            model = Model(self.shape, layers, self.device, self.attention)
            self.steps(model, DENSE if setting is DENSE else one, tokens, mode, 1 if seconds > 5 else 3)
            del model
            free(self.device)


def memory_of_index(handle: fv.Handle, setting: Setting, model: Model, tokens: int) -> dict[str, float]:
    """GiB of the index: bitmaps, kept from forward to backward, all predictors, and one layer's lists at a time."""
    tiles, rows = tokens // handle.policy.kv_tile, -(-tokens // handle.policy.query_tile)
    sparse = 0 if setting.budget is None else model.layers - len(setting.dense_layers(model.layers))
    words = sparse * model.shape.heads * rows * -(-tiles // 32) * 4
    lists = min(sparse, 1) * model.shape.heads * rows * tiles * 2  # int16; by queries, and by keys when those are gone
    predictors = sum(x.numel() * x.element_size() for x in handle.policy.state_dict().values())
    sizes = {"bitmaps": words, "lists": lists, "predictors": predictors}
    return {f"{name}_gib": size / 2**30 for name, size in sizes.items()}


def card(device: str) -> str:
    return torch.cuda.get_device_name().lower().split()[-1] if device == "cuda" else "cpu"


def free(device: str) -> None:
    if device == "cuda":
        gc.collect()  # a model and what was installed in it refer to each other
        torch.cuda.empty_cache()


# What is run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for JSON and plot")
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768, 131072], help="lengths of whole steps")
    parser.add_argument("--layerwise", type=int, nargs="*", default=[524288], help="lengths timed layer by layer")
    parser.add_argument("--checkpoint", nargs="+", choices=("attention", "block"), default=["attention"])
    parser.add_argument("--layer-checkpoint", choices=("attention", "block"), default="block")
    parser.add_argument("--tag", default="", help="goes into the names of JSON and plot")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--toy", action="store_true", help="a model of toy size")
    parser.add_argument(
        "--query-tile", type=int, choices=(64, 128), help="by default the faster one by the saved costs"
    )
    parser.add_argument("--settings", nargs="+", default=[""], help="whole steps of those whose names begin so")
    parser.add_argument("--times", type=int, default=2, help="steps timed of dense and dropped runs")
    parser.add_argument("--seconds", type=float, default=600, help="start nothing that would end after so many seconds")
    parser.add_argument("--peers", type=Path, help="a result of bench_attention.py, for flash-attn-4's share")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("needs an NVIDIA GPU; --device cpu --toy is a rehearsal")
        return 2
    bench = Bench(options, TOY if options.toy else WAN)
    try:
        run(bench)
    except GateError as error:
        bench.add({"what": "red gate", "why": str(error)})
        return 1
    lines = summary(bench.rows, bench.shape.layers, peers(options.peers))
    if options.out:
        bench.write()
        plot(bench.file("png"), lines)
    print(json.dumps({**bench.facts, "summary": lines}))
    return 0


def run(bench: Bench) -> None:
    options, shape, device = bench.options, bench.shape, bench.device
    lengths = [*options.tokens, *options.layerwise]
    bench.choose_attention(min(lengths, key=lambda n: abs(n - 131072)))
    errors = gate(shape, shape.short // 2, device, bench.attention, options.query_tile)
    bench.add({"what": "gate", "gradients": errors, "budget": 1.0})
    free(device)
    model = Model(shape, shape.layers, device, bench.attention) if options.tokens else None
    for tokens in options.tokens:
        assert model is not None
        bench.parts(tokens)
        for mode in options.checkpoint:
            twice = (DSV[0], UNIFORM[0], *([DENSE_FA4] if unavailable("fa4", device) is None else []), DENSE)
            for setting in (*twice, STAGE1, *DSV[1:], *UNIFORM[1:]):  # dense ones late: memory is allocated by then
                if setting.name.startswith(tuple(options.settings)):
                    times = options.times if setting in twice else 1
                    bench.steps(model, setting, tokens, mode, times, measure=setting is DSV[0])
    del model
    free(device)
    for tokens in options.layerwise:
        bench.by_layer(tokens, options.layer_checkpoint, [DENSE, DSV[0], UNIFORM[0], *DSV[1:], *UNIFORM[1:]])
        bench.parts(tokens)


if __name__ == "__main__":
    sys.exit(main())
