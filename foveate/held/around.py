"""A layer around one module's call, and around what its pipeline says of it, that can be taken off again.

The module's class is exchanged for a subclass of it made for this one module, as FSDP2 does: `isinstance` and the
class's name stay, and `__call__` is the subclass's. What was considered instead:

- the instance's `forward`: accelerate's offload and diffusers' hooks put their own there, take it off again after every
  call of a pipeline, and put back what they found first. A layer among them is lost, or loses theirs.
- forward hooks: they cannot leave the call out.
- the private `_compiled_call_impl`, which comes first in `Module.__call__`: `model.compile()` overwrites it.
- one patched `__call__` for the whole class: every other instance would pay, and could not be compiled.

So nothing of this is in the instance: whoever replaces `forward`, adds hooks or compiles, before or after, is inside,
and a copy (deepcopy, pickle, torch.save) is of the plain class.
"""

import copyreg
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

_SAID: ContextVar[Mapping[Any, Any]] = ContextVar("foveate_said", default=MappingProxyType({}))


@contextmanager
def saying(key: Any, value: Any) -> Iterator[None]:
    """For the length of a `with`, in this thread or task only, `said(key)` is `value`."""
    token = _SAID.set({**_SAID.get(), key: value})
    try:
        yield
    finally:
        _SAID.reset(token)


def said(key: Any, default: Any = None) -> Any:
    return _SAID.get().get(key, default)


class Around:
    """`answer(call, args, kwargs)` in place of a module's call, until `remove()`. call: what the module does without.

    `told()` is what the innermost `cache_context` around the call that runs said: its name and what it knows of the
    step, a dict; None outside any. The module has a `cache_context` for as long as this is there.
    """

    def __init__(self, module: nn.Module, answer: Callable[[Callable, tuple, dict], Any]):
        if any(
            layer is not None and layer.on
            for layer in (vars(cls).get("_foveate_around") for cls in type(module).__mro__)
        ):
            raise ValueError("the model reuses earlier steps already: remove() that handle first")
        self.module, self.on, self._plain = module, True, type(module)
        self.answer: Any = torch.compiler.disable(answer, recursive=False)
        self._class = self._subclass()
        object.__setattr__(module, "__class__", self._class)

    def told(self) -> dict[str, Any] | None:
        return said(self)

    def telling(self, name: str, **where: Any) -> AbstractContextManager:
        """As if the module's `cache_context` were entered, its own included."""
        return self.module.cache_context(name, **where)  # type: ignore[operator]

    def remove(self) -> None:
        """Take the layer off. One that others have built upon stays, and does nothing from now on."""
        self.on = False
        if type(self.module) is self._class:
            object.__setattr__(self.module, "__class__", self._plain)

    def _subclass(self) -> type:
        around, plain = self, self._plain

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not around.on or module is not around.module:
                return plain.__call__(module, *args, **kwargs)
            return around.answer(functools.partial(plain.__call__, module), args, kwargs)

        def reduce(module: Any, protocol: Any) -> Any:
            parts = plain.__reduce_ex__(module, protocol)
            if isinstance(parts, str):
                return parts
            made, args, *rest = parts
            made = _new if made is copyreg.__newobj__ else plain if made is around._class else made  # type: ignore[attr-defined]
            return (made, tuple(plain if x is around._class else x for x in args), *rest)

        def context(module: Any) -> Any:
            inner = around._own_context(module)
            return functools.partial(around._during, inner) if around.on else inner

        body: dict[str, Any] = {
            # Whatever compiles the module from outside compiles what is inside this, as one graph.
            "__call__": torch.compiler.disable(call, recursive=False),
            "__reduce_ex__": reduce,
            "cache_context": property(context, _put_context, _drop_context),
            "_foveate_around": self,
            **{name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")},
        }
        return type(plain)(plain.__name__, (plain,), body)  # pyright: ignore[reportCallIssue]

    def _own_context(self, module: Any) -> Any:
        """The module's `cache_context` without this layer: what others put there, its class's, or its inner module's.

        Raises AttributeError where there is none and the layer is off.
        """
        put = vars(module).get("cache_context")
        if put is not None:
            return put
        found = getattr(self._plain, "cache_context", None)
        if found is not None:
            return found.__get__(module)
        try:
            return self._plain.__getattr__(module, "cache_context")
        except AttributeError:
            if not self.on:
                raise
            return None

    @contextmanager
    def _during(self, inner: Any, name: str, **where: Any) -> Iterator[None]:
        with ExitStack() as stack:
            if inner is not None:
                stack.enter_context(inner(name, **where))
            stack.enter_context(saying(self, {"name": name, **where}))
            yield


def _new(cls: type, *args: Any) -> Any:
    """As copyreg's, which pickle refuses for another class than the object's."""
    return cls.__new__(cls, *args)


def _put_context(module: Any, value: Any) -> None:
    vars(module)["cache_context"] = value


def _drop_context(module: Any) -> None:
    if vars(module).pop("cache_context", None) is None:
        raise AttributeError("cache_context")
