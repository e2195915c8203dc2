"""What attention costs, from saved measurements: decisions never depend on live timings, so that runs repeat.

A table is the JSON that benchmarks/bench_attention.py writes on a card: rows of length, heads, dim, density, periphery
and milliseconds. Between its points it is interpolated on logarithmic axes; past its ends dense work grows with the
square of the length and sparse work with the density; but before the shortest measured length sparse attention gets
cheaper with the length only, since its many small launches do not shrink. A device without a table gets an arithmetic
model, logged once.

Times are in milliseconds for one sequence and all its heads, forward and backward unless told otherwise.
"""

import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

log = logging.getLogger("foveate")

FOLDERS = (Path(__file__).parent / "assets", Path(__file__).parent.parent / "benchmarks" / "results")
PATTERN = "kernels_*.json"
VARIABLE = "FOVEATE_COSTS"  # a table's path, used for every device
PASSES = ("forward_ms", "backward_ms")
# The kept fraction of tiles that half of the attention mass takes, by tokens of a tile: real q, k of a trained model
# (benchmarks/bench_attention.py, December 2026). A property of attention, not of a card.
HALF_MASS = {"64": 0.2923, "128": 0.3077}
VERSIONED = ("torch", "triton", "flash-attn-4")
ON_128 = "foveate on fa4"  # the kernel of a table that sparse attention at 128-token tiles runs on
# Dense bfloat16 matrix operations a second, summed in float32: the makers' own figures, without sparsity.
PEAKS = {
    "B200": 2.25e15, "H200": 9.89e14, "H100 PCIe": 7.56e14, "H100 NVL": 8.35e14, "H100": 9.89e14, "H800": 9.89e14,
    "A100": 3.12e14, "A800": 3.12e14, "L40S": 3.62e14, "L40": 1.81e14, "L4": 1.21e14, "A10": 1.25e14,
    "RTX 5090": 2.095e14, "RTX 4090": 1.652e14, "RTX 3090": 7.1e13,
}  # fmt: skip
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Machine:
    """The arithmetic model of a device: matrix operations a second, and sparse work in units of the dense.

    One layer's sparse attention takes `dense * (fixed + slope * density)`, more by `pool_*` where the periphery is
    pooled; choosing the tiles takes `dense * select`; every call takes `call_ms` besides.
    """

    rate: float
    fixed: float
    slope: float
    pool_fixed: float
    pool_slope: float
    select: float
    call_ms: float


# cpu: fitted to the `torch` backend on one x86-64 core, November 2026 (docs/log.md, Controller). cuda: cuDNN dense and
# the first Triton kernels on an H200, from 131k tokens; a table replaces it.
MACHINES = {
    "cpu": Machine(1.15e11, 0.04, 1.8, 0.05, 0.17, 0.02, 1.0),
    "cuda": Machine(5.6e14, 0.01, 1.2, 0.04, 0.1, 0.04, 0.2),
}


@dataclass(frozen=True)
class Costs:
    """Prices of attention on one device. `source` says where they are from; make one with `load` or `for_device`.

    Sparse attention is priced at tiles of `tile` tokens, those that are faster here at equal recall: 64 for the Triton
    kernels, 128 for flash-attn-4's. `at` gives the prices of the other ones.
    """

    source: str
    rows: tuple[Mapping, ...] = ()
    machine: Machine = MACHINES["cuda"]
    absent: frozenset[str] = frozenset()  # kernels of the table that are not installed here
    tile: int = 64
    half_mass: Mapping[str, float] = field(default_factory=dict)  # tile -> budget that half of the true mass takes
    _curves: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def at(self, tile: int) -> "Costs":
        """The same prices at tiles of another size, where the table has them; itself where it does not."""
        known = any(row["lists"] != "all" and row.get("tile", 64) == tile for row in self.rows)
        return replace(self, tile=tile) if known else self

    def faster_tile(self, tokens: int = 131072, heads: int = 8, dim: int = 128) -> tuple[int, str]:
        """Which tiles make sparse attention faster at equal recall, 64 or 128 tokens, and why.

        At the budgets that half of the attention mass takes on real queries and keys, by the table.
        """
        other = self.at(128)
        if other.tile != 128 or ON_128 in self.absent or not {"64", "128"} <= self.half_mass.keys():
            return 64, f"{self.source} has no time of flash-attn-4 at 128-token tiles"
        small, large = (c.sparse(tokens, heads, dim, self.half_mass[str(c.tile)]) for c in (self.at(64), other))
        why = f"{large:.3g} ms with 128-token tiles, {small:.3g} with 64 at equal recall; {self.source}"
        return (128 if large < small else 64), why

    def dense(self, tokens: int, heads: int, dim: int, *, passes: Sequence[str] = PASSES) -> float:
        """Milliseconds of dense attention of one sequence (tokens, heads, dim), by the fastest kernel of the table."""
        if not self.rows:
            return self._arithmetic(tokens, heads, dim, passes) + self.machine.call_ms
        names = {row["kernel"] for row in self.rows if row["lists"] == "all"} - self.absent
        times = (self.kernel(name, tokens, heads, dim, passes=passes) for name in names)
        return min(time for time in times if time is not None)

    def kernel(self, name: str, tokens: int, heads: int, dim: int, *, passes: Sequence[str] = PASSES) -> float | None:
        """Milliseconds of one dense kernel of the table (`cudnn dense`, `fa4 dense`); None where it has no row."""
        known = any(row["kernel"] == name for row in self.rows)
        return self._measured(name, tokens, heads, dim, 1.0, passes) if known else None

    def sparse(
        self,
        tokens: int,
        heads: int,
        dim: int,
        density: float,
        *,
        pooled: float = 0.0,
        passes: Sequence[str] = PASSES,
    ) -> float:
        """Milliseconds of sparse attention at a mean `density` of kept tiles, choosing them included.

        pooled: share of the heads whose periphery is pooled, 0 ... 1.
        """
        attend = self.attend(tokens, heads, dim, density, pooled=pooled, passes=passes)
        return attend + self.select(tokens, heads, dim)

    def attend(
        self,
        tokens: int,
        heads: int,
        dim: int,
        density: float,
        *,
        pooled: float = 0.0,
        passes: Sequence[str] = PASSES,
    ) -> float:
        """The same without choosing the tiles."""
        if not self.rows:
            unit, m = self._arithmetic(tokens, heads, dim, passes), self.machine
            work = m.fixed + m.slope * density + pooled * (m.pool_fixed + m.pool_slope * density)
            return unit * work + m.call_ms
        drop = self._measured("drop", tokens, heads, dim, density, passes)
        pool = self._measured("pool", tokens, heads, dim, density, passes) if pooled else drop
        return (1 - pooled) * drop + pooled * max(pool, drop)

    def select(self, tokens: int, heads: int, dim: int) -> float:
        """Milliseconds of choosing the tiles of one sequence."""
        if not self.rows:
            return self._arithmetic(tokens, heads, dim, PASSES) * self.machine.select + self.machine.call_ms
        rows = [row for row in self._sparse_rows("drop") if row.get("select_ms")]
        return self._measured("select", tokens, heads, dim, rows[0]["density"], ("select_ms",)) if rows else 0.0

    def _sparse_rows(self, periphery: str) -> list[Mapping]:
        sparse = (row for row in self.rows if row["lists"] != "all" and row.get("tile", 64) == self.tile)
        rows = [row for row in sparse if row["periphery"] == periphery]
        random = [row for row in rows if row["lists"] == "random"]
        return random or rows

    def _arithmetic(self, tokens: int, heads: int, dim: int, passes: Iterable[str]) -> float:
        operations = sum({"forward_ms": 4, "backward_ms": 10}[name] for name in passes)
        return operations * tokens**2 * heads * dim / self.machine.rate * 1e3

    def _measured(self, what: str, tokens: int, heads: int, dim: int, density: float, passes: Sequence[str]) -> float:
        """By a kernel's name, or `drop`, `pool`, `select`."""
        key = what, dim, tuple(passes)
        if key not in self._curves:  # a planner asks thousands of times
            self._curves[key] = self._curve(*key)
        near, by_length = self._curves[key]
        curve = [(length, interpolate(points, density, slope=1.0)) for length, points in by_length]
        below = 1.0 if what in ("drop", "pool", "select") else 2.0
        return interpolate(curve, tokens, slope=2.0, below=below) * heads * dim / near

    def _curve(self, what: str, dim: int, passes: Sequence[str]) -> tuple[int, list[tuple[int, Curve]]]:
        """The nearest measured head dim, and by length one head's time over density."""
        if what in ("drop", "pool"):
            rows = self._sparse_rows(what) or self._sparse_rows("drop")
        elif what == "select":
            rows = [row for row in self._sparse_rows("drop") if row.get("select_ms")]
        else:
            rows = [row for row in self.rows if row["kernel"] == what]
        near = min({row["dim"] for row in rows}, key=lambda other: (abs(math.log(other / dim)), other))
        found: dict[int, dict[float, list[float]]] = {}
        for row in rows:
            if row["dim"] == near:
                time = sum(row[name] for name in passes) / row["heads"]
                found.setdefault(row["length"], {}).setdefault(row["density"], []).append(time)
        return near, [
            (length, [(d, sum(t) / len(t)) for d, t in sorted(by_density.items())])
            for length, by_density in sorted(found.items())
        ]


def interpolate(curve: Curve, x: float, *, slope: float, below: float | None = None) -> float:
    """y at x of ascending points (x, y) > 0, straight lines on logarithmic axes; past the ends y grows as x^slope.

    below: the power before the first point, if another.
    """
    xs = [point[0] for point in curve]
    if x <= xs[0] or x >= xs[-1]:
        (end, y), power = (curve[0], slope if below is None else below) if x <= xs[0] else (curve[-1], slope)
        return y * (x / end) ** power
    index = bisect(xs, x)
    (x0, y0), (x1, y1) = curve[index - 1], curve[index]
    share = math.log(x / x0) / math.log(x1 / x0)
    return y0 * (y1 / y0) ** share


def load(path: Path | str) -> Costs:
    """The table in a JSON file. ValueError where it is not one."""
    try:
        data = json.loads(Path(path).read_text())
        rows = tuple(data["rows"])
        for row in rows:
            if min(row[name] for name in ("length", "heads", "dim", "density", *PASSES)) <= 0:
                raise ValueError("a row has a number that is not positive")
        if not any(row["lists"] == "all" for row in rows) or all(row["lists"] == "all" for row in rows):
            raise ValueError("it needs rows of dense and of sparse attention")
        Costs("", rows)._sparse_rows("drop")[0]
    except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a cost table of benchmarks/bench_attention.py: {error!r}") from error
    absent = frozenset() if importlib.util.find_spec("flash_attn") else frozenset({"fa4 dense", ON_128})
    source = f"{Path(path).name}, {data.get('card', 'unknown card')}"
    costs = Costs(source, rows, absent=absent, half_mass=data.get("half_mass", {}))
    return costs.at(costs.faster_tile()[0])


@cache
def for_device(kind: str, name: str = "") -> Costs:
    """Prices on a device type (`cpu`, `cuda`) of this name (torch.cuda.get_device_name()); logged once.

    The table of the FOVEATE_COSTS variable, else the one that `foveate doctor --measure` made here, else the newest
    saved one for this card, else the arithmetic model.
    """
    chosen = _named() or _own(kind, name) or (_newest(name) if name else None)
    if chosen is not None:
        log.info("costs: %s; tiles of %d tokens: %s", chosen.source, chosen.tile, chosen.faster_tile()[1])
        return chosen
    machine = MACHINES.get(kind, MACHINES["cuda"])
    log.info("costs: no saved table for %s, an arithmetic model of %s serves", name or kind, kind)
    return Costs(f"arithmetic model of {kind}", machine=machine)


def here(device: "torch.device") -> Costs:
    """Prices on this very device, as `for_device`."""
    return for_device(device.type, name_of(device))


def name_of(device: "torch.device") -> str:
    """What a card is called; nothing where the device is none."""
    import torch  # a table can be read without it

    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def peak(name: str) -> float | None:
    """Dense bfloat16 operations a second of a card by its name; None for one that is not known."""
    words = f" {name} "
    return next((rate for card, rate in PEAKS.items() if f" {card} " in words.replace("-", " ")), None)


def versions() -> dict[str, str]:
    """Versions of the packages that bring kernels; absent ones are left out."""
    return {name: version for name in VERSIONED if (version := _version(name))}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def own_table(kind: str, name: str = "") -> Path:
    """Where the table measured on this machine lies, or would."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foveate"
    return folder / f"costs_{re.sub(r'[^a-z0-9]+', '_', (name or kind).lower())}.json"


def _own(kind: str, name: str) -> Costs | None:
    path = own_table(kind, name)
    if not path.exists():
        return None
    found = load(path)
    if json.loads(path.read_text()).get("versions") == versions():
        return found
    log.warning("costs: %s was measured with other versions, and is not used; foveate doctor --measure renews it", path)
    return None


def _named() -> Costs | None:
    path = os.environ.get(VARIABLE)
    return load(path) if path else None


def _newest(name: str) -> Costs | None:
    """The newest table whose card is this one: files are named kernels_<card>_<yyyymm>.json."""
    files = [file for folder in FOLDERS for file in folder.glob(PATTERN)]
    words = name.lower().split()
    fitting = [file for file in files if file.stem.split("_")[1] in words]
    return load(max(fitting, key=lambda file: file.stem.split("_")[2])) if fitting else None
