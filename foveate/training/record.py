"""What a run shows of itself besides its history: TensorBoard events, clips to look at, sparsify's plans.

Shapes: L layers, H heads, C channels, F frames, Y height, X width.
"""

import json
from collections.abc import Generator, Iterable
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foveate.data import to_uint8, write_mp4
from foveate.sample import generate
from foveate.sparsity.handle import Handle
from foveate.training.flow import stream
from foveate.training.folder import HISTORY

if TYPE_CHECKING:
    from foveate.training.loop import Trainer

LEVEL = 0.6  # of noise that a held-out clip is denoised from: enough to be wrong, little enough to be the same clip
STEPS = 10  # of the denoising
TOLD = ("step", "samples")  # of a row; not among wandb's numbers


class Events:
    """TensorBoard events of every number in a row, in out/events, and a run of Weights & Biases; nothing where the run
    did not ask for them."""

    def __init__(self, config: Any, step: int):
        self._out: Path = config.out
        self._writer: Any = None
        if config.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ImportError("TensorBoard events need tensorboard: pip install 'foveate[tensorboard]'") from None
            self._writer = SummaryWriter(str(config.out / "events"), purge_step=step + 1 if step else None)
        self._wandb: Any = None
        if getattr(config, "wandb", None):
            self._wandb = _wandb_run(config)

    def write(self, row: dict) -> None:
        if self._writer is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self._writer.add_scalar(f"train/{name}", value, row["step"])
        if self._wandb is not None:
            self._wandb.log({name: value for name, value in row.items() if name not in TOLD}, step=row["step"])
        for number, name in enumerate(row.get("samples", ())):
            self._show(f"samples/{number}", self._out / name, row["step"])

    def _show(self, name: str, file: Path, step: int) -> None:
        """A clip as media: TensorBoard shows moving pictures as GIF."""
        if self._writer is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

            picture = Summary.Image(encoded_image_string=_gif(file), colorspace=3)
            given = Summary(value=[Summary.Value(tag=name, image=picture)])
            self._writer._get_file_writer().add_summary(given, step)
        if self._wandb is not None:
            import wandb  # pyright: ignore[reportMissingImports]

            self._wandb.log({name: wandb.Video(str(file), format="mp4")}, step=step)

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(error is not None))


def _gif(file: Path) -> bytes:
    import av
    from PIL import Image

    with av.open(str(file)) as container:
        rate = float(container.streams.video[0].average_rate or 12)
        frames = [Image.fromarray(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    found = BytesIO()
    frames[0].save(found, "GIF", save_all=True, append_images=frames[1:], duration=1000 / rate, loop=0)
    return found.getvalue()


def _wandb_run(config: Any) -> Any:
    """Of the project config.wandb; a run that is resumed goes on in its own (out/wandb.txt)."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("--wandb needs wandb: pip install 'foveate[wandb]'") from None
    file = config.out / "wandb.txt"
    if not file.is_file():
        file.write_text(wandb.util.generate_id())
    return wandb.init(
        project=config.wandb, name=config.out.resolve().name, id=file.read_text(), resume="allow", dir=str(config.out),
        config=config.to_dict(),
    )  # fmt: skip


def recorded(config: Any, step: int, rows: Iterable[dict]) -> Generator[dict]:
    """The rows of a run from `step` on, each written to its history, and to its events, before it is given on."""
    with (config.out / HISTORY).open("a") as file, Events(config, step) as events:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()
            events.write(row)
            yield row


def denoised(
    model: torch.nn.Module, clip: Tensor, condition: Tensor | None = None, *, steps: int = STEPS
) -> tuple[Tensor, Tensor]:
    """A clip (1, C, F, Y, X) with LEVEL of noise on it, the same every time, and as the model restores it."""
    noise = torch.randn(clip.shape, generator=stream(6)).to(clip.device)
    noisy = (1 - LEVEL) * clip + LEVEL * noise
    before = model.training
    model.eval()
    restored = generate(model, noisy, steps=steps, start=LEVEL, condition=condition)
    model.train(before)
    return noisy, restored


def sample(trainer: "Trainer") -> None:
    """samples/step-N.mp4: a held-out clip, the same restored from noise, and one generated, side by side."""
    first = trainer.validation[0]
    noise = torch.randn(first.clips.shape, generator=stream(7)).to(first.clips.device)
    _, restored = denoised(trainer.model, first.clips, first.condition)
    made = generate(trainer.model, noise, steps=STEPS, condition=first.condition)
    shown = torch.cat([first.clips, restored, made], -1)
    file = trainer.config.out / "samples" / f"step-{trainer.step:06d}.mp4"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_mp4(file, to_uint8(shown)[0], fps=12)


def measured(handle: Handle) -> dict[str, Any]:
    """For plans.jsonl: whether attention is sparse, why, what every head keeps, and the
    constants of its periphery (L, H), None where it is dropped."""
    decision, control = handle.decision, handle.control
    found: dict[str, Any] = {"active": decision.active, "reason": decision.reason, "gap": control.gap}
    plan = decision.plan
    if plan is not None:
        rows = zip(plan.budgets, plan.sparse, strict=True)
        found["kept"] = [list(row) if on else [1.0] * len(row) for row, on in rows]
        found["constants"] = plan.to_dict()["constants"]
    return found
