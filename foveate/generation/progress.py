"""A live line for each clip: the denoising step, and how much of the attention was computed so far."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from foveate.training.progress import live


class Bar:
    """What a diffusers pipeline asks for as its `progress_bar`: counts steps, as tqdm would.

    stage: in words, what runs now. note: told at every step, what else to show.
    """

    def __init__(self, show: Callable[[int, int, str], None], note: Callable[[], str]):
        self._show, self._note = show, note
        self.stage, self.total, self.done = "encoding the prompt", 0, 0

    def __call__(self, iterable: Any = None, total: int | None = None) -> "Bar":
        self._items = iterable
        self.total, self.done = len(iterable) if total is None else total, 0
        self._tell()
        return self

    def update(self, count: int = 1) -> None:
        self.done += count
        self._tell()

    def _tell(self) -> None:
        self.stage = f"at step {self.done + 1} of {self.total}" if self.done < self.total else "decoding"
        self._show(self.done, self.total, self._note())

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()

    def set_description(self, *_: Any, **__: Any) -> None: ...

    set_postfix = set_description_str = set_postfix_str = write = set_description


@contextmanager
def watching(console: Console, title: str, note: Callable[[], str]) -> Iterator[Bar]:
    """For the steps of one clip."""
    with live(console, title) as (show, _):
        yield Bar(show, note)
