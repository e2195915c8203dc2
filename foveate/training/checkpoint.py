"""Checkpoints as safetensors and JSON: nothing is ever unpickled, and a kill at any moment leaves the last one whole.

A checkpoint is a folder `step-000120` with one `<part>.safetensors` for each part (model, ema, optimizer, sparsity) and
`state.json`. It is written beside its final name and renamed there, so a folder with the final name is complete.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from foveate.sparsity.artifact import save_tensors

PREFIX, ABANDONED = "step-", "abandoned-step-"


def save(root: Path, step: int, parts: Mapping[str, Mapping[str, Tensor]], state: dict, *, keep: int = 2) -> Path:
    """Write checkpoint `step` under `root` and drop all but the newest `keep`. Returns its folder.

    Where it cannot be written the ones before stay as they are; OSError says which is the last.
    """
    final, partial = root / f"{PREFIX}{step:06d}", root / f".{PREFIX}{step:06d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for name, tensors in parts.items():
            whole = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
            save_tensors(partial / f"{name}.safetensors", whole)
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        flush(partial)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"step {step} could not be saved: {error}; {last(root)}") from error
    except BaseException:  # such as a second Ctrl-C
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in [number for number in steps(root) if number <= step][:-keep]:
        shutil.rmtree(root / f"{PREFIX}{old:06d}")
    return final


def last(root: Path) -> str:
    """In words: the newest complete checkpoint."""
    known = steps(root)
    return f"the last good checkpoint is {root / f'{PREFIX}{known[-1]:06d}'}" if known else "there is no checkpoint yet"


def flush(folder: Path) -> None:
    """Files reach the disk before the rename does."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints under `root`, ascending."""
    found = root.glob(f"{PREFIX}*/state.json") if root.is_dir() else ()
    numbers = (file.parent.name.removeprefix(PREFIX) for file in found)
    return sorted(int(number) for number in numbers if number.isdigit())


def load(root: Path, step: int | None = None) -> tuple[dict[str, dict[str, Tensor]], dict]:
    """Parts and state of checkpoint `step`, the newest by default. ValueError where there is none."""
    folder, state = read_state(root, step)
    return {file.stem: aligned(load_file(file)) for file in sorted(folder.glob("*.safetensors"))}, state


def read_state(root: Path, step: int | None = None) -> tuple[Path, dict[str, Any]]:
    """The folder and the state.json of checkpoint `step`, the newest by default. ValueError where there is none."""
    known = steps(root)
    if not known:
        raise ValueError(f"no checkpoint under {root}; train without --resume first")
    if step is not None and step not in known:
        raise ValueError(f"no checkpoint of step {step} under {root}; there are {known}")
    folder = root / f"{PREFIX}{known[-1] if step is None else step:06d}"
    return folder, json.loads((folder / "state.json").read_text())


def set_aside(root: Path, step: int) -> list[str]:
    """Rename the checkpoints after `step`, from which the run goes on another way. Returns their new names."""
    moved = []
    for number in (number for number in steps(root) if number > step):
        name = f"{ABANDONED}{number:06d}"
        shutil.rmtree(root / name, ignore_errors=True)
        os.replace(root / f"{PREFIX}{number:06d}", root / name)
        moved.append(name)
    return moved


def split(state: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A nested state as its tensors, by path (a/b/c), and the rest, for JSON. `join` undoes it."""
    tensors, plain = {}, {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}{name}"] = value
        elif isinstance(value, Mapping):
            inner, plain[name] = split(value, f"{prefix}{name}/")
            tensors |= inner
        else:
            plain[name] = value
    return tensors, plain


def join(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[str, Any]:
    state = json.loads(json.dumps(plain))
    for path, tensor in tensors.items():
        *folders, name = path.split("/")
        place = state
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = tensor
    return state


def aligned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies: tensors of a file lie at any address, and CPU kernels may round differently where it is not aligned."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def save_weights(path: Path, weights: Mapping[str, Tensor], about: dict) -> None:
    """One file to share: the weights, and `about` (model configuration, where they come from) in its header.

    Written beside its name and renamed: a file that was there stays whole until then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.partial")
    try:
        save_tensors(fresh, dict(weights), {"foveate": json.dumps(about)})
        os.replace(fresh, path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        fresh.unlink(missing_ok=True)


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict]:
    """Weights and `about` of a file by `save_weights`. ValueError that says what is wrong with another file."""
    if not path.is_file():
        raise ValueError(f"no such checkpoint file: {path}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            weights = aligned({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error}); foveate loads no other kind") from None
    if "foveate" not in metadata:
        raise ValueError(f"{path} has no foveate header; it was not written by `foveate train` or save_weights")
    return weights, json.loads(metadata["foveate"])
