"""`foveate generate` on gloo ranks: the same seed is the same clip on 1, 2 and 4, and one rank writes it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from saved_pipelines import saved
from torch import Tensor
from worlds import Worlds

from foveate.generation import film, pipeline
from foveate.generation.config import GenerateConfig
from foveate.generation.run import generate_clips
from foveate.quality import relative_error

TOLERANCE = 1e-5
STEPS = 4


def clips(config: dict[str, Any], out: Path) -> tuple[list[Tensor], list[str], float]:
    """What this process made, in numbers; the names of the files that it wrote; the share held of the last one."""
    made: list[Tensor] = []
    original = pipeline.to_pictures

    def keep(frames: Any) -> Any:
        made.append(torch.as_tensor(frames[0]).float())
        return original(frames)

    pipeline.to_pictures = keep
    try:
        written = generate_clips(GenerateConfig(**config), out, Console(quiet=True))
    finally:
        pipeline.to_pictures = original
    share = film.settings_of(written[-1])["held"] if written else 0.0
    return made, [file.name for file in written], share


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    root, made = tmp_path_factory.mktemp("pipelines"), {}

    def get(name: str, **more: Any) -> dict[str, Any]:
        if name not in made:
            given = saved(root / name.replace(" ", "_"), name)
            made[name] = {flag[2:]: value for flag, value in zip(given[::2], given[1::2], strict=True)}
        numbers = {key: int(value) for key, value in made[name].items() if key in ("frames", "height", "width")}
        paths = {key: Path(value) for key, value in made[name].items() if key in ("image", "embeds")}
        numbers |= {"height": 128, "width": 128}  # two tiles for two ranks, and more
        return {**made[name], **numbers, **paths, "steps": STEPS, "seed": 3, **more}

    return get


CASES = [
    (2, "wan", {}), (4, "wan", {"cfg_parallel": True}), (2, "wan", {"sparse": "0.6"}), (2, "wan i2v", {}),
    (2, "ltx", {}), (2, "cogvideox", {}), (2, "mochi", {"cfg_parallel": True}), (2, "hunyuan", {"cfg_parallel": True}),
    (2, "mochi", {}), (2, "wan", {"quality": 0.01, "steps": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("size", "name", "how"), CASES, ids=str)
def test_a_clip_is_the_same_on_ranks(size, name, how, flags, worlds: Worlds, tmp_path: Path) -> None:
    alone, _, held = clips(flags(name, **{k: v for k, v in how.items() if k != "cfg_parallel"}), tmp_path / "1.mp4")
    found = worlds(size).run(clips, flags(name, **how), tmp_path / "ranks.mp4")
    assert [names for _, names, _ in found] == [["ranks.mp4"], *[[]] * (size - 1)]
    assert sorted(os.listdir(tmp_path)) == ["1.mp4", "ranks.mp4"]
    for made, _, _ in found:
        assert relative_error(made[0], alone[0]) < TOLERANCE
    assert found[0][2] == held
    assert (held > 0) == ("quality" in how)


@pytest.mark.parametrize(("size", "count", "teams"), [(2, 3, 2), (4, 2, 2)], ids=str)
def test_prompts_are_spread(size, count, teams, flags, worlds: Worlds, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"a {what}"}) for what in ("cat", "dog", "red")[:count]))
    config = flags("wan", prompts=file) | {"prompt": None}
    alone, _, _ = clips(config, tmp_path / "alone")
    found = worlds(size).run(clips, config, tmp_path / "ranks")
    each = size // teams
    for rank, (made, names, _) in enumerate(found):
        mine = list(range(rank // each, count, teams))
        assert names == ([f"{number:04d}.mp4" for number in mine] if rank % each == 0 else [])
        for clip, number in zip(made, mine, strict=True):
            assert relative_error(clip, alone[number]) < TOLERANCE
    assert sorted(os.listdir(tmp_path / "ranks")) == sorted(os.listdir(tmp_path / "alone"))
