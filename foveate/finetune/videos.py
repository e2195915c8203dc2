"""Validation videos: held-out captions denoised by the averaged weights and the pipeline's own scheduler and VAE.

Every rank takes part in the transformer's forwards, with the same inputs in each replica; rank 0 decodes and writes.
Nothing random but noise by place in the data, nothing left on the device afterwards.

Not covered: pipelines of two transformers, whose other expert is not loaded.

Shapes: C channels, F frames, Y height, X width of latents.
"""

import inspect
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foveate.finetune.encoded import Encoded
from foveate.finetune.families import About, Sample, diffusers, load_vae
from foveate.finetune.noising import Flow, Noising
from foveate.parallel import fsdp
from foveate.training.flow import stream
from foveate.video import to_uint8, write_mp4

if TYPE_CHECKING:
    from foveate.finetune.loop import Finetuner

log = logging.getLogger("foveate")


def check(about: About) -> None:
    """ValueError where the folder cannot make videos, before anything is trained."""
    if len(about.transformers) > 1:
        raise ValueError(
            f"--sample-every: {about.folder} has two transformers, a video needs both and training loads one; leave it "
            "out, and generate with the exported one by diffusers"
        )
    for name in ("vae", "scheduler"):
        if not (about.folder / name).is_dir():
            raise ValueError(
                f"--sample-every needs {about.folder / name}: download the whole pipeline, or leave it out"
            )


@torch.no_grad()
def write(tuner: "Finetuner", places: list[tuple[Encoded, int]]) -> list[str]:
    """samples/step-N-<i>.mp4 of these clips: the clip itself beside what is generated for its caption. On all ranks
    alike; names, from the run's folder, on rank 0."""
    with aside(tuner):
        made = [_made(tuner, data, place) for data, place in places]
        return decoded(tuner, made) if tuner.rank == 0 else []


@contextmanager
def aside(tuner: "Finetuner") -> Iterator[None]:
    """Averaged weights, evaluation, and nothing that training would notice: random state, sparsify's samples."""
    model: Any = tuner.model
    devices = [tuner.device] if tuner.device.type == "cuda" else []
    with torch.random.fork_rng(devices), tuner.handle.aside() if tuner.handle else nullcontext():
        _exchange(tuner)
        model.eval()
        try:
            yield
        finally:
            model.train()
            _exchange(tuner)
            if devices:
                torch.cuda.empty_cache()


def _exchange(tuner: "Finetuner") -> None:
    """The weights and their average change places, one after the other, in this rank's memory."""
    model: Any = tuner.model
    if tuner.ranks > 1:
        model.reshard()  # what the root has gathered is of the weights before
    pairs = zip(fsdp.local(tuner.weights.values()), fsdp.local(tuner.ema.values()), strict=True)
    for weight, average in pairs:
        kept = weight.detach().clone()
        weight.detach().copy_(average)
        average.copy_(kept)


def _made(tuner: "Finetuner", data: Encoded, place: int) -> tuple[Sample, Tensor]:
    """A held-out sample, and latents of the same size that are generated for its caption."""
    sample = data.batch([place], tuner.text_length).to(tuner.device)
    none = data.batch([place], tuner.text_length, [True]).to(tuner.device)
    noise = torch.randn(sample.latents.shape, generator=stream(7, place)).to(tuner.device)
    return sample, denoise(tuner, sample, none, noise)


@torch.no_grad()
def denoise(tuner: "Finetuner", sample: Sample, none: Sample, noise: Tensor) -> Tensor:
    """Latents (1, C, F, Y, X) from noise as the pipeline's call makes them. none: the sample without its caption."""
    config, about = tuner.config, tuner.about
    scheduler = _scheduler(about, tuner.noising, config.sample_steps, noise)
    guidance = _guidance(about) if config.sample_guidance is None else config.sample_guidance
    latents = noise * float(scheduler.init_noise_sigma) if hasattr(scheduler, "init_noise_sigma") else noise

    def predict(latents: Tensor, time: Tensor, given: Sample) -> Tensor:
        noisy = scheduler.scale_model_input(latents, time) if hasattr(scheduler, "scale_model_input") else latents
        return tuner.predict(noisy, time.expand(len(noisy)), given).float()

    for time in scheduler.timesteps:
        latents = _given(about, latents, sample)
        wanted = predict(latents, time, sample)
        if guidance > 1:
            plain = predict(latents, time, none)
            wanted = plain + guidance * (wanted - plain)
        latents = scheduler.step(wanted, time, latents, return_dict=False)[0]
    return _given(about, latents, sample)


def _given(about: About, latents: Tensor, sample: Sample) -> Tensor:
    """With the first frame as it is given, where the model takes it so."""
    return torch.cat([sample.latents[:, :, :1], latents[:, :, 1:]], 2) if about.first_clean else latents


def _scheduler(about: About, noising: Noising, steps: int, noise: Tensor) -> Any:
    """The pipeline's, with its time steps for latents of this size."""
    package, name = diffusers(), about.scheduler["_class_name"]
    if name == "CogVideoXDPMScheduler":  # its step wants the one before
        name = "CogVideoXDDIMScheduler"
    scheduler = getattr(package, name).from_config(dict(about.scheduler))
    if about.pipeline.startswith("LTX"):  # as its pipeline calls them
        more: dict[str, Any] = {"sigmas": torch.linspace(1, 1 / steps, steps).tolist()}
        if isinstance(noising, Flow) and about.scheduler.get("use_dynamic_shifting"):
            more["mu"] = math.log(noising.factor(about.tokens(tuple(noise.shape))))
        scheduler.set_timesteps(device=noise.device, **more)
    else:
        scheduler.set_timesteps(steps, device=noise.device)
    return scheduler


def _guidance(about: About) -> float:
    """What the pipeline's call takes by default."""
    cls = getattr(diffusers(), about.pipeline)
    return float(inspect.signature(cls.__call__).parameters["guidance_scale"].default)


def decoded(tuner: "Finetuner", made: list[tuple[Sample, Tensor]]) -> list[str]:
    """The files that could be written. A device or disk that is full costs the video, not the run."""
    names: list[str] = []
    try:
        vae = load_vae(tuner.about).to(tuner.device)
        for number, (sample, latents) in enumerate(made):
            shown = torch.cat([tuner.about.family.pixels(vae, x) for x in (sample.latents, latents)], -1)
            name = f"samples/step-{tuner.step:06d}-{number}.mp4"
            _file(tuner.config.out / name, shown, float(sample.fps[0]))
            names.append(name)
    except (torch.OutOfMemoryError, OSError) as error:
        log.warning("the validation videos of step %d could not be made, training goes on: %s", tuner.step, error)
    return names


def _file(file: Path, shown: Tensor, fps: float) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_mp4(file, to_uint8(shown)[0], fps=fps)
