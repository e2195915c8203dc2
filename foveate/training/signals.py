"""Ctrl-C and SIGTERM during a run."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

log = logging.getLogger("foveate")


class Run(Protocol):
    interrupted: int


@contextmanager
def noted(run: Run) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM sets `run.interrupted` to its number; a second one does what it did before."""
    if threading.current_thread() is not threading.main_thread():
        log.info("training runs outside the main thread: signals are the caller's, who may call stop()")
        yield
        return

    def note(number: int, frame: object) -> None:
        run.interrupted = number
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
