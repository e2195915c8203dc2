"""What sparse inference needs, in a folder: predictors as safetensors and the plan as JSON. Nothing is pickled.

    handle.save("sparse")                                # after training
    with fv.load_sparse(transformer, "sparse"): ...      # in the process that generates

Shapes: L layers, H heads.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foveate.attention import AttnState, Dense, Layer
from foveate.models import adapters
from foveate.sparsity.plan import Decision, Plan
from foveate.sparsity.policy import Sparse

log = logging.getLogger("foveate")

TENSORS, PLAN, FORMAT = "predictors.safetensors", "sparse.json", 1


def save_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """`save_file`, for whom the umask lets read: by itself it leaves a file that its owner alone can."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata=metadata)
    file.chmod(mode)


def save(
    folder: Path | str, installed: adapters.Installed, policy: Sparse, decisions: Mapping[int, Decision], step: int
) -> None:
    """Write the artifact, each file beside its name first. ValueError where there are no predictors yet."""
    if not policy.ready:
        raise ValueError("the predictors have not seen enough training steps yet (SparsityConfig.learn_from)")
    active = {length: decision for length, decision in decisions.items() if decision.active}
    if not active:
        log.warning("nothing is sparse at step %d: what is saved in %s will load, and compute dense", step, folder)
    plans = {str(length): decision.plan.to_dict() for length, decision in active.items() if decision.plan is not None}
    about = {
        "format": FORMAT, "model": installed.adapter.model, "layers": len(installed.layers),
        "heads": installed.heads, "dim": installed.dim, "rank": policy.rank, "query_tile": policy.query_tile,
        "step": step, "tile_shape": list(installed.tile_shape), "plans": plans,
    }  # fmt: skip
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f".{name}.partial" for name in (TENSORS, PLAN)]
    save_tensors(parts[0], policy.state_dict())
    parts[1].write_text(json.dumps(about, indent=1, allow_nan=False))
    for part, name in zip(parts, (TENSORS, PLAN), strict=True):
        os.replace(part, folder / name)


def load_sparse(model: nn.Module, folder: Path | str, *, backend: str = "auto") -> adapters.Installed:
    """Make inference sparse as a training run left it with `handle.save(folder)`. Nothing is learned.

    model: of the class and shape that was trained, as `sparsify` takes it. What is returned has `policy` and `remove()`
    and may be used in a `with`. Lengths that training did not make sparse follow the nearest one that it did.
    Raises ValueError for another model and for a folder that holds no artifact; the model is then as it was.
    """
    state, about = _read(Path(folder))
    installed = adapters.install(model, Dense())
    try:
        found = {"model": installed.adapter.model, "layers": len(installed.layers)}
        found |= {"heads": installed.heads, "dim": installed.dim}
        if different := [f"{name} {about[name]}, not {value}" for name, value in found.items() if about[name] != value]:
            raise ValueError(f"{folder} is of another model: it has {'; '.join(different)}")
        shape = about["layers"], about["heads"], about["dim"]
        device = next(model.parameters()).device
        options = {"rank": about["rank"], "query_tile": about["query_tile"], "backend": backend}
        policy = Sparse(*shape, budget=1.0, device="cpu" if device.type == "meta" else device, **options)
        policy.load_state_dict(state)
    except BaseException:
        installed.remove()
        raise
    for learner in policy.learners:
        learner.start = min(learner.start, learner.seen)
    for length, plan in about["plans"].items():
        policy.follow(Plan.from_dict(plan), int(length))
    frames, height, width = about["tile_shape"]
    installed.tile_shape = frames, height, width
    policy.mode, policy.nearest = "sparse" if about["plans"] else "dense", True
    policy.freeze()
    if not about["plans"]:
        log.warning("%s was saved while nothing was sparse: attention stays dense", folder)
    installed.policy = policy
    return installed


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        about = json.loads((folder / PLAN).read_text())
        state = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} holds no sparse attention that handle.save(folder) wrote: {error}") from error
    if about.get("format") != FORMAT:
        raise ValueError(f"{folder} has format {about.get('format')}, this version of foveate reads {FORMAT}")
    return state, about


class Follower:
    """Policy of a copy of a model: computed as the leader's would be, and taught nothing."""

    def __init__(self, leader: Sparse):
        self.leader = leader

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.state(layer, q, k, v).out

    def state(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> AttnState:
        with torch.no_grad():
            mode = self.leader.mode_of(layer)
            selection = None if mode == "dense" else self.leader.selection(layer, q, k)
        return self.leader.compute(layer, mode, selection, q, k, v)


def follow(copy: nn.Module, leader: adapters.Installed, policy: Sparse) -> adapters.Installed:
    """See `Handle.follow`."""
    installed = adapters.install(copy, Follower(policy))
    if (installed.layers, installed.heads, installed.dim) != (leader.layers, leader.heads, leader.dim):
        installed.remove()
        raise ValueError("the copy has other layers, heads or head dim than the model that was given to sparsify")
    installed.tile_shape = leader.tile_shape
    return installed
