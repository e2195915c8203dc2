"""A collective that does not complete: who is missing, and in what. Ranks that live say so in the job's store."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch.distributed as dist

log = logging.getLogger("foveate")

GRACE = 10.0  # seconds in which ranks that live have to say so
SILENCE = 5.0  # seconds more until the store counts as lost


class CommError(RuntimeError):
    """A collective did not complete; the message names it, and the ranks that did not answer."""


def diagnose(ranks: Sequence[int], name: str, what: str, error: BaseException | str, timeout: float) -> str:
    """What to tell a person: which collective of the group `name`, and which of its world `ranks` did not answer.

    Takes up to GRACE seconds, in which every rank that lives says in the job's store what it waits in, and SILENCE more
    where the store does not answer: where a host is cut off, its calls would wait for minutes.
    """
    found: list[tuple[str, list[str]]] = []
    asking = threading.Thread(target=lambda: found.append(_ask(ranks, what, timeout)), daemon=True)
    asking.start()
    asking.join(min(GRACE, timeout) + SILENCE)
    verdict, told = found[0] if found else ("the job's store does not answer either: rank 0 or the network is lost", [])
    head = f"rank {dist.get_rank()}: '{what}' among ranks {list(ranks)} ({name}) did not complete"
    return "\n  ".join([f"{head}. {verdict}.", *told, f"{str(error).splitlines()[0]}"])


def _ask(ranks: Sequence[int], what: str, timeout: float) -> tuple[str, list[str]]:
    """The verdict, and what the other living ranks say."""
    me = dist.get_rank()
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(_key(me), f"rank {me} waits in '{what}'")
        others = [rank for rank in ranks if rank != me]
        end = time.monotonic() + min(GRACE, timeout)
        silent = others
        while silent and time.monotonic() < end:
            silent = [rank for rank in silent if not store.check([_key(rank)])]
            time.sleep(0.1)
        told = [store.get(_key(rank)).decode() for rank in others if rank not in silent]
        if silent:
            names = ", ".join(str(rank) for rank in silent)
            verdict = f"rank {names} did not answer: it died, hangs, or is not in this collective"
        else:
            verdict = "all its ranks are alive and wait: they disagree on the collective, or the network fails"
        store.set(_key(me), f"rank {me} waits in '{what}' and says: {verdict}")
    except (RuntimeError, ValueError) as lost:
        return f"the job's store does not answer either ({str(lost).splitlines()[0]}): rank 0 died", []
    return verdict, told


class Watch(threading.Thread):
    """NCCL's waits do not hold the host: this thread says by name what is overdue, before NCCL ends the process."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="foveate-watch")
        self._pending: deque[tuple[float, Callable[[str], str], str, Any]] = deque()

    def add(self, diagnosis: Callable[[str], str], timeout: float, done: Any) -> None:
        """Have `diagnosis` asked, with a reason, where the CUDA event `done` has not come in `timeout` seconds."""
        reason = f"no answer in {timeout:.0f} s"
        self._pending.append((time.monotonic() + timeout, diagnosis, reason, done))

    def run(self) -> None:
        while True:
            time.sleep(1.0)
            while self._pending:
                due, diagnosis, reason, done = self._pending[0]
                if not done.query():
                    if time.monotonic() > due:
                        log.critical("%s", diagnosis(reason))
                        self._pending.popleft()
                    break
                self._pending.popleft()


@cache
def watch() -> Watch:
    """The one of this process."""
    thread = Watch()
    thread.start()
    return thread


def _key(rank: int) -> str:
    return f"foveate/stuck/{rank}"
