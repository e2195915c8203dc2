"""From a weights file to an MP4."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from foveate.data import to_uint8, write_mp4
from foveate.held.config import ReuseConfig
from foveate.held.handle import reuse as reuse_states
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.sample import generate
from foveate.sparsity.policy import Sparse
from foveate.training import checkpoint
from foveate.training.flow import stream
from foveate.training.loop import pick_device

PREDICTOR = "predictor.safetensors"


def load_model(path: Path, device: str = "cpu") -> tuple[VideoDiT, dict]:
    """The model of a weights file, ready to generate, and what the file says of itself."""
    weights, about = checkpoint.load_weights(path)
    model = VideoDiT(DiTConfig.from_dict(about["model"]))
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False).to(device), about


def load_predictor(path: Path, config: DiTConfig, device: str = "cpu") -> Sparse:
    """The sparse policy of the predictor file beside a weights file, in mode `sparse`."""
    if not path.is_file():
        raise ValueError(
            f"sparse attention needs {path}, which sparse training writes; use --attention dense without it"
        )
    state, about = checkpoint.load_weights(path)
    dense_layers = about.pop("dense_layers")
    policy = Sparse(config.depth, config.heads, config.head_dim, device=device, **about)
    policy.load_state_dict({name: tensor.to(device) for name, tensor in state.items()})
    policy.sparse_layers = [index not in dense_layers for index in range(config.depth)]
    policy.mode = "sparse"
    return policy


@contextmanager
def reusing(model: VideoDiT, quality: float | None, console: Console) -> Iterator[None]:
    """What earlier steps computed, reused at this quality, and what that saved; nothing where it is None."""
    if quality is None:
        yield
        return
    with reuse_states(model, ReuseConfig(quality=quality)) as handle:
        yield
        report = handle.report()
    console.print(f"reuse: {report.computed:.0%} of the attention computed")


def generate_file(
    out: Path,
    model_file: Path,
    attention: str,
    steps: int,
    seed: int,
    label: int | None,
    guidance: float,
    device: str,
    console: Console,
    reuse: float | None = None,
) -> None:
    """Generate one clip of the size the model was trained on and write it. ValueError for what cannot be done."""
    if attention not in ("dense", "sparse"):
        raise ValueError(f"attention must be dense or sparse, got {attention!r}")
    if out.suffix != ".mp4":
        raise ValueError(f"{out} must end in .mp4")
    device = pick_device(device)
    model, about = load_model(model_file, device)
    if attention == "sparse":
        model.policy = load_predictor(model_file.parent / PREDICTOR, model.config, device)
    condition = None
    if label is not None:
        if not 0 <= label < model.config.classes:
            raise ValueError(f"label must lie in 0 ... {model.config.classes - 1} for this model, got {label}")
        condition = torch.tensor([label], device=device)
    size = about["clip"]
    shape = (1, model.config.channels, size["frames"], size["height"], size["width"])
    noise = torch.randn(shape, generator=stream(seed)).to(device)
    with console.status("generating") as status, reusing(model, reuse, console):
        video = generate(
            model, noise, steps=steps, condition=condition, guidance=guidance,
            progress=lambda done, total: status.update(f"generating: step {done} of {total}"),
        )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    write_mp4(out, to_uint8(video)[0], fps=size.get("fps", 25))
    console.print(f"wrote {out}")
