"""Copies and pickles of a model are plain: what foveate has put into it stays with the model it was put into.

copy.deepcopy and pickle ask objects what to make of them (`__reduce__`); those here name what stood there before.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn


class Hook:
    """A hook of one model; in copies it does nothing."""

    def __init__(self, call: Callable[..., Any]):
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return itself, (nothing,)


class Method:
    """`call` in place of a model's method `name`; copies have their class's own, or a context that does nothing."""

    def __init__(self, model: nn.Module, name: str, call: Callable[..., Any] | None = None):
        self.model, self.name, self.call = model, name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.call is not None:
            return self.call(*args, **kwargs)
        own = getattr(type(self.model), self.name, None)
        return nullcontext() if own is None else own(self.model, *args, **kwargs)

    def __reduce__(self) -> Any:
        return Method, (self.model, self.name)


def itself(original: Any) -> Any:
    return original


def nothing(*args: Any, **kwargs: Any) -> None:
    return None
