"""What a training step costs, counted on tensors that have shapes but no memory: operations, and bytes at their peak.

One forward and backward of one size is run on fake tensors. Nothing is assumed of a model then: every matrix product
and attention counts as it is called, and every tensor while it lives. Attention is dense there, and on one process.

Shapes: B batch, H heads, S queries, T keys, D head dim.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from foveate.finetune.config import FinetuneConfig
from foveate.finetune.families import About, Sample, diffusers
from foveate.finetune.model import prepare, stored_in

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Work:
    """Operations of a forward and backward of one clip, nothing computed twice: dense self-attention's, the rest."""

    attention: int
    rest: int

    def operations(self, kept: float = 1.0) -> float:
        """With attention that computes `kept` of its tiles."""
        return self.rest + kept * self.attention


class _Attention:
    """Operations of the attention that CPU tensors run, which torch's counter does not know; self-attention apart."""

    def __init__(self) -> None:
        self.own = 0

    def forward(self, q: Sequence[int], k: Sequence[int], *rest: Any, **_: Any) -> int:
        return self._count(2, q, k)

    def backward(self, dout: Any, q: Sequence[int], k: Sequence[int], *rest: Any, **_: Any) -> int:
        return self._count(5, q, k)  # with the scores once more, as flash attention does

    def _count(self, products: int, q: Sequence[int], k: Sequence[int]) -> int:
        found = 2 * products * prod(q[:-1]) * k[-2] * q[-1]
        self.own += found if q[-2] == k[-2] else 0
        return found


class _Live(TorchDispatchMode):
    """Counts the bytes of all tensors made inside it, while they live; views of what was there before are not."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {x.untyped_storage()._cdata: 0 for x in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, list | tuple) else (out,):
            if isinstance(x, Tensor):
                self._note(x.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._known.pop(key)


def work(about: About, part: str, config: FinetuneConfig, sample: Sample, dtype: torch.dtype) -> Work:
    """For clips of this sample's size."""
    attention = _Attention()
    name = aten._scaled_dot_product_flash_attention_for_cpu
    more: Any = {name: attention.forward, aten._scaled_dot_product_flash_attention_for_cpu_backward: attention.backward}
    counter = FlopCounterMode(display=False, custom_mapping=more)
    _step(about, part, replace(config, checkpointing="none"), sample, dtype, False, lambda tensors: counter)
    clips = len(sample.latents)
    return Work(attention.own // clips, (counter.get_total_flops() - attention.own) // clips)


def held(about: About, part: str, config: FinetuneConfig, sample: Sample, dtype: torch.dtype, sharded: bool) -> int:
    """Bytes at their peak of what a forward of this sample and its backward make, weights' gradients left out.

    sharded: weights are computed with in `dtype`, as FSDP gives them, and not cast here.
    """
    found: list[_Live] = []

    def watch(tensors: Iterable[Tensor]) -> _Live:
        found.append(_Live(tensors))
        return found[0]

    _step(about, part, config, sample, dtype, sharded, watch)
    return found[0].peak


def _step(
    about: About, part: str, config: FinetuneConfig, sample: Sample, dtype: torch.dtype, sharded: bool,
    watched: Callable[[Iterable[Tensor]], AbstractContextManager[Any]],
) -> None:  # fmt: skip
    """A forward and backward on fake tensors, inside what `watched` makes of those that are there before."""
    low = dtype == torch.bfloat16
    model: Any = empty(about, part, config, dtype)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels that real tensors of this type would not meet
        _faked(model, dtype if low and sharded else None)
        for p in model.parameters():  # a gradient goes where it is summed at once
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        more = {name: fake.from_tensor(x) for name, x in sample.more.items()}
        latents, text, mask = (fake.from_tensor(x) for x in (sample.latents, sample.text, sample.mask))
        given = Sample(latents, text, mask, sample.fps, more)
        precision = torch.autocast("cpu", torch.bfloat16) if low and not sharded else nullcontext()
        with watched([*model.parameters(), *model.buffers(), latents, text, mask, *more.values()]):
            inputs = about.family.inputs(about, model, latents.to(dtype), torch.full((len(latents),), 500.0), given)
            with precision:
                out = model(**inputs, return_dict=False)[0]
            loss = (about.family.output(about, latents, out).float() - latents).square().mean()
            del out, inputs
            loss.backward()


def empty(about: About, part: str, config: FinetuneConfig, dtype: torch.dtype) -> nn.Module:
    """The transformer that is trained, on the meta device: shapes without weights."""
    cls = getattr(diffusers(), about.transformers[part]["_class_name"])
    with torch.device("meta"):
        model = cls.from_config(dict(about.transformers[part]))
        kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
        for name, p in model.named_parameters():
            if not any(key in name.split(".") for key in kept):
                p.data = p.data.to(stored_in(config, dtype))
        prepare(model, config)
    return model


def _faked(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Weights and buffers as fake tensors of the CPU, inside a FakeTensorMode; weights in `dtype`, if given."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                made = torch.empty_like(p, device="cpu", dtype=dtype)
                module._parameters[name] = nn.Parameter(made, requires_grad=p.requires_grad)
        for name, x in module._buffers.items():
            module._buffers[name] = None if x is None else torch.empty_like(x, device="cpu")


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, the one that holds most.

    gathered: two blocks' whole weights and one's gradients, which FSDP has at a time. optimizer: AdamW's moments;
    stepping: what its step makes besides. average: the EMA.
    """

    weights: int
    gradients: int
    average: int
    optimizer: int
    stepping: int
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        """Activations are gone when the optimiser steps."""
        kept = self.weights + self.gradients + self.average + self.optimizer
        return kept + max(self.activations + self.gathered, self.stepping)


def sharded(p: Tensor, ranks: int) -> int:
    """Numbers of a weight that the first rank holds: FSDP2 shards the first dimension."""
    return -(-p.shape[0] // ranks) * prod(p.shape[1:]) if p.ndim else p.numel()


def memory(
    parameters: Mapping[str, Tensor], blocks: Sequence[Sequence[Tensor]], *, held: int, ranks: int, context: int,
    element: int,
) -> Memory:  # fmt: skip
    """Of weights sharded over `ranks`; `held` bytes of activations are shared by `context` ranks.

    blocks: the weights that FSDP gathers together, by group. element: bytes of the type that is computed in.
    """
    trained = 4 * sum(sharded(p, ranks) for p in parameters.values() if p.requires_grad)
    sizes = [sum(p.numel() for p in block) for block in blocks]
    training = [sum(p.numel() for p in block if p.requires_grad) for block in blocks]
    return Memory(
        weights=sum(p.element_size() * sharded(p, ranks) for p in parameters.values()), gradients=trained,
        average=trained, optimizer=2 * trained, stepping=trained,
        gathered=element * (2 * max(sizes) + max(training)) if ranks > 1 else 0, activations=held // context,
    )  # fmt: skip
