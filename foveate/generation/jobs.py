"""What is to be generated: one clip from flags, or many from a file, checked against the pipeline first."""

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foveate.generation.config import GenerateConfig
from foveate.generation.film import check_target, given_flags

# Flags, and keys of a line of --prompts, by the argument of a diffusers pipeline that they are.
NAMES = {
    "prompt": "prompt", "negative": "negative_prompt", "image": "image", "steps": "num_inference_steps",
    "guidance": "guidance_scale", "frames": "num_frames", "height": "height", "width": "width",
}  # fmt: skip
LINE = {*NAMES, "seed", "embeds", "call", "name"}
RATES = {"Wan": 16.0, "CogVideoX": 8.0, "LTX": 24.0, "HunyuanVideo": 24.0, "Mochi": 30.0, "SkyReels": 24.0}  # frames/s


@dataclass(frozen=True)
class Job:
    """One clip. given: arguments of the pipeline's call but for the files image and embeds. about: its settings."""

    number: int
    out: Path
    seed: int
    given: dict[str, Any]
    image: Path | None
    embeds: Path | None
    about: dict[str, Any]


def jobs(
    config: GenerateConfig, out: Path, takes: dict[str, inspect.Parameter], *, overwrite: bool = False,
    skip_existing: bool = False,
) -> list[Job]:  # fmt: skip
    """All clips to be made, with `skip_existing` those that are not there. takes: parameters of the pipeline's call.

    ValueError, with the line of a file, for what the pipeline does not take, for pictures and tensors that cannot be
    read, and for a target that cannot be written or would replace what is there.
    """
    flags = given_flags(config)
    base = {name: getattr(config, name) for name in (*NAMES, "embeds") if getattr(config, name) is not None}
    if config.prompts is None:
        if skip_existing and out.exists():
            return []
        check_target(out, overwrite)
        return [_job(0, out, base | {"call": config.arguments}, config, flags, takes)]
    if out.suffix == ".mp4":
        raise ValueError(f"--prompts makes many clips: give the name of a folder, not of a file ({out})")
    found, names = [], set[str]()
    for number, (where, line) in enumerate(lines(config.prompts)):
        try:
            asked = base | line | {"call": config.arguments | line.get("call", {})}
            name = str(line.get("name", f"{number:04d}"))
            if Path(name).name != name or name in names:
                raise ValueError(f"name {name!r} must be a file's name without a folder, and no other line's")
            names.add(name)
            target = out / f"{name.removesuffix('.mp4')}.mp4"
            if skip_existing and target.exists():
                continue
            check_target(target, overwrite)
            found.append(_job(number, target, asked, config, flags | line, takes))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return found


def lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, and where each stands. ValueError for any that is none."""
    number = 0
    # Not splitlines(): it cuts at U+2028 and others, which JSON strings may hold.
    for place, text in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), start=1):
        where = f"{file}, line {place}"
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        if not isinstance(line, dict) or not isinstance(line.get("call", {}), dict):
            raise ValueError(f'{where} must be an object such as {{"prompt": "a cat"}}, and its call one too')
        if unknown := sorted(set(line) - LINE):
            raise ValueError(f"{where} has {', '.join(unknown)}; known are {', '.join(sorted(LINE))}")
        if "prompt" not in line and "embeds" not in line:
            raise ValueError(f"{where} has neither a prompt nor embeds")
        number += 1
        yield where, line
    if not number:
        raise ValueError(f"{file} holds no line")


def _job(
    number: int, out: Path, asked: dict[str, Any], config: GenerateConfig, flags: dict[str, Any],
    takes: dict[str, inspect.Parameter],
) -> Job:  # fmt: skip
    seed = asked.pop("seed", config.seed + number)
    call, image, embeds = asked.pop("call"), asked.pop("image", None), asked.pop("embeds", None)
    given = {NAMES[name]: value for name, value in asked.items() if name in NAMES}
    _check_values(seed, given)
    for name in ("fps", "frame_rate"):
        if config.fps is not None and name in takes:
            given[name] = config.fps
    given |= call
    wanted = [*given, *(["image"] if image is not None else [])]
    if foreign := [name for name in wanted if name not in takes]:
        raise ValueError(
            f"this pipeline takes no {', '.join(foreign)}; it takes {', '.join(sorted(takes))} (another class of the "
            "same weights may: --pipeline)"
        )
    needs_picture = "image" in takes and takes["image"].default is inspect.Parameter.empty
    if needs_picture and image is None and "image" not in given:
        raise ValueError("this pipeline begins with a picture: give --image")
    for file in (image, embeds):
        if file is not None and not Path(file).is_file():
            raise ValueError(f"{file}: no such file")
        if file is not None and out.exists() and out.samefile(file):
            raise ValueError(f"{out} is an input of this very clip: give another name")
    if image is not None:
        open_picture(Path(image))
    if embeds is not None:
        check_embeds(Path(embeds), takes)
    return Job(number, out, seed, given, _path(image), _path(embeds), flags | {"seed": seed})


def _check_values(seed: Any, given: dict[str, Any]) -> None:
    for name in ("num_inference_steps", "num_frames", "height", "width"):
        value = given.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be a whole number of 64 bits, got {seed!r}")
    for name in ("prompt", "negative_prompt"):
        if not isinstance(given.get(name, ""), str):
            raise ValueError(f"{name} must be text, got {given[name]!r}")
    guidance = given.get("guidance_scale", 1.0)
    if not isinstance(guidance, int | float) or isinstance(guidance, bool) or not 0 <= guidance < float("inf"):
        raise ValueError(f"guidance must be a number of at least 0, got {guidance!r}")


def open_picture(file: Path) -> Any:
    """A picture as PIL has it, upright, in RGB. ValueError for a file that is none."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(file) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file} is no picture that can be read: {error}") from None


def check_embeds(file: Path, takes: dict[str, inspect.Parameter]) -> None:
    """ValueError for a file that holds anything but arguments of the call."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from None
    if foreign := [name for name in names if name not in takes]:
        raise ValueError(f"{file} holds {', '.join(foreign)}, which this pipeline does not take")


def rate(config: GenerateConfig, name: str, takes: dict[str, inspect.Parameter]) -> float:
    """Frames a second of the file: as asked for, as the pipeline says, or what its models are trained for."""
    said = [takes[key].default for key in ("fps", "frame_rate") if key in takes]
    plain = next((float(x) for x in said if isinstance(x, int | float)), None)
    return config.fps or plain or next((value for key, value in RATES.items() if name.startswith(key)), 24.0)


def _path(value: Any) -> Path | None:
    return None if value is None else Path(value)
