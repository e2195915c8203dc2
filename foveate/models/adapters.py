"""The adapter table: how foveate's policies get into a video transformer, and out again, without copying its forward.

A row says where a model class has its self-attentions, how the token grid follows from the forward's inputs, and which
small processor stands in for the model's own. docs/adding-a-model.md walks through one.

Not covered: cross-attention, which is left alone, and masked, block-causal or KV-cached self-attention, refused.
"""

import inspect
import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from foveate.attention import Layer, Policy
from foveate.models.copies import Hook, Method, itself
from foveate.models.processor import Context, Shard, Share, share_compiled_blocks
from foveate.models.table import TABLE, Adapter
from foveate.tiles import CUBE, VideoGrid

log = logging.getLogger("foveate")

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")
MARK = "_foveate_installed"  # on the transformer, while something is
CAUSAL = re.compile("Causal|FAR(?=[A-Z])|KVCache|KVAttn")


def find(model: nn.Module) -> Adapter:
    """The row for a model, however it is wrapped (compiled, DDP, FSDP, peft, a subclass).

    Raises ValueError for models without a row and for block-causal or KV-cached ones.
    """
    return _locate(model)[1]


def install(model: nn.Module, policy: Policy) -> "Installed":
    """Let every self-attention of a model be computed by `policy(layer, q, k, v)`, until `remove()`.

    Before or after adding LoRA, torch.compile, checkpointing and FSDP. Raises ValueError for models that `find`
    refuses, for a second installation, and where processors stand that this row does not know.
    """
    root, adapter = _locate(model)
    if installed(root) is not None:
        raise ValueError("a policy is installed in this model already: remove() it first, or assign its .policy")
    attentions = _attentions(root, adapter)
    if adapter.processor is None:
        return _PolicyInstalled(root, adapter, attentions, policy)
    _check_processors(adapter, attentions | _readers(root, adapter))
    return _ProcessorsInstalled(root, adapter, attentions, policy)


def installed(model: nn.Module) -> "Installed | None":
    """What `install` put into a model, None where nothing is."""
    found = vars(_locate(model)[0]).get(MARK)
    return found if isinstance(found, Installed) else None


class Installed:
    """A policy in a model. `layers` are the self-attentions' names, `heads` and `dim` the shape of each.

    A context manager too: the end of its `with` removes it. Copies and pickles of the model are plain: what is
    installed stays with this one, and something may be installed in them too.
    """

    def __init__(self, root: Any, adapter: Adapter, attentions: dict[str, Any], policy: Policy):
        shapes = {_shape(root, attention) for attention in attentions.values()}
        if len(shapes) != 1:
            raise ValueError(f"all self-attentions must have the same heads and head dim, got {sorted(shapes)}")
        self.adapter, self.layers, (self.heads, self.dim) = adapter, tuple(attentions), shapes.pop()
        self._root, self._attentions, self._context = root, attentions, Context(policy, adapter.text_first)
        self._enter()
        setattr(root, MARK, self)

    @property
    def policy(self) -> Policy:
        """The policy in use; assign another to exchange it, for instance for one that wraps it."""
        return self._context.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._context.policy = policy

    @property
    def root(self) -> nn.Module:
        """The transformer itself, inside whatever wraps it."""
        return self._root

    @property
    def branch(self) -> str:
        """The CFG branch that forwards are told now."""
        return self._context.branch

    @property
    def step(self) -> int | None:
        """The denoising step that forwards are told now."""
        return self._context.step

    @property
    def sigma(self) -> float | None:
        """The noise level that forwards are told now."""
        return self._context.sigma

    @property
    def shard(self) -> Shard | None:
        """Which part of every sequence this process holds; None for all of it. Set by context parallelism."""
        return self._context.shard

    @shard.setter
    def shard(self, shard: Shard | None) -> None:
        self._context.shard = shard

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """Frames, height and width of the tiles that every forward's grid is cut into (see `VideoGrid`).

        Assign another between training steps; what was learned about tiles and octants of the old shape is void then.
        """
        return self._context.tile_shape

    @tile_shape.setter
    def tile_shape(self, shape: tuple[int, int, int]) -> None:
        self._context.tile_shape = VideoGrid(1, 1, 1, cube=shape).cube

    @property
    def share(self) -> Share | None:
        """How other tokens see the video of all ranks; None for that of this process. Set by context parallelism."""
        return self._context.share

    @share.setter
    def share(self, share: Share | None) -> None:
        self._context.share = share

    @property
    def rows(self) -> Tensor | None:
        """int64 (S,): where a packed sequence has its video tokens, and then all others, in the forward that runs."""
        return None if self._context.call is None else self._context.call.rows

    def blocks(self) -> dict[str, nn.Module]:
        """The innermost modules that `adapter.sharding.blocks` names, in order, by name. ValueError for none."""
        pattern = self.adapter.sharding.blocks if self.adapter.sharding else ""
        found = _named(self._root, pattern)
        if not found:
            raise ValueError(
                f"the adapter of {self.adapter.model} does not say where its tokens may be sharded; give its row a "
                "Sharding (docs/adding-a-model.md)"
            )
        return found

    @property
    def grid(self) -> VideoGrid | None:
        """The token grid of the forward that is running, where the processors were told; None before any."""
        return None if self._context.call is None else self._context.call.grid

    def set_context(self, *, step: int | None = None, branch: str = "", sigma: float | None = None) -> None:
        """What the next forwards' layers are told: the denoising step, the CFG branch and the noise level.

        diffusers' pipelines need no call: inside its `cache_context` the branch is the context's name ("cond",
        "uncond", "cond_uncond" for both in one batch), the step its step_index and the noise level its sigma, where
        the pipeline gives them. foveate's own `generate` does the same with the built-in model.
        """
        self._context.where = step, branch, sigma

    def telling(self, step: int, branch: str, sigma: float) -> AbstractContextManager:
        """For the length of a `with`, in this thread: what `set_context` says, whatever pipelines say outside."""
        return self._context.during(step, branch, sigma)

    def restart(self) -> None:
        """The next forward is the first of a generation, for policies that learn from its first steps."""
        policy: Any = self.policy
        while policy is not None:
            if hasattr(policy, "restart"):
                policy.restart()
            policy = getattr(policy, "inner", None)

    @property
    def live(self) -> bool:
        """Whether the model is still served: not removed."""
        return vars(self._root).get(MARK) is self

    def remove(self) -> None:
        """Put the model back as it was, with its original processor objects. A second call does nothing."""
        if self.live:
            delattr(self._root, MARK)
            self._leave()

    def __enter__(self) -> "Installed":
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def __reduce__(self) -> Any:
        return itself, (self._before_us(),)

    def _before_us(self) -> Any:
        """What copies of the model have in this one's place."""
        return None

    def _enter(self) -> None:
        raise NotImplementedError

    def _leave(self) -> None:
        raise NotImplementedError


class _ProcessorsInstalled(Installed):
    """In place of the attention processors, with hooks on the transformer that tell which forward is running."""

    def _enter(self) -> None:
        root, adapter = self._root, self.adapter
        assert adapter.processor is not None
        share_compiled_blocks()
        self._inputs = tuple(inspect.signature(type(root).forward).parameters)[1:]
        self._processors = [adapter.processor(self._context, index, name) for index, name in enumerate(self.layers)]
        readers = _readers(root, adapter)
        if adapter.reader is not None:
            self._processors += [adapter.reader(self._context, -1, name) for name in readers]
        self._attentions = self._attentions | readers
        self._originals = [attention.processor for attention in self._attentions.values()]
        for attention, processor in zip(self._attentions.values(), self._processors, strict=True):
            processor.original = attention.processor
            _put(attention, processor)
        before = root.register_forward_pre_hook(Hook(self._before), with_kwargs=True)
        self._hooks = before, root.register_forward_hook(Hook(self._after))
        if hasattr(root, "cache_context"):
            self._cache_context = root.cache_context
            root.cache_context = self._told = Method(root, "cache_context", self._during)

    def _leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if hasattr(self, "_told") and vars(self._root).get("cache_context") is self._told:
            del self._root.cache_context
        places = zip(self._attentions.values(), self._processors, self._originals, strict=True)
        for attention, processor, original in places:
            if attention.processor is processor:
                _put(attention, original)
            else:
                log.warning("%s has another processor than the one installed; left as it is", processor.name)
        self._context.call = None

    def _before(self, root: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        assert self.adapter.grid is not None
        for attention, processor in zip(self._attentions.values(), self._processors, strict=True):
            if attention.processor is not processor:
                raise ValueError(
                    f"{processor.name} no longer has foveate's processor (fuse_qkv_projections and set_attn_processor "
                    "put in others): remove() first, change the model, then install again"
                )
        inputs = dict(zip(self._inputs, args, strict=False)) | kwargs
        self._context.enter(self.adapter.grid(root.config, inputs), inputs["hidden_states"].device)

    def _after(self, root: Any, args: tuple, output: Any) -> None:
        self._context.remember(output if isinstance(output, Tensor) else output[0])

    @contextmanager
    def _during(self, name: str, **where: Any) -> Iterator[None]:
        """diffusers' `cache_context` of this model, which also tells the layers."""
        with (
            self._cache_context(name, **where),
            self._context.during(where.get("step_index"), name, where.get("sigma")),
        ):
            yield


class _PolicyInstalled(Installed):
    """In a model that calls `model.policy` itself, in tile order. It is the policy that the model sees."""

    def _enter(self) -> None:
        self._original, self._root.policy, self._root.tile_shape = self._root.policy, self, CUBE
        self._root.cache_context = self._told = Method(self._root, "cache_context", self._during)

    def _before_us(self) -> Any:
        return self._original

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        return self._root.tile_shape

    @tile_shape.setter
    def tile_shape(self, shape: tuple[int, int, int]) -> None:
        self._root.tile_shape = VideoGrid(1, 1, 1, cube=shape).cube

    def _leave(self) -> None:
        self._root.tile_shape = CUBE
        if vars(self._root).get("cache_context") is self._told:
            del self._root.cache_context
        if self._root.policy is self:
            self._root.policy = self._original
        else:
            log.warning("the model has another policy than the one installed; left as it is")

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        where = self._context
        told = Layer(layer.index, layer.name, layer.grid, *where.where)
        return where.policy(told, q, k, v)

    @contextmanager
    def _during(self, name: str, **where: Any) -> Iterator[None]:
        """What `sample.generate` says of each call, in the manner of diffusers' `cache_context`."""
        with self._context.during(where.get("step_index"), name, where.get("sigma")):
            yield


def clean_name(name: str) -> str:
    """A submodule's name without what torch.compile, checkpoint, FSDP and DDP wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _locate(model: nn.Module) -> tuple[nn.Module, Adapter]:
    """The transformer inside its wrappers, and its row."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"expected a transformer (an nn.Module), got {type(model).__name__}; of a pipeline pass pipe.transformer"
        )
    rows = {row.model: row for row in TABLE}
    roots: list[tuple[nn.Module, Adapter]] = []
    for module in model.modules():
        names = [cls.__name__ for cls in type(module).__mro__]
        _refuse_causal(module, names)
        roots += [(module, rows[name]) for name in names if name in rows][:1]
    if len(roots) == 1:
        return roots[0]
    if roots:
        raise ValueError(f"{type(model).__name__} holds {len(roots)} transformers; pass them one by one")
    raise ValueError(
        f"no adapter for {type(model).__name__}; supported are {', '.join(rows)}. "
        "docs/adding-a-model.md shows how to add one: a row in a table and at most one small processor"
    )


def _refuse_causal(module: nn.Module, names: list[str]) -> None:
    own, config = vars(module).get("num_frame_per_block"), getattr(module, "config", None)
    blocks = own or getattr(config, "num_frame_per_block", None) or 1
    names = [*names, type(getattr(module, "processor", None)).__name__]
    causal = [name for name in names if CAUSAL.search(name)]
    if causal or blocks > 1:
        why = causal[0] if causal else f"num_frame_per_block={blocks}"
        raise ValueError(
            f"{names[0]} attends block-causally or through a KV cache ({why}), where a query may not see every key; "
            "foveate's policies choose among all keys and would be wrong there, so it is refused"
        )


def _attentions(root: nn.Module, adapter: Adapter) -> dict[str, Any]:
    """Self-attentions in layer order, by clean name. A wrapper and what it wraps share one: the inner one stays."""
    patterns = (adapter.attentions,) if isinstance(adapter.attentions, str) else adapter.attentions
    found: dict[str, Any] = {}
    for pattern in patterns:
        found |= _named(root, pattern)
    if not found:
        raise ValueError(f"{adapter.model} has no self-attention named {adapter.attentions}")
    return found


def _readers(root: nn.Module, adapter: Adapter) -> dict[str, Any]:
    """Cross-attentions by which other tokens read the video, by clean name."""
    return _named(root, adapter.readers) if adapter.readers else {}


def _named(root: nn.Module, pattern: str) -> dict[str, Any]:
    named = ((clean_name(name), module) for name, module in root.named_modules())
    return {name: module for name, module in named if re.fullmatch(pattern, name)}


def _check_processors(adapter: Adapter, attentions: dict[str, Any]) -> None:
    for name, attention in attentions.items():
        processor = attention.processor
        if type(processor).__name__ not in adapter.replaces:
            raise ValueError(
                f"{name} has a {type(processor).__name__}, whose work would be lost; this adapter stands in for "
                f"{' and '.join(adapter.replaces)} only. See docs/adding-a-model.md"
            )
        if getattr(processor, "_parallel_config", None) is not None:
            raise ValueError("diffusers' context parallelism is enabled on this model; use foveate.parallelize instead")


def _put(attention: Any, processor: Any) -> None:
    """In place of an attention module's processor: not all of them have set_processor."""
    if hasattr(attention, "set_processor"):
        attention.set_processor(processor)
    else:
        attention.processor = processor


def _shape(root: Any, attention: Any) -> tuple[int, int]:
    """Query heads and head dim."""
    inner = getattr(attention, "inner_dim", None) or root.config.width
    return attention.heads, inner // attention.heads
