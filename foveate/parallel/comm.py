"""Collectives of context parallelism: uneven, asynchronous, counted, and named when a rank does not answer.

Every collective has a name (`what`). Where one fails or times out, the ranks that still live tell each other so through
the job's store, and the error names the ranks that did not, and what was waited for.

Buffers are contiguous tensors of any dtype, moved as bytes. On CUDA with NCCL a collective runs on a stream of its own
and `Pending.wait` makes the current stream wait, not the host. gloo moves host memory: CUDA tensors are staged there.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foveate.parallel.failure import CommError, diagnose, watch
from foveate.parallel.two_way import exchange

log = logging.getLogger("foveate")

TIMEOUT = 90.0  # seconds: with the grace below a lost rank ends the job in less than two minutes
SPARE = 20.0  # NCCL's own watchdog ends the process this much later, after the names have been logged


_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in 2.13


@dataclass
class Traffic:
    """Counted since `reset`: bytes this rank sent to others, by kind of collective, and seconds it waited for them.

    On CUDA the host does not wait: `waited` is then what `timed` events between streams say (see `exposed_seconds`).
    """

    sent: Counter = field(default_factory=Counter)
    waited: float = 0.0
    timed: bool = False
    events: list[tuple[Any, Any]] = field(default_factory=list)

    def reset(self) -> None:
        self.sent.clear()
        self.events.clear()
        self.waited = 0.0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.sent.values())

    def exposed_seconds(self) -> float:
        """Time that computation stood still for communication. Waits for the device."""
        if not self.events:
            return self.waited
        torch.cuda.synchronize()
        return sum(before.elapsed_time(after) for before, after in self.events) / 1e3


TRAFFIC = Traffic()


class Pending:
    """A collective under way. `wait()` gives its result; `after` is applied to it once."""

    def __init__(self, group: "Group", what: str, work: Any, result: Callable[[], Any]):
        self.group, self.what, self._work, self._result = group, what, work, result

    def wait(self) -> Any:
        """The result, of use on the current stream. Raises CommError where a rank does not answer."""
        if self._work is not None:
            began = time.perf_counter()
            before = _event()
            try:
                self._work.wait()
            except RuntimeError as error:
                raise CommError(self.group.diagnose(self.what, error)) from error
            TRAFFIC.waited += time.perf_counter() - began
            if before is not None:
                TRAFFIC.events.append((before, _event()))
            self._work = None
        return self._result()


def _event() -> Any:
    if not (TRAFFIC.timed and torch.cuda.is_available()):
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Group:
    """The ranks that share something. Every rank of the world makes the same groups in the same order (`partition`).

    ranks: of the world, in any order. `rank` is this process's place among them, and everything that is by rank goes by
    these places. A group of one moves nothing.
    """

    def __init__(self, ranks: Sequence[int], name: str, process_group: Any, timeout: float):
        self.ranks, self.name, self.timeout = tuple(ranks), name, timeout
        self.size = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank()) if dist.is_initialized() else 0
        # A process group has its ranks in ascending order: its i-th is at place _order[i] of ours.
        order = sorted(range(self.size), key=self.ranks.__getitem__)
        self._order = None if order == list(range(self.size)) else order
        self._group = process_group
        self._nccl = process_group is not None and "nccl" in dist.get_backend_config(process_group)
        self._stream: Any = None
        self.siblings: list[tuple[int, ...]] = []  # what `partition` made with it, for `release`

    def all_to_all(self, send: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int], what: str) -> Pending:
        """Rows of `send` (L, ...), `send_rows[i]` of them to each rank i in turn; result: the rows received, by rank.

        A rank's rows for itself are copied. Rows may have no elements at all.
        """
        if sum(send_rows) != send.shape[0]:
            raise ValueError(f"{what}: {send.shape[0]} rows to send, {list(send_rows)} planned")
        receive = send.new_empty((sum(receive_rows), *send.shape[1:]))
        if self.size == 1:
            return Pending(self, what, None, lambda: send)
        row = send.element_size() * (send[0].numel() if len(send) else receive[0].numel() if len(receive) else 0)
        TRAFFIC.sent[what.partition(" of ")[0]] += row * (sum(send_rows) - send_rows[self.rank])
        order = self._order or range(self.size)
        counts = [[side[place] * row for place in order] for side in (receive_rows, send_rows)]

        def launch(out: Tensor, given: Tensor) -> Any:
            if not self._nccl:
                return exchange(out, given, counts[0], counts[1], self._group)
            return dist.all_to_all_single(out, given, *counts, group=self._group, async_op=True)

        if self._order is None:
            return self._run(launch, send, receive, what)
        parts = send.split(list(send_rows))
        pending = self._run(launch, torch.cat([parts[place] for place in order]), receive, what)

        def by_place() -> Tensor:
            return torch.cat(self._by_place(pending.wait().split([receive_rows[place] for place in order])))

        return Pending(self, what, None, by_place)

    def gather(self, x: Tensor, rows: Sequence[int], what: str) -> Pending:
        """Every rank's x (rows[rank], ...), in the order of ranks; result: a list of tensors. rows: of every rank."""
        if x.shape[0] != rows[self.rank]:
            raise ValueError(f"{what}: rank {self.rank} of {self.name} has {x.shape[0]} rows, {list(rows)} planned")
        if self.size == 1:
            return Pending(self, what, None, lambda: [x])
        # Shards differ by a tile at most, so filling up to the longest wastes little and one flat collective does it.
        most = max(rows)
        send = x.contiguous()
        if most > x.shape[0]:
            send = torch.cat([send, send.new_zeros((most - x.shape[0], *x.shape[1:]))])
        receive = x.new_empty((self.size * most, *x.shape[1:]))
        TRAFFIC.sent[what.partition(" of ")[0]] += (self.size - 1) * send.numel() * send.element_size()

        def launch(out: Tensor, given: Tensor) -> Any:
            return _all_gather(out, given, group=self._group, async_op=True)

        pending = self._run(launch, send, receive, what)

        def cut() -> list[Tensor]:
            parts = self._by_place(pending.wait().split(most))
            return [part[:count] for part, count in zip(parts, rows, strict=True)]

        return Pending(self, what, None, cut)

    def _by_place(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """What came in the order of the process group, in ours."""
        if self._order is None:
            return list(parts)
        return [part for _, part in sorted(zip(self._order, parts, strict=True), key=lambda pair: pair[0])]

    def shift(self, x: Tensor, rows: Sequence[int], what: str) -> Pending:
        """x (rows[rank], ...) goes to the next rank, round; result: what the one before sent. rows: of every rank."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        send_rows = [rows[self.rank] if rank == after else 0 for rank in range(self.size)]
        receive_rows = [rows[before] if rank == before else 0 for rank in range(self.size)]
        return self.all_to_all(x, send_rows, receive_rows, what)

    def mean_(self, tensors: Sequence[Tensor], what: str) -> None:
        """Mean over the group's ranks, in place, of tensors of one dtype and device; one collective."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([x.flatten() for x in tensors])
        TRAFFIC.sent[what] += flat.numel() * flat.element_size()  # about: a ring sends twice the (n - 1) / n of it

        def launch(out: Tensor, given: Tensor) -> Any:
            return dist.all_reduce(out, group=self._group, async_op=True)

        self._run(launch, flat, flat, what, raw=True).wait()
        flat /= self.size
        for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view(x.shape))

    def max(self, x: Tensor, what: str) -> Tensor:
        """The largest of the ranks' values, element by element."""
        if self.size == 1:
            return x
        return torch.stack(self.gather(x[None], [1] * self.size, what).wait()).amax((0, 1))

    @contextmanager
    def aside(self, ready: Any) -> Iterator[None]:
        """Work inside goes to the communication stream, behind the event `ready` only; on the CPU it changes nothing.

        Tensors of the other stream that are read inside must be marked with `lend`.
        """
        if ready is None:
            yield
            return
        stream = self._side_stream()
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            yield

    def lend(self, *tensors: Tensor) -> None:
        """Keep these tensors' memory until the communication stream is done with what it was given so far."""
        for x in tensors:
            if x.is_cuda:
                x.record_stream(self._side_stream())

    def _run(
        self, launch: Callable[[Tensor, Tensor], Any], send: Tensor, receive: Tensor, what: str, raw: bool = False
    ) -> Pending:
        def as_bytes(x: Tensor) -> Tensor:
            return x if raw else x.contiguous().flatten().view(torch.uint8)

        staged = send.is_cuda and not self._nccl
        try:
            if staged:
                say_once("%s: gloo moves host memory, tensors on the GPU are staged there", self.name)
                given = send.cpu()
                out = given if send is receive else torch.empty_like(receive, device="cpu")
                work = launch(as_bytes(out), as_bytes(given))
                return Pending(self, what, work, lambda: _used_here(receive).copy_(out))
            if not send.is_cuda:
                return Pending(self, what, launch(as_bytes(receive), as_bytes(send)), lambda: receive)
            stream = self._side_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                launch(as_bytes(receive), as_bytes(send)).wait()  # holds this stream, not the host
                done = torch.cuda.Event()
                done.record()
            send.record_stream(stream)
            receive.record_stream(stream)
            watch().add(partial(self.diagnose, what), self.timeout, done)
            return Pending(self, what, _Until(done), lambda: _used_here(receive))
        except RuntimeError as error:
            raise CommError(self.diagnose(what, error)) from error

    def _side_stream(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream

    def diagnose(self, what: str, error: BaseException | str) -> str:
        """What to tell a person about a collective that did not complete. Takes some seconds."""
        return diagnose(self.ranks, self.name, what, error, self.timeout)


@dataclass(frozen=True)
class _Until:
    """What a Pending waits for on CUDA: an event of the communication stream. It keeps no tensor alive."""

    done: Any

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


def _used_here(x: Tensor) -> Tensor:
    x.record_stream(torch.cuda.current_stream())
    return x


_MADE: dict[Any, tuple[Any, int]] = {}  # process groups in use by ranks, name and timeout, and by how many


def partition(groups: Sequence[Sequence[int]], name: str, timeout: float = TIMEOUT) -> Group:
    """The one of these groups of world ranks that this process is in. All ranks call it alike, in the same order.

    Groups that are in use already are used again; `release` gives one back.
    """
    own = None
    for ranks in groups:
        made = _process_group(tuple(ranks), name, timeout) if len(ranks) > 1 else None
        if dist.get_rank() in ranks:
            own = Group(ranks, name, made, timeout)
            own.siblings = [tuple(ranks) for ranks in groups if len(ranks) > 1]
    if own is None:
        raise ValueError(f"rank {dist.get_rank()} is in none of the groups {list(map(list, groups))} of {name}")
    return own


def _process_group(ranks: tuple[int, ...], name: str, timeout: float) -> Any:
    key = dist.group.WORLD, ranks, name, timeout
    made, users = _MADE.get(key, (None, 0))
    if not users:
        limit = timedelta(seconds=timeout + (SPARE if "nccl" in dist.get_backend_config() else 0))
        made = dist.new_group(list(ranks), timeout=limit, group_desc=f"foveate {name}")
    _MADE[key] = made, users + 1
    return made


def release(group: Group) -> None:
    """Give a group of `partition` back, on all ranks alike: the last user's end destroys its process groups."""
    for ranks in group.siblings:
        key = dist.group.WORLD, ranks, group.name, group.timeout
        made, users = _MADE.pop(key, (None, 0))
        if users > 1:
            _MADE[key] = made, users - 1
        elif users == 1 and made is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(made)
    group.siblings = []


def alone(name: str = "alone") -> Group:
    """The group of this process by itself."""
    return Group([dist.get_rank() if dist.is_initialized() else 0], name, None, TIMEOUT)


@dataclass(frozen=True)
class Shards:
    """How a sequence is cut over ranks: rank i holds the tokens bounds[i] ... bounds[i + 1] - 1, in tile order."""

    bounds: tuple[int, ...]

    @classmethod
    def cut(cls, tokens: int, ranks: int, unit: int = 64) -> "Shards":
        """Whole tiles of `unit` tokens, as even as can be; only the last rank may end in a short one.

        Raises ValueError where there are fewer tiles than ranks.
        """
        tiles = -(-tokens // unit)
        if tiles < ranks:
            raise ValueError(
                f"{tokens} tokens are {tiles} tiles of {unit}, too few for {ranks} context-parallel ranks: every rank "
                "needs one; use fewer ranks (ParallelConfig(head=..., sequence=...))"
            )
        even, more = divmod(tiles, ranks)
        counts = [even + (rank < more) for rank in range(ranks)]
        starts = [unit * sum(counts[:rank]) for rank in range(ranks)]
        return cls((*starts, tokens))

    @property
    def sizes(self) -> list[int]:
        """Tokens of every rank."""
        return [stop - start for start, stop in pairwise(self.bounds)]

    def merged(self, count: int) -> "Shards":
        """With every `count` neighbouring ranks taken together."""
        return Shards(self.bounds[::count])


@cache
def say_once(message: str, *values: Any) -> None:
    log.info(message, *values)
