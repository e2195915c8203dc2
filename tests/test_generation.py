"""`foveate generate --model <diffusers folder>`: every kind of pipeline, files, settings, refusals, memory, ranks."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from saved_pipelines import MAKERS, saved
from test_cli import Run, foveate

from foveate.data import write_mp4
from foveate.generation import film, memory, pipeline, ranks, run

_ = foveate  # a fixture
STEPS = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Saved pipelines by name, written when first asked for: the flags of a clip of each."""
    made: dict[str, list[str]] = {}
    root = tmp_path_factory.mktemp("pipelines")

    def get(name: str) -> list[str]:
        if name not in made:
            made[name] = saved(root / name.replace(" ", "_"), name)
        return [*made[name], "--steps", str(STEPS)]

    return get


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """What was written, as pictures, by the file's name."""
    found: dict[str, np.ndarray] = {}

    def write(target: Path, pictures: np.ndarray, *rest: Any) -> None:
        found[target.name.split(".")[1]] = pictures
        write_mp4(target, pictures, *rest)

    monkeypatch.setattr(run, "write_mp4", write)
    return found


def plainly(flags: list[str], seed: int) -> np.ndarray:
    """The same clip by diffusers alone."""
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    import diffusers
    from safetensors.torch import load_file

    folder = given["--model"]
    name = json.loads((Path(folder) / "model_index.json").read_text())["_class_name"]
    cls = getattr(diffusers, given.get("--pipeline", name))
    left_out = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2") if "--embeds" in given else ()
    pipe = cls.from_pretrained(folder, **dict.fromkeys(left_out))
    pipe.set_progress_bar_config(disable=True)
    call: dict[str, Any] = json.loads(given.get("--call", "{}"))
    call |= load_file(given["--embeds"]) if "--embeds" in given else {"prompt": given["--prompt"]}
    if "--image" in given:
        call["image"] = _covering(given)
    size = {name: int(given[flag]) for name, flag in
            (("num_frames", "--frames"), ("height", "--height"), ("width", "--width"))}  # fmt: skip
    noise = torch.Generator().manual_seed(seed)
    made = pipe(**call, **size, num_inference_steps=STEPS, generator=noise, output_type="np").frames[0]
    return (np.nan_to_num(made) * 255).round().astype(np.uint8)


def _covering(given: dict[str, str]) -> Image.Image:
    """Scaled to cover the clip's size, and cut in the middle."""
    return ImageOps.fit(Image.open(given["--image"]).convert("RGB"), (int(given["--width"]), int(given["--height"])))


@pytest.mark.parametrize("name", MAKERS)
def test_a_folder_becomes_the_film_that_diffusers_makes(name, folders, foveate: Run, tmp_path: Path, seen) -> None:
    flags = folders(name)
    done = foveate("generate", "--out", tmp_path / "exact.mp4", *flags, "--seed", "3")
    assert (done.code, done.out) == (0, f"wrote {tmp_path / 'exact.mp4'}\n"), done.err
    np.testing.assert_array_equal(seen["exact"], plainly(flags, 3))
    done = foveate("generate", tmp_path / "reused.mp4", *flags, "--seed", "3", "--quality", "0.01")
    assert done.code == 0, done.err
    about = film.settings_of(tmp_path / "reused.mp4")
    assert 0 < about["held"] < 0.7
    assert f"{about['held']:.0%} of the model's calls held" in done.err
    assert f"step {STEPS}/{STEPS} {about['held']:.0%} held" in done.err
    assert (about["seed"], about["steps"], about["quality"]) == (3, STEPS, 0.01)
    assert not (seen["reused"] == seen["exact"]).all()


def test_another_class_of_the_same_weights(folders, foveate: Run, tmp_path: Path, seen) -> None:
    flags, picture = folders("ltx"), tmp_path / "a.png"
    Image.fromarray(np.full((64, 64, 3), 90, np.uint8)).save(picture)
    refused = foveate("generate", tmp_path / "a.mp4", *flags, "--image", picture)
    assert refused.code == 2
    assert "takes no image" in refused.err
    assert "--pipeline" in refused.err
    more = ["--image", str(picture), "--pipeline", "LTXImageToVideoPipeline"]
    assert foveate("generate", tmp_path / "a.mp4", *flags, *more).code == 0
    np.testing.assert_array_equal(seen["a"], plainly(flags + more, 0))


def test_many_prompts_from_a_file(folders, foveate: Run, tmp_path: Path, seen) -> None:
    flags = [x for x in folders("wan") if x not in ("--prompt", "a cat runs")]
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a cat\u2028runs"}, {"prompt": "a dog", "seed": 5, "name": "dog", "negative": "bad"}]
    file.write_text("\n".join(json.dumps(x, ensure_ascii=False) for x in lines) + "\n\n")
    done = foveate("generate", "--out", tmp_path / "many", "--prompts", file, *flags, "--seed", "7")
    assert done.code == 0, done.err
    assert sorted(os.listdir(tmp_path / "many")) == ["0000.mp4", "dog.mp4"]
    np.testing.assert_array_equal(seen["0000"], plainly([*flags, "--prompt", "a cat\u2028runs"], 7))
    assert film.settings_of(tmp_path / "many" / "dog.mp4")["seed"] == 5
    (tmp_path / "many" / "0000.mp4").unlink()
    seen.clear()
    again = ("generate", "--out", tmp_path / "many", "--prompts", file, *flags)
    assert "dog.mp4 is there already" in foveate(*again).err
    assert foveate(*again, "--skip-existing").code == 0
    assert list(seen) == ["0000"]
    assert "there already" in foveate(*again, "--skip-existing").err


def test_refusals_come_first_and_lose_nothing(folders, foveate: Run, tmp_path: Path, monkeypatch) -> None:
    wan, image = folders("wan"), folders("wan i2v")
    monkeypatch.setattr(pipeline, "load", lambda *_, **__: pytest.fail("work began"))
    folder = Path(wan[1])
    (tmp_path / "there.mp4").write_text("mine")
    (tmp_path / "bad.png").write_text("no picture")
    for name, line in (("a", "{"), ("b", '{"prompt": 3}'), ("c", '{"promt": "x"}'), ("d", ""), ("e", '["x"]'),
                       ("f", '{"prompt": "x", "name": "../x"}'), ("g", '{"prompt": "x", "frames": "many"}'),
                       ("h", '{"seed": 1}'), ("i", '{"prompt": "x", "call": {"strength": 1}}')):  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text(line + "\n")
    many = ("generate", "--out", tmp_path / "many", "--model", folder, "--prompts")
    one = ("generate", tmp_path / "a.mp4")
    cases = [
        ((*one, "--model", tmp_path, "--prompt", "x"), "no model_index.json"),
        ((*one, "--model", folder / "transformer", "--prompt", "x"), "one part of a pipeline"),
        ((*one, "--model", "./nowhere", "--prompt", "x"), "no such folder"),
        ((*one, "--model", folder), "give one of --prompt"),
        ((*one, *wan, "--pipeline", "SecretPipeline"), "no pipeline SecretPipeline"),
        ((*one, *wan, "--pipeline", "FluxPipeline"), "makes no video"),
        ((*one, *wan, "--label", "1"), "--label: for weights files"),
        ((*one, "--offload", "model"), "--offload: for diffusers pipelines only"),
        ((*one, *wan, "--sparse", "1.5"), "a share of the tiles in (0, 1]"),
        ((*one, *wan, "--sparse", "nowhere"), "or the folder"),
        ((*one, *wan, "--quality", "2"), "quality"),
        ((*one, *wan, "--quality", "0.9", "--schedule", "x.json"), "takes the place"),
        ((*one, *wan, "--call", "{"), "not JSON"),
        ((*one, *wan, "--call", '{"strength": 1}'), "takes no strength"),
        ((*one, *wan, "--frames", "0"), "above 0"),
        ((*one, *wan, "--cfg-parallel"), "start two by torchrun"),
        ((*one, *wan, "--ranks-per-video", "2"), "this is one process"),
        ((*one, *image[:2], "--prompt", "x"), "give --image"),
        ((*one, *image[:2], "--prompt", "x", "--image", tmp_path / "no.png"), "no such file"),
        ((*one, *image[:2], "--prompt", "x", "--image", tmp_path / "bad.png"), "no picture"),
        ((*one, "--model", folder, "--embeds", tmp_path / "bad.png"), "not a safetensors file"),
        (("generate", tmp_path / "there.mp4", *wan), "--overwrite"),
        (("generate", tmp_path / "there.mp4", "--out", "b.mp4", *wan), "give the file once"),
        ((*many, tmp_path / "none.jsonl"), "none.jsonl"),
        ((*many, tmp_path / "a.jsonl"), "line 1 is not JSON"),
        ((*many, tmp_path / "b.jsonl"), "prompt must be text"),
        ((*many, tmp_path / "c.jsonl"), "has promt; known are"),
        ((*many, tmp_path / "d.jsonl"), "holds no line"),
        ((*many, tmp_path / "e.jsonl"), "must be an object"),
        ((*many, tmp_path / "f.jsonl"), "without a folder"),
        ((*many, tmp_path / "g.jsonl"), "num_frames must be a whole number"),
        ((*many, tmp_path / "h.jsonl"), "neither a prompt nor embeds"),
        ((*many, tmp_path / "i.jsonl"), "takes no strength"),
    ]
    for arguments, message in cases:
        done = foveate(*arguments)
        assert (done.code, done.out) == (2, ""), (arguments, done)
        assert message in " ".join(done.err.replace("│", " ").split()), (arguments, done.err)
    assert not (tmp_path / "a.mp4").exists()
    assert (tmp_path / "there.mp4").read_text() == "mine"


def test_the_pipelines_own_checks_come_before_it_begins(folders, foveate: Run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "place", lambda *_: pytest.fail("work began"))
    done = foveate("generate", tmp_path / "a.mp4", *folders("wan"), "--height", "50")
    assert done.code == 2
    assert "divisible by 16" in done.err


def test_a_name_of_the_hub_without_network(foveate: Run, tmp_path: Path, monkeypatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect")

    monkeypatch.setattr("diffusers.DiffusionPipeline.load_config", offline)
    done = foveate("generate", tmp_path / "a.mp4", "--model", "some/model", "--prompt", "x")
    assert done.code == 2
    assert "hf download some/model" in done.err


def test_offload_and_tiles(folders, foveate: Run, tmp_path: Path, seen) -> None:
    flags = folders("wan")
    assert foveate("generate", tmp_path / "plain.mp4", *flags).code == 0
    done = foveate("generate", tmp_path / "b.mp4", *flags, "--tiled", "--offload", "model")
    assert done.code == 0, done.err
    assert "--offload model has no effect on a CPU" in done.err
    np.testing.assert_array_equal(seen["b"], seen["plain"])  # a clip smaller than a tile


def test_what_does_not_fit_says_so_in_numbers() -> None:
    parts = {"text_encoder": 11 * memory.GIB, "transformer": 3 * memory.GIB, "vae": memory.GIB // 2}
    assert memory.needed(parts, "none") == 14.5 * memory.GIB
    memory.check(parts, "none", 15 * memory.GIB)
    memory.check(parts, "model", 12 * memory.GIB)
    memory.check(parts, "sequential", memory.GIB)
    with pytest.raises(ValueError, match=r"take 14.5 GiB .*text_encoder 11.0 GiB.* and 12.0 GiB .*free.*--offload model"
                       r" \(weights on the device: 11.0 GiB in place of 14.5 GiB\)"):  # fmt: skip
        memory.check(parts, "none", 12 * memory.GIB)
    with pytest.raises(ValueError, match="--offload sequential") as refused:
        memory.check(parts, "model", 8 * memory.GIB)
    assert "--offload model" not in str(refused.value)


def test_out_of_memory_says_where_and_what_to_do(folders, foveate: Run, tmp_path: Path, monkeypatch) -> None:
    flags = folders("wan")
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(WanTransformer3DModel, "forward", full)
        done = foveate("generate", tmp_path / "a.mp4", *flags)
    assert done.code == 1
    assert f"out of memory: while at step 1 of {STEPS}" in done.err
    assert "--tiled" not in done.err
    assert "--offload model" in done.err
    with monkeypatch.context() as patch:
        patch.setattr(AutoencoderKLWan, "decode", full)
        done = foveate("generate", tmp_path / "a.mp4", *flags)
    assert "while decoding" in done.err
    assert "try --tiled" in done.err
    assert os.listdir(tmp_path) == []


def test_who_shares_a_clip() -> None:
    def share(world: int, clips: int, **more: Any) -> int:
        return ranks.share(world, clips, **{"cfg": 1, "asked": None, "able": True} | more)

    assert [share(8, clips) for clips in (1, 2, 3, 4, 8, 20)] == [8, 4, 4, 2, 1, 1]
    assert [share(8, clips, cfg=2) for clips in (1, 2, 4, 20)] == [8, 4, 2, 2]
    assert [share(8, 1, able=False), share(8, 20, able=False, cfg=2), share(1, 5)] == [1, 2, 1]
    assert share(8, 20, asked=4) == 4
    for bad in ({"asked": 3}, {"asked": 1, "cfg": 2}, {"asked": 4, "able": False}):
        with pytest.raises(ValueError, match="--ranks-per-video"):
            share(8, 20, **bad)


def test_settings_survive_and_foreign_files_have_none(tmp_path: Path) -> None:
    clip = np.zeros((2, 16, 16, 3), np.uint8)
    write_mp4(tmp_path / "a.mp4", clip, 8, film.about({"prompt": "a café; = \\ \n two lines", "seed": 2**62}))
    assert film.settings_of(tmp_path / "a.mp4") == {
        "by": "foveate generate", "prompt": "a café; = \\ \n two lines", "seed": 2**62
    }  # fmt: skip
    write_mp4(tmp_path / "b.mp4", clip, 8)
    for name in ("b.mp4", "none.mp4"):
        with pytest.raises(ValueError, match="no clip by"):
            film.settings_of(tmp_path / name)
