"""The training loop: dense at first, sparse where `sparsify` finds that it costs no more than its tolerance.

What the loop adds to the user's two lines (`sparsify`, `handle.step`) is a run that can be stopped at any moment and
goes on bit for bit on the CPU: everything random in a step is a function of (seed, step), and a checkpoint holds
weights, EMA, optimiser, sparsify's state and a step number. Not covered here: several GPUs.
"""

import json
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from foveate.data import Clips
from foveate.data.captions import CAPTIONS
from foveate.data.folder import read
from foveate.models.dit import VideoDiT
from foveate.sparsity import cadence
from foveate.sparsity.captured import Captured
from foveate.sparsity.handle import Handle, sparsify
from foveate.training import checkpoint, folder
from foveate.training.flow import Batch, Batches, Conditions, fixed_batches, loss
from foveate.training.machine import compiles, pick_device, refuse_many_processes
from foveate.training.recipes import TrainConfig, as_json
from foveate.training.record import measured, recorded, sample
from foveate.training.signals import noted
from foveate.training.text import embed_captions

log = logging.getLogger("foveate")

STATES = 4  # numbers of a checkpoint for each weight: weight, EMA, two moments


class Trainer:
    """One run. `fit()` trains to the end of the recipe; `resume()` before it takes up the newest checkpoint.

    on_step is given each finished row of the history: step, loss, gradient norm, seconds, tokens a second, kept share
    of the tiles (1 is dense), learning rate, and where they were measured `gap` and `reason` (sparsify's) and
    `validation`. text: from caption to embedding (text_dim,), instead of config.text_encoder. `stop()` ends `fit` after
    the step, as Ctrl-C and SIGTERM do; `interrupted` is then the signal's number. Raises ValueError where model and
    data do not fit each other, or config.out cannot be written.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        text: Mapping[str, Tensor] | None = None,
        on_step: Callable[[dict], None] = lambda row: None,
    ):
        self.config, self.on_step = config, on_step
        refuse_many_processes("train")
        self.device = torch.device(pick_device(config.device))
        folder.check(config.out, overwrite=True)
        self.clips, held_out = (open_clips(config, split) for split in ("train", "val"))
        conditions = choose_conditions(config, self.clips, held_out, text)
        self.validation = [
            batch.to(self.device) for batch in fixed_batches(held_out, config.validation_clips, conditions=conditions)
        ]
        self.validate_every, self._validating = cadence.validation(
            len(self.validation), config.batch, config.validate_every
        )
        self.batches = Batches(self.clips, size=config.batch, seed=config.seed, conditions=conditions)
        self.model = self._model()
        self.ema = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=config.weight_decay, fused=True
        )
        self._scalars: dict[str, float] = {}
        self.handle: Handle | None = None
        if config.sparse:
            self.handle = sparsify(self.model, config.sparsity, log=self._note)
        self._passes = Captured(self.model, self._loss, self.handle) if config.capture else self._launched
        self.step, self.interrupted = 0, 0
        self._goes_on = False

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
        model.compile_repeated_blocks(compiles(self.device) if self.config.compile is None else self.config.compile)
        return model.to(self.device)

    def fit(self, *, overwrite: bool = False) -> list[dict]:
        """Train to the last step. Ctrl-C and SIGTERM finish the step, save and return. Returns the history so far.

        overwrite: remove a run that config.out holds; otherwise such a folder raises ValueError. Raises
        FloatingPointError where the loss or its gradient is not finite, OSError where a checkpoint cannot be written.
        """
        config, out = self.config, self.config.out
        self._check(overwrite)
        log.info(
            "validation losses every %d steps: about %.1f %% of the time; sparsify: %.0f %% at most",
            self.validate_every, 100 * self._validating, 100 * cadence.SHARE,
        )  # fmt: skip
        rows = recorded(config, self.step, self._rows())
        with folder.claimed(out, overwrite=overwrite), noted(self), closing(rows):
            (out / folder.CONFIG).write_text(json.dumps(config.to_dict(), indent=1))
            folder.list_skipped(out, self.clips.skipped)
            history = folder.rows(out / folder.HISTORY)
            for row in rows:
                history.append(row)
                self.on_step(row)
                if "switched" in row and not self._switched_before():
                    self.save(folder.SWITCH)  # kept for good: where twins and second thoughts start from
                if self.interrupted or self.step % config.checkpoint_every == 0 or self.step == config.steps:
                    self.save()
        return history

    def _switched_before(self) -> bool:
        """Whether an earlier step was sparse: what is trained after it is no longer what a dense twin would be."""
        return any(step < self.step for step in checkpoint.steps(self.config.out / folder.SWITCH))

    def stop(self) -> None:
        """End `fit` after the step that runs now, and save: for other threads and for `on_step`."""
        self.interrupted = self.interrupted or signal.SIGINT

    def _check(self, overwrite: bool) -> None:
        weights = sum(weight.nbytes for weight in self.ema.values())
        need = STATES * weights * (self.config.keep + 2)
        folder.check(self.config.out, resume=self._goes_on, overwrite=overwrite, need=need)

    def _rows(self) -> Iterator[dict]:
        """Steps to the end, or to an interruption, each as its row of the history."""
        config, workers = self.config, self.config.workers
        batches = iter(self.batches.loader(range(self.step, config.steps), workers))
        while self.step < config.steps and not self.interrupted:
            try:
                batch = next(batches)
            except RuntimeError:  # a signal to all processes ends the workers too
                if not self.interrupted:
                    raise
                self.save()
                return
            row = self.train_step(batch.to(self.device))
            last = config.validate_every is None and self.step == config.steps
            if last or self.step % self.validate_every == 0:
                self._validate_into(row)
            if config.sample_every and self.step % config.sample_every == 0 and not self.interrupted:
                sample(self)
            yield row

    def train_step(self, batch: Batch) -> dict:
        """One step, on a batch of this device; its row of the history."""
        began = time.perf_counter()
        config = self.config
        kept = self.kept  # of this step: what sparsify decides below holds from the next one on
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.step)
        value = self._passes(batch.clips, batch.noise, batch.sigma, batch.condition)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        decay = min(config.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():  # or the average would keep a graph of every step
            torch._foreach_lerp_(list(self.ema.values()), list(self.model.parameters()), 1 - decay)
        self.step += 1
        numbers = torch.stack([value, norm]).tolist()  # waits for the device, so the time below is the step's
        self._finite(*numbers)
        seconds = time.perf_counter() - began
        tokens = len(batch.clips) * config.model.grid(*batch.clips.shape[2:]).tokens
        return {
            "step": self.step, "loss": numbers[0], "norm": numbers[1], "seconds": seconds,
            "tokens_per_second": tokens / seconds, "kept": kept, "lr": self.optimizer.param_groups[0]["lr"],
            **self._sparsify(value),
        }  # fmt: skip

    def _loss(self, *batch: Any) -> Tensor:
        with self._precision():
            return loss(self.model, Batch(*batch))

    def _launched(self, *batch: Any) -> Tensor:
        value = self._loss(*batch)
        value.backward()
        return value.detach()

    @property
    def kept(self) -> float:
        """Share of the tiles that attention computes now, mean over heads and layers; 1 is dense."""
        plan = self.handle.decision.plan if self.handle is not None and self.handle.decision.active else None
        return 1.0 if plan is None else plan.kept

    def _sparsify(self, value: Tensor) -> dict[str, Any]:
        """sparsify's step after the optimiser's, and what it measured and decided, if it did."""
        if self.handle is None:
            return {}
        before, self._scalars = self.handle.decision, {}
        self.handle.step(loss=value)
        if not self._scalars:
            return {}
        with (self.config.out / folder.PLANS).open("a") as file:
            file.write(json.dumps({"step": self.step, **measured(self.handle)}) + "\n")
        now = self.handle.decision
        found: dict[str, Any] = {"gap": self._scalars["gap"]} if "gap" in self._scalars else {}
        if now is not before:
            found["reason"] = now.reason
        if now.active and not before.active:
            found["switched"] = True
        return found

    def _note(self, name: str, value: float, step: int) -> None:
        self._scalars[name.removeprefix("foveate/")] = value

    def _finite(self, value: float, norm: float) -> None:
        if math.isfinite(value) and math.isfinite(norm):
            return
        what = f"the loss is {value}" if not math.isfinite(value) else f"the loss is {value}, its gradient {norm}"
        known = checkpoint.last(self.config.out / folder.CHECKPOINTS)
        raise FloatingPointError(
            f"{what} at step {self.step}; {known}. Go on from it with a lower rate: --resume --lr ... --allow-change lr"
        )

    def validate(self, batches: Sequence[Batch] | None = None) -> float:
        """Mean loss over fixed batches (the run's own validation by default), with attention as it is now."""
        losses = []
        self.model.eval()  # sparsify then knows that this is no training
        with torch.no_grad(), self._precision():
            for batch in batches or self.validation:
                losses.append(loss(self.model, batch.to(self.device)))
                if self.interrupted:
                    break
        self.model.train()
        return torch.stack(losses).mean().item()

    def _validate_into(self, row: dict) -> None:
        found = self.validate()
        if not self.interrupted:  # otherwise it is of a part of the clips
            row["validation"] = found

    def save(self, name: str = folder.CHECKPOINTS) -> None:
        """Write a checkpoint of this step, and `model.safetensors` of the EMA weights, to generate from."""
        config, model = self.config, dict(self.model.named_parameters())
        optimizer = {
            f"{name}.{key}": torch.as_tensor(value)
            for name, weight in model.items()
            for key, value in self.optimizer.state[weight].items()
        }
        parts, state = {"model": model, "ema": self.ema, "optimizer": optimizer}, {"step": self.step}
        state["model"] = config.model.to_dict()
        if self.handle is not None:
            parts["sparsity"], state["sparsity"] = checkpoint.split(self.handle.state_dict())
        keep = config.keep if name == folder.CHECKPOINTS else 1
        checkpoint.save(config.out / name, self.step, parts, state, keep=keep)
        checkpoint.save_weights(config.out / folder.WEIGHTS, self.ema, self.about())
        if self.handle is not None and self.handle.decision.active:
            self.handle.save(config.out / folder.SPARSE)

    def about(self) -> dict:
        """What a weights file says of itself."""
        config = self.config
        sizes = {"frames": config.frames, "height": config.height, "width": config.width}
        return {"model": config.model.to_dict(), "step": self.step, "clip": sizes, "data": config.data.name}

    def resume(self, step: int | None = None, *, allow: Sequence[str] = ()) -> None:
        """Take up checkpoint `step` of this run, the newest by default; history after it is dropped.

        ValueError where the run was begun with another configuration, unless only those dials differ that may change
        (such as steps) or that `allow` names.
        """
        out = self.config.out
        for line in folder.changes(self.config, allow):
            log.info("resumed with a change, %s", line)
        self.load(out / folder.CHECKPOINTS, step)
        for name in (folder.HISTORY, folder.PLANS):
            folder.keep_until(out / name, self.step)
        for name in checkpoint.set_aside(out / folder.CHECKPOINTS, self.step):
            log.warning("%s: the run now goes on from step %d; remove it if it is not wanted", name, self.step)
        self._goes_on = True

    def load(self, root: Path, step: int | None = None) -> None:
        """Take up a checkpoint of any run of this model, from the folder that holds its checkpoints."""
        parts, state = checkpoint.load(root, step)
        if state["model"] != as_json(self.config.model.to_dict()):
            raise ValueError(f"the checkpoint holds a model of another shape, {state['model']}")
        self.model.load_state_dict(parts["model"])
        self.ema = {name: parts["ema"][name].to(self.device) for name in self.ema}  # in the parameters' order
        for name, weight in self.model.named_parameters():
            found = {
                k.removeprefix(f"{name}."): v for k, v in parts["optimizer"].items() if k.rpartition(".")[0] == name
            }
            self.optimizer.state[weight] = {k: v if k == "step" else v.to(self.device) for k, v in found.items()}
        if self.handle is not None and "sparsity" in state:
            self.handle.load_state_dict(checkpoint.join(parts["sparsity"], state["sparsity"]))
        self.step = state["step"]

    def _precision(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


def open_clips(config: TrainConfig, split: Literal["train", "val"]) -> Clips:
    """The clips a run learns from, or those it is judged by. ValueError where they do not serve."""
    open_ = partial(
        Clips, frames=config.frames, height=config.height, width=config.width, stride=config.stride, zoom=config.zoom
    )
    apart = config.validation
    inside = config.out.resolve().is_relative_to(config.data.resolve())  # a run's own files are no clips
    leave_out = [place for place in (apart, config.out if inside else None) if place is not None]
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


def choose_conditions(
    config: TrainConfig, clips: Clips, held_out: Clips, text: Mapping[str, Tensor] | None
) -> Conditions:
    """What the model is told about a clip. ValueError where model and data do not fit each other."""
    model, classes = config.model, clips.classes
    captions = {clip.caption for part in (clips, held_out) for clip in part.clips if clip.caption}
    if model.classes:
        for part, root in ((classes, config.data), (held_out.classes, config.validation or config.data)):
            if len(part) != model.classes or part != classes:
                raise ValueError(f"the model has {model.classes} classes, {root} has {len(part)} class folders")
        return "label"
    if model.text_dim:
        return _text(config, captions, text)
    if text is not None or config.text_encoder is not None:
        raise ValueError("a text encoder was given, but the model takes no text: set --model.text-dim to its width")
    if (classes or captions) and not config.unconditional:
        held = f"{len(classes)} class folders" if classes else "captions"
        way = f"--model.classes {len(classes)}" if classes else "--model.text-dim N --text-encoder NAME"
        raise ValueError(
            f"{config.data} has {held}, but the model takes no condition: give {way}, or --unconditional to train "
            "without them"
        )
    return "none"


def _text(config: TrainConfig, captions: set[str], text: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    if not captions:
        raise ValueError(f"the model takes text, but {config.data} has no captions.jsonl; leave --model.text-dim out")
    if text is None:
        if config.text_encoder is None:
            raise ValueError("the model takes text embeddings: give --text-encoder, or text= to Trainer")
        text = embed_captions(captions, config.text_encoder)
    missing = sorted({"", *captions} - set(text))
    if missing:
        raise ValueError(f"text has no embedding of {missing[0]!r} and {len(missing) - 1} more captions")
    width = len(text[""])
    if width != config.model.text_dim:
        raise ValueError(f"the embeddings are {width} wide, the model takes {config.model.text_dim}: --model.text-dim")
    return text


def learning_rate(config: Any, step: int) -> float:
    """Linear warm-up, then a cosine down to `decay_to`; by a configuration's dials of these names."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (config.decay_to + (1 - config.decay_to) * (1 + math.cos(math.pi * done)) / 2)
