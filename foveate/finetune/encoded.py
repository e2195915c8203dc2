"""A folder by `foveate encode` as training batches.

Which samples a step takes is a pure function of (seed, step) and the index: no cursor, no generator state. An epoch
takes every sample once; a forward's samples are of one size; the forwards of a step are of about one length, and are
dealt to the replicas so that their tokens are balanced.

Shapes: N samples, G forwards of a step, R replicas, m samples of a forward.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from foveate.finetune.encode import ABOUT, EMPTY, INDEX, shard_file
from foveate.finetune.families import Sample
from foveate.training.flow import stream

POOL = 16  # steps whose forwards are sorted by length together
OPEN = 64  # shards that are kept open


class Encoded:
    """What a folder holds. `tokens` int64 (N,); `bucket` int64 (N,): which of `shapes` the latents have.

    Raises ValueError for a folder that is no encoding, or not a complete one.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / ABOUT).is_file():
            raise ValueError(
                f"{folder} is no encoding: make one by `foveate encode --model ... --data ... --out {folder}`"
            )
        self.about: dict[str, Any] = _json(folder / ABOUT, (folder / ABOUT).read_text(), "encode into another --out")
        if not (folder / INDEX).is_file():
            there = len(list(folder.glob("shard-*.safetensors")))
            raise ValueError(
                f"{folder} is not complete: {there} of {self.about['shards']} shards are there; run the same `foveate "
                "encode` again, it goes on where it was"
            )
        again = "remove it and run the same `foveate encode` again, which makes it anew"
        self.rows = [_json(folder / INDEX, line, again) for line in (folder / INDEX).read_text().splitlines()]
        if not self.rows:
            raise ValueError(f"{folder / INDEX} names no sample: {again}")
        self.tokens = np.array([row["tokens"] for row in self.rows])
        shapes = sorted({tuple(row["shape"]) for row in self.rows})
        self.shapes = shapes
        places = {shape: i for i, shape in enumerate(shapes)}
        self.bucket = np.array([places[tuple(row["shape"])] for row in self.rows])
        self._empty: dict[str, Tensor] | None = None
        self._files: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def text_width(self) -> int:
        """Of the captions' sequences."""
        with safe_open(self.folder / EMPTY, "pt") as file:
            return file.get_slice("text").get_shape()[-1]

    def held_out(self, fraction: float) -> tuple[np.ndarray, np.ndarray]:
        """Places of the samples to train on and of those held out, whole clips, by their names alone."""
        names = sorted({row["clip"] for row in self.rows}, key=lambda name: hashlib.blake2b(name.encode()).digest())
        held = set(names[: max(1, round(fraction * len(names)))]) if fraction and len(names) > 1 else set()
        out = np.array([row["clip"] in held for row in self.rows])
        return np.flatnonzero(~out), np.flatnonzero(out)

    def batch(self, places: Sequence[int], text_length: int, empty: Sequence[bool] = ()) -> Sample:
        """Samples of one size. Texts are filled up to `text_length`; where `empty`, the text of no caption is taken."""
        dropped = empty or [False] * len(places)
        rows = [self.rows[place] for place in places]
        texts = [self._text(row, drop) for row, drop in zip(rows, dropped, strict=True)]
        length = max(text_length, *(len(text["mask"]) for text in texts))
        parts = {name: torch.stack([self._tensor(row, f"{name}.{row['place']}") for row in rows])
                 for name in ("latents", *rows[0]["more"])}  # fmt: skip
        return Sample(
            parts.pop("latents").float(),
            torch.stack([_fill(text["text"], length) for text in texts]),
            torch.stack([_fill(text["mask"], length) for text in texts]),
            torch.tensor([row["fps"] for row in rows]),
            parts,
        )

    def _text(self, row: dict[str, Any], empty: bool) -> dict[str, Tensor]:
        if empty:
            if self._empty is None:
                self._empty = load_file(self.folder / EMPTY)
            return self._empty
        return {name: self._tensor(row, f"{name}.{row['text']}") for name in ("text", "mask")}

    def _tensor(self, row: dict[str, Any], name: str) -> Tensor:
        number = row["shard"]
        if number not in self._files:
            try:
                self._files[number] = safe_open(shard_file(self.folder, number), "pt")
            except (SafetensorError, OSError) as error:
                raise OSError(f"{shard_file(self.folder, number)} cannot be read ({error}); encode it again") from error
            if len(self._files) > OPEN:
                self._files.popitem(last=False)
        self._files.move_to_end(number)
        return self._files[number].get_tensor(name)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_files": OrderedDict()}  # open files do not travel to worker processes


def _json(file: Path, text: str, advice: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file} is not whole ({error}): {advice}") from None


def _fill(x: Tensor, length: int) -> Tensor:
    return torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])])


class Order:
    """Which samples of `places` each step takes: `step(n)` -> G tuples of m places.

    places: of the samples trained on, with the bucket and the tokens of each. batch: samples of a step over all
    replicas, G x m of them.
    """

    def __init__(
        self, places: np.ndarray, bucket: np.ndarray, tokens: np.ndarray, *, batch: int, micro: int, seed: int
    ):
        if batch % micro:
            raise ValueError(f"--batch {batch} is not a multiple of --micro {micro}, the clips of one forward")
        self.places, self.bucket, self.tokens, self.seed, self.micro = places, bucket, tokens, seed, micro
        self.forwards = batch // micro
        counts = np.bincount(bucket)
        self.groups = int(sum(-(-count // micro) for count in counts))
        self.steps = -(-self.groups // self.forwards)  # of an epoch
        self._epoch = lru_cache(maxsize=2)(self._order)

    def step(self, number: int) -> list[tuple[int, ...]]:
        epoch, place = divmod(number, self.steps)
        return [tuple(int(i) for i in group) for group in self._epoch(epoch)[place]]

    def _order(self, epoch: int) -> np.ndarray:
        """All steps of an epoch, (steps, G, m). Samples or forwards that are missing at an end are taken twice."""
        draw = np.random.default_rng((self.seed, epoch))
        groups = []
        for bucket in range(int(self.bucket.max()) + 1):
            inside = draw.permutation(np.flatnonzero(self.bucket == bucket))
            whole = np.resize(inside, -(-len(inside) // self.micro) * self.micro)
            groups.append(whole.reshape(-1, self.micro))
        order = draw.permutation(np.concatenate(groups))
        order = np.resize(order, (self.steps * self.forwards, self.micro))
        pool = POOL * self.forwards
        length = self.tokens[order[:, 0]]
        for at in range(0, len(order), pool):  # of about one length in a step, at random otherwise
            part = slice(at, at + pool)
            order[part] = order[part][np.argsort(length[part], kind="stable")]
        steps = order.reshape(self.steps, self.forwards, self.micro)
        return self.places[draw.permutation(steps)]


def deal(tokens: Sequence[int], replicas: int) -> list[list[int]]:
    """Forwards (by place) for each replica, equally many, the longest first and to and fro. ValueError if they do not
    divide."""
    if len(tokens) % replicas:
        raise ValueError(
            f"a step has {len(tokens)} forwards (--batch / --micro), which {replicas} replicas cannot share evenly; "
            f"make --batch a multiple of {replicas} x --micro"
        )
    order = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    hands: list[list[int]] = [[] for _ in range(replicas)]
    for turn, i in enumerate(order):
        lap, seat = divmod(turn, replicas)
        hands[seat if lap % 2 == 0 else replicas - 1 - seat].append(i)
    return hands


class Forwards(Dataset):
    """The forwards of one replica, by step: a list of (sample, noise, u), all drawn by their place in the whole step.

    u (m,) is uniform, for the noise level. `drop` of the samples lose their caption, for classifier-free guidance.
    """

    def __init__(self, data: Encoded, order: Order, *, replica: int, replicas: int, drop: float, text_length: int):
        self.data, self.order, self.replica, self.replicas = data, order, replica, replicas
        self.drop, self.text_length = drop, text_length

    def __getitem__(self, step: int) -> list[tuple[Sample, Tensor, Tensor]]:
        groups = self.order.step(step)
        hand = deal([int(self.data.tokens[group[0]]) * len(group) for group in groups], self.replicas)[self.replica]
        return [self._forward(step, number, groups[number]) for number in hand]

    def _forward(self, step: int, number: int, group: Sequence[int]) -> tuple[Sample, Tensor, Tensor]:
        draw = stream(self.order.seed, step, number)
        u, chance = torch.rand(len(group), generator=draw), torch.rand(len(group), generator=draw)
        sample = self.data.batch(group, self.text_length, (chance < self.drop).tolist())
        return sample, torch.randn(sample.latents.shape, generator=draw), u

    def loader(self, steps: Sequence[int], workers: int) -> DataLoader:
        """The forwards of these steps in their order, made ahead by `workers` processes (0: here, when asked for)."""
        return DataLoader(self, batch_size=None, sampler=steps, num_workers=workers, pin_memory=False)


def fixed(
    data: Encoded, places: Sequence[int], text_length: int, levels: int = 4
) -> list[tuple[Sample, Tensor, Tensor]]:
    """Validation: each of these samples at `levels` noise levels spread evenly, with noise that never changes."""
    found = []
    for place in places:
        sample = data.batch([place], text_length)
        for level in range(levels):
            noise = torch.randn(sample.latents.shape, generator=stream(int(place), level))
            found.append((sample, noise, torch.tensor([(level + 0.5) / levels])))
    return found
