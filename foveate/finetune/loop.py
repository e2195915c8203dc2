"""Fine-tuning of a diffusers video transformer, on one process or many: the loop.

Everything random in a step is a function of (seed, step, place in the step), so the ranks may be dealt out in any way:
data-parallel replicas times context-parallel ranks, weights sharded over all of them (parallel/fsdp.py). A checkpoint
holds weights, EMA, optimiser, sparsify's state and a step number, and can be taken up by any number of ranks.

Shapes: B batch, C channels, F frames, Y height, X width of latents.
"""

import json
import logging
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foveate.finetune import checkpoint, export, families, videos
from foveate.finetune.config import FinetuneConfig
from foveate.finetune.encoded import Forwards, Order, deal, fixed
from foveate.finetune.families import Sample
from foveate.finetune.meter import Meter
from foveate.finetune.model import choose_expert, open_data, prepare, stored_in
from foveate.finetune.noising import noising
from foveate.parallel import ParallelConfig, fsdp, mean_over_ranks, parallelize
from foveate.sparsity.handle import Handle, sparsify
from foveate.training import folder
from foveate.training.checkpoint import join, last, read_state, set_aside, split
from foveate.training.loop import learning_rate
from foveate.training.machine import pick_device
from foveate.training.record import measured, recorded
from foveate.training.signals import noted

log = logging.getLogger("foveate")

Forward = tuple[Sample, Tensor, Tensor]


class Finetuner:
    """One run, this rank's part. `fit()` trains to the end of the configuration; `resume()` before it takes up the
    newest checkpoint.

    on_step is given each finished row of the history, on rank 0. `stop()` ends `fit` after the step, on all ranks, as
    Ctrl-C and SIGTERM do. Raises ValueError where model, data and ranks do not fit each other, before weights are read.
    """

    def __init__(self, config: FinetuneConfig, *, on_step: Callable[[dict], None] = lambda row: None):
        self.config, self.on_step = config, on_step
        self.step, self.interrupted = 0, 0
        self._goes_on = False
        self._scalars: dict[str, float] = {}
        self.about = families.examine(config.model)
        self.part, bounds = choose_expert(config, self.about)
        self.noising = noising(self.about.scheduler, config.model, density=config.density, bounds=bounds)
        self.data = open_data(config, self.about)
        if config.sample_every:
            videos.check(self.about)
        self.text_length = families.text_length(self.about) if self.about.family.text != "whole" else 0
        self._join()
        self._batches()
        self.model = self._model()
        self._parallelize()
        self.weights = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.ema = {name: p.detach().clone() for name, p in self.weights.items()}
        self.optimizer = torch.optim.AdamW(
            self.weights.values(), lr=config.lr, betas=(0.9, 0.99), weight_decay=config.weight_decay
        )
        self._moments()
        self.meter = Meter(
            self.about, self.part, config, self.data, self.text_length, self.dtype, self.device, self.ranks
        )
        self.saver = checkpoint.Saver(config.out / folder.CHECKPOINTS, config.keep)

    def _join(self) -> None:
        """This process's place in the job; a process alone needs none."""
        config = self.config
        many = fsdp.launched()
        self.device = fsdp.start(config.device) if many else torch.device(pick_device(config.device))
        self.rank, self.ranks = fsdp.rank_and_size()
        peers = config.head * config.sequence
        if self.ranks % peers:
            raise ValueError(
                f"--head {config.head} x --sequence {config.sequence} is {peers} GPUs for one sequence, which do not "
                f"divide the {self.ranks} processes of this job: start it by torchrun --nproc-per-node with a multiple"
            )
        self.replicas = self.ranks // peers
        name = config.dtype if config.dtype != "auto" else "bfloat16" if self.device.type == "cuda" else "float32"
        self.dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]

    def _batches(self) -> None:
        """What each step takes, and what validation does. ValueError where replicas cannot share a step."""
        config, data = self.config, self.data
        apart = None if config.validation is None else open_data(config, self.about, config.validation)
        train, held = data.held_out(config.val_fraction if apart is None else 0.0)
        self.order = Order(
            train, data.bucket[train], data.tokens[train], batch=config.batch, micro=config.micro, seed=config.seed
        )
        deal([0] * self.order.forwards, self.replicas)
        if config.batch > len(train) and self.rank == 0:
            log.warning(
                "--batch %d is more than the %d clips there are: a step takes some twice", config.batch, len(train)
            )
        judge = data if apart is None else apart
        places = held if apart is None else range(len(apart))
        places = [int(i) for i in places]
        self.validation = fixed(judge, places[: config.validation_clips], self.text_length)
        shown = places or [int(i) for i in train]
        self.shown = [(judge, place) for place in shown[: config.sample_clips]]

    def _model(self) -> nn.Module:
        """The transformer with what is trained, sharded where there are ranks."""
        config = self.config
        model = families.load_transformer(self.about, self.part, stored_in(config, self.dtype))
        prepare(model, config)
        if self.ranks > 1:
            fsdp.shard(model, self.device, self.dtype, config.shard)
        return model.to(self.device)

    def _parallelize(self) -> None:
        config = self.config
        self.handle: Handle | None = None
        if config.sparse:
            self.handle = sparsify(self.model, config.sparsity, log=self._note)
        self.parallel = None
        self.replica = self.rank
        if config.head * config.sequence > 1:
            self.parallel = parallelize(self.model, ParallelConfig(head=config.head, sequence=config.sequence))
            self.replica = self.parallel.replica

    def _moments(self) -> None:
        """AdamW's state as it is before the first step, so that a checkpoint can be read into it."""
        for p in self.weights.values():
            zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[p] = {"step": torch.zeros(()), **zeros}

    def fit(self, *, overwrite: bool = False) -> list[dict]:
        """Train to the last step. Ctrl-C and SIGTERM finish the step, save and return. Returns the history so far.

        Raises ValueError for a folder that holds another run, FloatingPointError where the loss or its gradient is not
        finite, before that changes a weight, and OSError where a checkpoint cannot be written.
        """
        config, out = self.config, self.config.out
        self._check_folder(overwrite)
        claim = folder.claimed(out, overwrite=overwrite) if self.rank == 0 else nullcontext()
        with claim, noted(self):
            if self.rank > 0:
                return [dict(row) for row in self._run()]
            (out / folder.CONFIG).write_text(json.dumps(config.to_dict(), indent=1))
            for stale in (out / folder.CHECKPOINTS).glob(".*.partial"):  # of a run that was killed
                shutil.rmtree(stale, ignore_errors=True)
            history = folder.rows(out / folder.HISTORY)
            with closing(recorded(config, self.step, self._run())) as rows:
                for row in rows:
                    history.append(row)
                    self.on_step(row)
        return history

    def stop(self) -> None:
        """End `fit` after the step that runs now or the next one, when all ranks know, and save."""
        self.interrupted = self.interrupted or signal.SIGINT

    def _check_folder(self, overwrite: bool) -> None:
        """Rank 0 looks, all ranks hear of it."""
        refused = ""
        if self.rank == 0:
            try:
                folder.check(self.config.out, resume=self._goes_on, overwrite=overwrite, need=self._need())
            except ValueError as error:
                refused = str(error)
        told = torch.tensor(float(bool(refused)), device=self.device)
        if (mean_over_ranks(told) if self.ranks > 1 else told) > 0:
            raise ValueError(refused or "rank 0 may not write into --out, see its message")

    def _need(self) -> int:
        """Bytes of the checkpoints and of what is exported."""
        numbers = sum(p.numel() for p in self.weights.values())
        return 4 * numbers * (4 * (self.config.keep + 1) + 1)

    def _run(self) -> Iterator[dict]:
        """Steps to the end, or to an interruption of any rank, each as its row of the history."""
        config = self.config
        forwards = Forwards(
            self.data, self.order, replica=self.replica, replicas=self.replicas, drop=config.drop_text,
            text_length=self.text_length,
        )  # fmt: skip
        batches = iter(forwards.loader(range(self.step, config.steps), config.workers))
        stopped = False
        while self.step < config.steps and not stopped:
            row, stopped = self.train_step(next(batches))
            self.saver.poll()
            if self.validation and self.step % config.validate_every == 0 and not stopped:
                row["validation"] = self.validate()
            if config.sample_every and self.step % config.sample_every == 0 and not stopped:
                row["samples"] = videos.write(self, self.shown)
            yield row
            if stopped or self.step % config.checkpoint_every == 0 or self.step == config.steps:
                self.save(wait=stopped or self.step == config.steps)
        self.saver.finish()
        self.export()

    def train_step(self, forwards: Sequence[Forward]) -> tuple[dict, bool]:
        """One step on this rank's forwards; its row of the history, and whether some rank was told to stop."""
        began = time.perf_counter()
        kept = self.kept
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step)
        loss, norm, stop, tokens = self._backward(forwards)
        self._finite(loss, norm)
        self._update()
        more = self._sparsify()
        if self.parallel is not None:
            self.parallel.step()
        seconds = time.perf_counter() - began
        speed = tokens * self.replicas / seconds
        used = self.meter.measure(self.order.step(self.step - 1), kept, seconds, speed) if self.rank == 0 else {}
        if self.device.type == "cuda":
            used["peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return {
            "step": self.step, "loss": loss, "norm": norm, "seconds": seconds, "tokens_per_second": speed,
            "kept": kept, "lr": self.optimizer.param_groups[0]["lr"], **used, **more,
        }, stop > 0  # fmt: skip

    def _backward(self, forwards: Sequence[Forward]) -> list[float]:
        """Gradients of a step's forwards. Means over the ranks: loss, norm, told to stop, tokens."""
        loss, tokens, model = torch.zeros((), device=self.device), 0, cast(Any, self.model)
        for number, forward in enumerate(forwards):
            if self.ranks > 1:  # gradients are reduced once a step
                model.set_requires_gradient_sync(number == len(forwards) - 1)
            value = self.loss(forward) / len(forwards)
            value.backward()
            loss += value.detach()
            tokens += len(forward[2]) * self.about.tokens(forward[0].latents.shape)
        norm = nn.utils.clip_grad_norm_(self.weights.values(), self.config.clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        told = torch.stack([loss, norm, loss.new_tensor(float(self.interrupted > 0)), loss.new_tensor(float(tokens))])
        return (mean_over_ranks(told) if self.ranks > 1 else told).tolist()  # waits for the device

    def _update(self) -> None:
        """The optimiser's step, and the average of the weights after it."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(fsdp.local(self.ema.values()), fsdp.local(self.weights.values()), 1 - decay)
        self.step += 1

    def loss(self, forward: Forward) -> Tensor:
        """Mean squared error of what the model predicts. A first frame that is given clean has none."""
        sample, noise, u = forward
        level = self.noising.levels(u, self.about.tokens(sample.latents.shape)).to(self.device)
        sample, noise = sample.to(self.device), noise.to(self.device)
        noisy, timestep, target = self.noising.apply(sample.latents, noise, level)
        if self.about.first_clean:
            noisy = torch.cat([sample.latents[:, :, :1], noisy[:, :, 1:]], 2)
        error = self.predict(noisy, timestep, sample).float() - target
        if self.about.first_clean:  # the mean stays over all, as sparsify expects of a mean square
            error = torch.cat([torch.zeros_like(error[:, :, :1]), error[:, :, 1:]], 2)
        return error.square().mean()

    def predict(self, noisy: Tensor, timestep: Tensor, sample: Sample) -> Tensor:
        """What the transformer says of noisy latents (B, C, F, Y, X) at its timestep (B,)."""
        family = self.about.family
        given = family.inputs(self.about, self.model, noisy.to(self.dtype), timestep, sample)
        with self._precision():
            found = self.model(**given, return_dict=False)[0]
        return family.output(self.about, noisy, found)

    def _precision(self) -> Any:
        """FSDP casts the weights itself; one process computes by autocast."""
        low = self.dtype == torch.bfloat16 and self.ranks == 1
        return torch.autocast(self.device.type, torch.bfloat16) if low else nullcontext()

    @property
    def kept(self) -> float:
        """Share of the tiles that attention computes now, mean over heads and layers; 1 is dense."""
        plan = self.handle.decision.plan if self.handle is not None and self.handle.decision.active else None
        return 1.0 if plan is None else plan.kept

    def _sparsify(self) -> dict[str, Any]:
        """sparsify's step after the optimiser's, and what it measured and decided, if it did."""
        if self.handle is None:
            return {}
        before, self._scalars = self.handle.decision, {}
        self.handle.step()
        if not self._scalars:
            return {}
        now = self.handle.decision
        if self.rank == 0:
            with (self.config.out / folder.PLANS).open("a") as file:
                file.write(json.dumps({"step": self.step, **measured(self.handle)}) + "\n")
        found: dict[str, Any] = {"gap": self._scalars["gap"]} if "gap" in self._scalars else {}
        return found | ({"reason": now.reason} if now is not before else {})

    def _note(self, name: str, value: float, step: int) -> None:
        self._scalars[name.removeprefix("foveate/")] = value

    def _finite(self, value: float, norm: float) -> None:
        if math.isfinite(value) and math.isfinite(norm):
            return
        self.saver.finish()
        what = f"the loss is {value}" if not math.isfinite(value) else f"the loss is {value}, its gradient {norm}"
        known = last(self.config.out / folder.CHECKPOINTS)
        raise FloatingPointError(
            f"{what} in step {self.step + 1}, which changed no weight; {known}. Go on from it with a lower rate: "
            "--resume --lr ... --allow-change lr"
        )

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the fixed samples and noise levels, with attention as it is now."""
        count = len(self.validation)
        turns = -(-count // self.replicas)  # all ranks run the model equally often, as FSDP wants
        total = torch.zeros((), device=self.device)
        self.model.eval()
        for turn in range(turns):
            place = turn * self.replicas + self.replica
            value = self.loss(self.validation[place % count])
            total += value * (place < count)
        self.model.train()
        mean = mean_over_ranks(total) if self.ranks > 1 else total
        return mean.item() * self.replicas / count

    def _tensors(self) -> dict[str, Tensor]:
        """Everything of a checkpoint that is a tensor, by name; in place."""
        found = {f"model.{name}": p for name, p in self.weights.items()}
        found |= {f"ema.{name}": p for name, p in self.ema.items()}
        for name, p in self.weights.items():
            found |= {f"optimizer.{name}.{key}": x for key, x in self.optimizer.state[p].items()}
        return found

    def save(self, *, wait: bool = False) -> None:
        """Begin a checkpoint of this step. On all ranks alike."""
        tensors = {name: x.detach() for name, x in self._tensors().items()}
        state: dict[str, Any] = {"step": self.step, "pipeline": self.about.pipeline, "part": self.part}
        state["lora"] = self.config.lora
        if self.handle is not None:
            own, state["sparsity"] = split(self.handle.state_dict())
            tensors |= {f"sparsity.{name}": x for name, x in own.items()}
        self.saver.save(self.step, tensors, state, wait=wait)
        if self.handle is not None and self.handle.decision.active and self.rank == 0:
            self.handle.save(self.config.out / folder.SPARSE)

    def export(self) -> None:
        """What plain diffusers loads, of the averaged weights, into config.out. On all ranks alike."""
        config = self.config
        weights = fsdp.whole(self.ema)
        if self.rank > 0:
            return
        if config.lora:
            export.write_lora(config.out, self.about, self.part, weights, config.lora_alpha or config.lora, config.lora)
        else:
            export.write_transformer(config.out, self.about, self.part, weights, self.dtype)

    def resume(self, step: int | None = None, *, allow: Sequence[str] = ()) -> None:
        """Take up checkpoint `step` of this run, the newest by default; history after it is dropped.

        ValueError where the run was begun with another configuration, unless only those dials differ that may change
        or that `allow` names. On all ranks alike.
        """
        out = self.config.out
        for line in folder.changes(self.config, allow):
            log.info("resumed with a change, %s", line)
        self.load(*read_state(out / folder.CHECKPOINTS, step))
        if self.rank == 0:
            for name in (folder.HISTORY, folder.PLANS):
                folder.keep_until(out / name, self.step)
            for name in set_aside(out / folder.CHECKPOINTS, self.step):
                log.warning("%s: the run now goes on from step %d; remove it if it is not wanted", name, self.step)
        self._goes_on = True

    def load(self, place: Any, state: dict[str, Any]) -> None:
        """Take up a checkpoint, whatever ranks wrote it."""
        if (state["pipeline"], state["part"], state["lora"]) != (self.about.pipeline, self.part, self.config.lora):
            raise ValueError(f"{place} is of a {state['pipeline']}'s {state['part']}, LoRA rank {state['lora']}")
        tensors = {name: x.detach() for name, x in self._tensors().items()}
        own: dict[str, Tensor] = {}
        if self.handle is not None and "sparsity" in state:
            own, _ = split(self.handle.state_dict())
            own = {name: x.clone() for name, x in own.items()}
        checkpoint.load(place, tensors | {f"sparsity.{name}": x for name, x in own.items()})
        if self.handle is not None and "sparsity" in state:
            self.handle.load_state_dict(join(own, state["sparsity"]))
        self.step = state["step"]
