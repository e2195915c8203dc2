"""Two-stage training of a video DiT (DSV, arXiv 2502.07590): dense while predictors learn, then sparse.

Everything random in a step is a function of (seed, step, rank), so a run that was killed and resumed is the run that
was not: a checkpoint holds weights, EMA, optimiser, predictors and a step number. Not covered here: several GPUs.
"""

import json
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from foveate import costs
from foveate.data import Clips
from foveate.data.captions import CAPTIONS
from foveate.data.folder import read
from foveate.models.dit import VideoDiT
from foveate.sparsity.policy import Sparse
from foveate.training import checkpoint
from foveate.training.flow import Batch, Batches, Conditions, fixed_batches, loss
from foveate.training.machine import pick_device
from foveate.training.recipes import TrainConfig

log = logging.getLogger("foveate")


class Trainer:
    """One run. `fit()` trains to the end of the recipe; `resume()` before it takes up the newest checkpoint.

    on_step is given each finished row of the history: step, stage, loss, seconds, tokens a second, budget, learning
    rate, and at a check the paired gap. text: from caption to embedding (text_dim,), for models that take one.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        text: Mapping[str, Tensor] | None = None,
        on_step: Callable[[dict], None] = lambda row: None,
    ):
        self.config, self.on_step = config, on_step
        self.device = torch.device(pick_device(config.device))
        self.clips, held_out = (open_clips(config, split) for split in ("train", "val"))
        conditions = choose_conditions(config, len(self.clips.classes), text)
        self.validation = [
            batch.to(self.device) for batch in fixed_batches(held_out, config.validation_clips, conditions=conditions)
        ]
        self.batches = Batches(self.clips, size=config.batch, seed=config.seed, conditions=conditions)
        self.model = self._model()
        self.ema = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=config.weight_decay, fused=True
        )
        self.policy = self._policy()
        self.step, self.stage = 0, 1
        self.interrupted = False

    def _model(self) -> VideoDiT:
        torch.manual_seed(self.config.seed)
        model = VideoDiT(self.config.model)
        if self.config.start_from is not None:
            weights, about = checkpoint.load_weights(self.config.start_from)
            if about["model"] != as_json(self.config.model.to_dict()):
                raise ValueError(
                    f"{self.config.start_from} holds a model of another shape, {about['model']}; this run wants "
                    f"{self.config.model.to_dict()}"
                )
            model.load_state_dict(weights)
        return model.to(self.device)

    def _policy(self) -> Sparse:
        config, shape = self.config, self.config.model
        policy = Sparse(
            shape.depth,
            shape.heads,
            shape.head_dim,
            budget=config.budget,
            periphery=config.periphery,
            rank=config.rank,
            start=config.learn_from,
            rows=config.learn_rows,
            lr=config.learn_lr,
            seed=config.seed,
            device=self.device,
            query_tile=costs.here(self.device).tile,
        )
        policy.sparse_layers = [index not in config.dense_layers for index in range(shape.depth)]
        self.model.policy = policy
        return policy

    def fit(self) -> list[dict]:
        """Train to the last step. Ctrl-C finishes the step, saves and returns. Returns the history so far."""
        config = self.config
        config.out.mkdir(parents=True, exist_ok=True)
        (config.out / "config.json").write_text(json.dumps(asdict(config), indent=1, default=str))
        history = self._history()
        with self._ctrl_c(), (config.out / "history.jsonl").open("a") as file:
            for batch in self.batches.loader(range(self.step, config.steps), config.workers):
                row = self.train_step(batch.to(self.device))
                if self.step % config.check_every == 0:
                    self._measure(row)
                history.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
                self.on_step(row)
                if "switched" in row:  # kept for good: where twins and second thoughts start from
                    self.save("switch")
                if self.interrupted or self.step % config.checkpoint_every == 0 or self.step == config.steps:
                    self.save()
                if self.interrupted:
                    break
        return history

    def train_step(self, batch: Batch) -> dict:
        """One step, on a batch of this device; its row of the history."""
        began = time.perf_counter()
        config, policy = self.config, self.policy
        policy.step = self.step
        mode = "dense" if self.stage == 1 else "random" if config.control else "sparse"
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.step)
        learning = config.sparse and not config.control and (self.stage == 1 or self.step % config.learn_every == 0)
        with policy.using(mode, learning=learning), self._precision():
            value = loss(self.model, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(list(self.ema.values()), list(self.model.parameters()), 1 - config.ema)
        self.step += 1
        number = value.item()  # waits for the device, so the time below is the step's
        if not math.isfinite(number):
            raise FloatingPointError(f"the loss is {number} at step {self.step}; lower --lr or resume an earlier step")
        seconds = time.perf_counter() - began
        tokens = len(batch.clips) * config.model.grid(*batch.clips.shape[2:]).tokens
        return {
            "step": self.step, "stage": self.stage, "loss": number, "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "budget": config.budget if self.stage == 2 else 1.0, "lr": self.optimizer.param_groups[0]["lr"],
        }  # fmt: skip

    def validate(self, mode: str, batches: Sequence[Batch] | None = None) -> float:
        """Mean loss over fixed batches (the run's own validation by default), with attention in that mode."""
        self.policy.step = 0  # the random control then draws the same tiles at every validation
        with torch.no_grad(), self.policy.using(mode), self._precision():
            losses = [loss(self.model, batch.to(self.device)) for batch in batches or self.validation]
        return torch.stack(losses).mean().item()

    def _measure(self, row: dict) -> None:
        """Paired validation losses, the profile of every layer, and the decision to switch, into the row."""
        dense = self.validate("dense")
        row["dense_loss"] = dense
        if not (self.config.sparse and self.policy.ready):
            return
        sparse = self.validate("random" if self.config.control else "sparse")
        row.update(sparse_loss=sparse, gap=sparse / dense - 1)
        self._profile()
        ready = self.stage == 1 and self.step >= self.config.stage1 and row["gap"] <= self.config.gap
        if ready and (self.config.force or self._pays):
            self.stage = 2
            row["switched"] = True

    @cached_property
    def _pays(self) -> bool:
        """Whether sparse attention is the faster one at this length and budget, by the saved cost table."""
        config, model = self.config, self.config.model
        prices = costs.here(self.device)
        shape = model.grid(config.frames, config.height, config.width).tokens, model.heads, model.head_dim
        sparse = prices.sparse(*shape, config.budget, pooled=float(config.periphery == "pool"))
        dense = prices.dense(*shape)
        if sparse >= dense:
            log.warning(
                f"training stays dense: at {shape[0]} tokens and {config.budget:.0%} kept a layer's sparse attention "
                f"takes {sparse:.3g} ms, dense {dense:.3g} ({prices.source}); --force goes sparse all the same"
            )
        return sparse < dense

    def _profile(self) -> None:
        """One line of profiles.jsonl: recall and error of every layer and head on the middle validation batch."""
        batch = self.validation[len(self.validation) // 2]
        with torch.no_grad(), self.policy.using("dense"), self.policy.profiling() as found, self._precision():
            loss(self.model, batch)
        layers = [
            {k: v.tolist() for k, v in vars(found[index]).items() if isinstance(v, Tensor)} for index in sorted(found)
        ]
        with (self.config.out / "profiles.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.step, "layers": layers}) + "\n")

    def save(self, folder: str = "checkpoints") -> None:
        """Write a checkpoint of this step, and `model.safetensors` of the EMA weights, to generate from."""
        model = dict(self.model.named_parameters())
        optimizer = {
            f"{name}.{key}": torch.as_tensor(value)
            for name, weight in model.items()
            for key, value in self.optimizer.state[weight].items()
        }
        parts = {"model": model, "ema": self.ema, "optimizer": optimizer, "policy": self.policy.state_dict()}
        state = {"step": self.step, "stage": self.stage, "model": self.config.model.to_dict()}
        checkpoint.save(self.config.out / folder, self.step, parts, state)
        checkpoint.save_weights(self.config.out / "model.safetensors", self.ema, self.about())
        if self.policy.ready:
            about = {name: getattr(self.config, name) for name in ("budget", "periphery", "rank")}
            about["dense_layers"] = list(self.config.dense_layers)
            about["start"] = self.config.learn_from  # from which observation on there is a predictor
            checkpoint.save_weights(self.config.out / "predictor.safetensors", self.policy.state_dict(), about)

    def about(self) -> dict:
        """What a weights file says of itself."""
        config = self.config
        sizes = {"frames": config.frames, "height": config.height, "width": config.width}
        return {"model": config.model.to_dict(), "step": self.step, "clip": sizes, "data": config.data.name}

    def resume(self, step: int | None = None) -> None:
        """Take up checkpoint `step` of this run, the newest by default; history after it is dropped."""
        parts, state = checkpoint.load(self.config.out / "checkpoints", step)
        if state["model"] != as_json(self.config.model.to_dict()):
            raise ValueError(f"the checkpoint holds a model of another shape, {state['model']}")
        self.model.load_state_dict(parts["model"])
        self.ema = {name: parts["ema"][name].to(self.device) for name in self.ema}  # in the parameters' order
        for name, weight in self.model.named_parameters():
            found = {
                k.removeprefix(f"{name}."): v for k, v in parts["optimizer"].items() if k.rpartition(".")[0] == name
            }
            self.optimizer.state[weight] = {k: v if k == "step" else v.to(self.device) for k, v in found.items()}
        self.policy.load_state_dict(parts["policy"])
        # A dense run stays dense, also one that goes on from a sparse run's switch.
        self.step, self.stage = state["step"], state["stage"] if self.config.sparse else 1
        for name in ("history.jsonl", "profiles.jsonl"):
            keep_until(self.config.out / name, self.step)

    def _history(self) -> list[dict]:
        file = self.config.out / "history.jsonl"
        if self.step == 0:
            for name in ("history.jsonl", "profiles.jsonl"):
                (self.config.out / name).unlink(missing_ok=True)
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @contextmanager
    def _ctrl_c(self) -> Iterator[None]:
        """The first Ctrl-C lets the step finish and saves; a second one stops at once."""

        def note(number: int, frame: object) -> None:
            self.interrupted = True
            signal.signal(signal.SIGINT, before)

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _precision(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


def open_clips(config: TrainConfig, split: Literal["train", "val"]) -> Clips:
    """The clips a run learns from, or those it is judged by. ValueError where they do not serve."""
    open_ = partial(
        Clips, frames=config.frames, height=config.height, width=config.width, stride=config.stride, zoom=config.zoom
    )
    apart = config.validation
    inside = config.out.resolve().is_relative_to(config.data.resolve())  # a run's own files are no clips
    leave_out = [folder for folder in (apart, config.out if inside else None) if folder is not None]
    if apart is None or split == "train":
        fraction = config.val_fraction if apart is None else 0.0
        return open_(
            config.data, split=split, val_fraction=fraction, val_by=config.val_by, exclude=config.exclude,
            leave_out=leave_out,
        )  # fmt: skip
    if config.model.text_dim and not (apart / CAPTIONS).is_file():
        raise ValueError(f"the model takes text, but {apart} has no {CAPTIONS}")
    training = read(config.data, exclude=config.exclude, leave_out=leave_out)
    return open_(apart, split="all", classes=training.classes or None)


def choose_conditions(config: TrainConfig, classes: int, text: Mapping[str, Tensor] | None) -> Conditions:
    """What the model is told about a clip. ValueError where model and data do not fit each other."""
    if config.model.classes:
        if config.model.classes != classes:
            raise ValueError(f"the model has {config.model.classes} classes, {config.data} has {classes} class folders")
        return "label"
    if config.model.text_dim:
        if text is None:
            raise ValueError("the model takes text embeddings: give --text-encoder, or text= to Trainer")
        return text
    return "none"


def as_json(values: dict) -> dict:
    """As JSON gives it back: tuples as lists."""
    return json.loads(json.dumps(values))


def keep_until(file: Path, step: int) -> None:
    """Drop the rows of a JSON-lines file after `step`: they were written, but their checkpoint was not."""
    if file.exists():
        rows = [line for line in file.read_text().splitlines() if json.loads(line)["step"] <= step]
        file.write_text("".join(row + "\n" for row in rows))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to `decay_to`."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (config.decay_to + (1 - config.decay_to) * (1 + math.cos(math.pi * done)) / 2)
