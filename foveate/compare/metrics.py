"""What is measured of a pair: frames against the reference's, and each clip by itself.

A metric that cannot be measured is None, with the reason: it is never left out without a word.
"""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
import tempfile
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foveate import quality
from foveate.compare.pairs import Pair
from foveate.video import Clip

PAIRED = {
    "psnr": "PSNR, dB", "ssim": "SSIM", "ms_ssim": "MS-SSIM", "vmaf": "VMAF", "lpips": "LPIPS (your weights)",
    "flicker": "Flicker, levels", "flicker_change": "Flicker, change",
}  # fmt: skip
BETTER = {"psnr": "↑", "ssim": "↑", "ms_ssim": "↑", "vmaf": "↑", "lpips": "↓", "flicker_change": "0"}
HOW = {
    "vmaf": "needs an ffmpeg with libvmaf, and {}; `pip install imageio-ffmpeg` brings one, which is then used",
    "lpips": "needs --lpips FILE, a TorchScript module of two float32 (B, 3, H, W) in [-1, 1] to B distances "
    "(docs/compare.md has the three lines that make one from the lpips package)",
    "fvd": "needs --fvd FILE, the I3D network as TorchScript, such as StyleGAN-V's i3d_torchscript.pt",
    "vbench": "is a package of its own with the weights of a dozen networks: pip install vbench, then "
    "vbench evaluate --videos_path FOLDER --dimension ... for each folder",
}


@dataclass
class Scores:
    """Of one pair, by folder: metric -> value, None where it could not be measured."""

    of: list[dict[str, float | None]]
    reasons: dict[str, str] = field(default_factory=dict)


def score(pair: Pair, *, vmaf: bool, lpips: torch.jit.ScriptModule | None, device: str) -> Scores:
    """All of a pair's metrics, frame by frame, a chunk in memory. Raises UnusableError for lost frames."""
    totals: list[dict[str, float]] = [{} for _ in pair.clips]
    scales, reasons = _scales(pair.clips[0])
    for number, chunk in enumerate(pair.chunks()):
        reference = chunk[0]
        for total, frames in zip(totals, chunk, strict=True):
            if len(frames) > 1:
                _add(total, "flicker", (len(frames) - 1) * quality.flicker(frames))
            if frames is reference:
                continue
            for a, b in zip(frames[number > 0 :], reference[number > 0 :], strict=True):
                _add(total, "error", np.square(a.astype(float) - b).mean())
                if scales:
                    one, many = quality.similarities(a, b, scales=scales)
                    _add(total, "ssim", one)
                    _add(total, "ms_ssim", many)
                if lpips is not None:
                    _add(total, "lpips", float(lpips(_picture(a, device), _picture(b, device)).mean()))
    found = [_means(total, pair.frames, scales) for total in totals]
    for one in found[1:]:
        change = one["flicker"], found[0]["flicker"]
        one["flicker_change"] = None if None in change else change[0] - change[1]  # pyright: ignore
    if pair.frames < 2:
        reasons["flicker"] = "needs two frames or more"
    if vmaf:
        for one, clip in zip(found[1:], pair.clips[1:], strict=True):
            one["vmaf"], reason = vmaf_of(clip, pair.clips[0], pair.frames)
            if reason:
                reasons["vmaf"] = reason
    return Scores(found, reasons)


def _scales(clip: Clip) -> tuple[int, dict[str, str]]:
    """Over how many scales SSIM is computed, and why not over all."""
    side, what = min(clip.height, clip.width), f"pixels a side; a clip is {clip.width} x {clip.height}"
    if side >= quality.MULTI_SCALE:
        return len(quality.WEIGHTS), {}
    many = {"ms_ssim": f"needs {quality.MULTI_SCALE} {what}"}
    return (1, many) if side >= quality.WINDOW else (0, many | {"ssim": f"needs {quality.WINDOW} {what}"})


def _means(total: dict[str, float], frames: int, scales: int) -> dict[str, float | None]:
    found: dict[str, float | None] = {"flicker": total["flicker"] / (frames - 1) if frames > 1 else None}
    if "error" in total:
        error = total["error"] / frames
        found["psnr"] = 10 * math.log10(255**2 / error) if error else math.inf
        found["ssim"] = total["ssim"] / frames if scales else None
        found["ms_ssim"] = total["ms_ssim"] / frames if scales > 1 else None
    if "lpips" in total:
        found["lpips"] = total["lpips"] / frames
    return found


def _add(total: dict[str, float], name: str, value: float) -> None:
    total[name] = total.get(name, 0.0) + value


def _picture(frame: np.ndarray, device: str) -> Tensor:
    return torch.from_numpy(frame.copy()).permute(2, 0, 1)[None].to(device).float() / 127.5 - 1


def script(file: Path, what: str, device: str) -> Any:
    """A TorchScript module that the user supplies. ValueError where it is none."""
    if not file.is_file():
        raise ValueError(f"{file} is not there; {what} {HOW[what]}")
    try:
        with warnings.catch_warnings():  # TorchScript is deprecated, but the field's I3D network comes as nothing else
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(str(file), map_location=device).eval()
    except RuntimeError as error:
        raise ValueError(f"{file} is no TorchScript file ({str(error).splitlines()[0]}); {what} {HOW[what]}") from None


@cache
def ffmpeg() -> tuple[str | None, str]:
    """The first ffmpeg with libvmaf, of those on the PATH and that of the imageio-ffmpeg package, and why there is
    none."""
    found = [file for folder in os.get_exec_path() if (file := shutil.which("ffmpeg", path=folder))]
    if importlib.util.find_spec("imageio_ffmpeg") is not None:
        with contextlib.suppress(RuntimeError):  # its wheel is without a binary on some platforms
            found.append(importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe())
    for command in found:
        filters = subprocess.run([command, "-hide_banner", "-filters"], capture_output=True, text=True).stdout
        if "libvmaf" in filters:
            return command, ""
    return None, HOW["vmaf"].format(f"{', '.join(found)} has none" if found else "there is no ffmpeg on the PATH")


def vmaf_of(clip: Clip, reference: Clip, frames: int) -> tuple[float | None, str]:
    """The mean VMAF of a clip's frames, by ffmpeg's default model, and why there is none."""
    command, why = ffmpeg()
    if command is None:
        return None, why
    size = (
        f"scale={reference.width}:{reference.height}:flags=area,format=yuv420p,trim=end_frame={frames},setpts=N/25/TB"
    )
    with tempfile.TemporaryDirectory() as folder:
        graph = f"[0:v]{size}[a];[1:v]{size}[b];[a][b]libvmaf=log_fmt=json:log_path=vmaf.json"
        inputs = [word for one in (clip, reference) for word in ("-i", str(Path(one.path).absolute()))]
        given = [command, "-v", "error", "-nostdin", *inputs, "-lavfi", graph, "-f", "null", "-"]
        done = subprocess.run(given, cwd=folder, capture_output=True, text=True, errors="replace")
        log = Path(folder, "vmaf.json")
        if done.returncode or not log.is_file():
            return None, f"ffmpeg failed on {clip.path}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        return float(json.loads(log.read_text())["pooled_metrics"]["vmaf"]["mean"]), ""
