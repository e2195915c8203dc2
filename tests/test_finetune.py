"""`foveate encode`, `foveate train --model`: a tiny saved Wan pipeline from clips to plain diffusers."""

import importlib.util
import json
import shutil
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

pytest.importorskip("diffusers", reason="needs diffusers: pip install 'foveate[diffusers]'")

import diffusers
import finetune_data
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_pipelines import call, made

from foveate import cli, costs, flags
from foveate.finetune import encode as encoding
from foveate.finetune import estimate, families, videos
from foveate.finetune.config import FinetuneConfig
from foveate.finetune.encode import Encoder, encode
from foveate.finetune.encoded import Encoded, Order, deal
from foveate.finetune.loop import Finetuner
from foveate.finetune.model import prepare
from foveate.finetune.noising import Diffusion, Flow, noising
from foveate.finetune.units import EncodeConfig, Unit, gather, pixels
from foveate.run_report import sampled_panels
from foveate.sparsity.config import SparsityConfig
from foveate.training.flow import stream
from foveate.video import to_uint8

SIZES = ("9x64x96", "9x96x64")
SOON = SparsityConfig(budget=0.5, warmup=2, learn_from=1, force=True)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The pipeline, the clips, and their encoding, begun by the command line, killed in the second shard of three."""
    root = tmp_path_factory.mktemp("finetune")
    found = SimpleNamespace(model=finetune_data.wan(root / "wan"), clips=finetune_data.clips(root / "clips"))
    found.encoded, found.root = root / "encoded", root
    words = ["encode", "--model", str(found.model), "--data", str(found.clips), "--out", str(found.encoded)]
    found.words = [*words, "--sizes", *SIZES, "--shard", "2", "--dtype", "float32"]
    real, shots = encoding.pixels, []

    def dies(unit: Unit, stride: int) -> torch.Tensor:
        shots.append(unit)
        if len(shots) == 4:
            raise KeyboardInterrupt
        return real(unit, stride)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "pixels", dies)
        with pytest.raises(KeyboardInterrupt):
            cli.run(found.words)
    first = found.encoded / "shard-00000.safetensors"
    found.killed = sorted(p.name for p in found.encoded.iterdir()), first.stat().st_mtime_ns
    assert cli.run(found.words) == 0
    found.kept = first.stat().st_mtime_ns
    return found


def test_a_killed_encoding_loses_one_shard_and_says_what_it_left_out(home: SimpleNamespace) -> None:
    names, when = home.killed
    assert names == ["empty.safetensors", "encode.json", "shard-00000.safetensors"]
    assert home.kept == when
    [left] = [json.loads(line) for line in (home.encoded / "skipped.jsonl").read_text().splitlines()]
    assert left["clip"] == "broken.mp4"
    rows = Encoded(home.encoded).rows
    assert [row["clip"] for row in rows] == ["0.mp4", "2.mp4", "4.mp4", "1.mp4", "3.mp4", "5.mp4"]
    assert {tuple(row["shape"]) for row in rows} == {(4, 3, 8, 12), (4, 3, 12, 8)}


def test_what_is_encoded_is_what_the_pipeline_gives_its_transformer(home: SimpleNamespace) -> None:
    pipe = diffusers.WanPipeline.from_pretrained(home.model)
    data = Encoded(home.encoded)
    config = EncodeConfig(model=home.model, data=home.clips, out=home.encoded, sizes=SIZES)
    unit = gather(config).units[1]
    sample = data.batch([1], families.text_length(families.examine(home.model)))
    with torch.no_grad():
        z = pipe.vae.encode(pixels(unit, 1)[None]).latent_dist.mode()
        text, none = pipe.encode_prompt(data.rows[1]["caption"], "", max_sequence_length=512)
    torch.testing.assert_close(sample.latents, (z - 0.1) / 0.9)
    torch.testing.assert_close(sample.text, text)
    torch.testing.assert_close(data.batch([1], 512, [True]).text, none)
    assert int(sample.mask.sum()) == data.rows[1]["text_tokens"] == len(data.rows[1]["caption"]) + 1


def test_encoding_again_elsewhere_or_otherwise(home: SimpleNamespace, tmp_path: Path, capsys: Any) -> None:
    """Two processes make the same files; another size into the same folder, and odd flags, are refused by code 2."""
    table = home.clips / "some.csv"
    table.write_text("path,text\n" + "".join(f'{i}.mp4,"stripes, {i}"\n' for i in range(3)) + "none.mp4,x\n")
    config = EncodeConfig(
        model=home.model, data=table, out=tmp_path / "two", sizes=SIZES, shard=1, dtype="float32", windows=2, stride=1
    )
    for number in (1, 0):
        Encoder(config, number, 2).run()
    samples, skipped = encode(config)
    table.unlink()
    assert samples == 3
    assert ("none.mp4", "has a caption but no video file (some.csv line 5)") in skipped
    one = load_file(home.encoded / "shard-00000.safetensors")["latents.0"]
    assert torch.equal(load_file(tmp_path / "two" / "shard-00000.safetensors")["latents.0"], one)
    for words, advice in (
        ([*home.words, "--sizes", "5x64x96"], "holds an encoding of something else"),
        ([*home.words[:5], "--out", str(tmp_path / "a"), "--sizes", "9x60x96"], "height a multiple of 16"),
        ([*home.words[:5], "--out", str(tmp_path / "b"), "--sizes", "big"], "frames x height x width"),
        (["encode", "--model", str(home.clips), *home.words[3:]], "no diffusers pipeline"),
        (["train", *home.words[1:5], "--out", str(tmp_path / "c")], "foveate encode"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as left:
            cli.main(words)
        assert left.value.code == 2
        assert advice in " ".join(capsys.readouterr().err.split())


def _without(part: str, model: Path, data: Path) -> None:
    shutil.rmtree(model / part)


def _cut(model: Path, data: Path) -> None:
    (model / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"cut")


def _of(file: str, change: Any) -> Any:
    def changed(model: Path, data: Path) -> None:
        path = (model if "/" in file else data) / file
        path.write_text(change(path.read_text()))

    return changed


def _dial(part: str, **more: Any) -> Any:
    return _of(f"{part}/config.json", lambda text: json.dumps(json.loads(text) | more))


ODD: list[tuple[str, Any, str, str]] = [
    ("encode", partial(_without, "vae"), "", "has no vae, which encoding needs"),
    ("encode", partial(_without, "text_encoder"), "", "has no text_encoder"),
    ("encode", _of("vae/config.json", lambda text: "{"), "", "vae/config.json is not JSON"),
    ("encode", _of("encode.json", lambda text: text[:9]), "", "encode.json is not whole"),
    ("train", _of("encode.json", lambda text: text[:9]), "", "encode.json is not whole"),
    ("train", _of("index.jsonl", lambda text: text[:-9]), "", "index.jsonl is not whole"),
    ("train", _of("index.jsonl", lambda text: ""), "", "names no sample"),
    ("train", _dial("transformer", in_channels=8, out_channels=8), "", "latent channels 4, the model takes 8"),
    ("train", _dial("transformer", text_dim=24), "", "text width 16, the model takes 24"),
    ("train", _dial("vae", latents_mean=[0.5] * 4), "", "another VAE's configuration"),
    ("train", partial(_without, "vae"), "--sample-every 1", "--sample-every needs"),
    ("train", _cut, "", "cannot be loaded"),
    ("train", None, "--lora 4096", "more than any of these layers has ranks, 64"),
    ("train", None, "--lora 2 --lora-alpha 0", "--lora-alpha must be above 0"),
    ("train", None, "--lora 2 --lora-targets nope", "no linear layer is named so"),
]


@pytest.mark.parametrize(("command", "spoil", "dials", "advice"), ODD, ids=[row[3] for row in ODD])
def test_what_does_not_fit_is_refused(
    command: str, spoil: Any, dials: str, advice: str, home: SimpleNamespace, tmp_path: Path, capsys: Any
) -> None:
    """By code 2 and what to do, before training."""
    model, data, out = (tmp_path / name for name in ("model", "data", "out"))
    shutil.copytree(home.model, model)
    shutil.copytree(home.encoded, data)
    if spoil is not None:
        spoil(model, data)
    words = ["--model", str(model), *dials.split()]
    if command == "encode":
        words += [
            "--data",
            str(home.clips),
            "--out",
            str(data),
            "--sizes",
            *SIZES,
            "--shard",
            "2",
            "--dtype",
            "float32",
        ]
    else:
        words += ["--data", str(data), "--out", str(out), "--steps", "1"]
    with pytest.raises(SystemExit) as ended:
        cli.main([command, *words])
    assert ended.value.code == 2
    assert advice in " ".join(capsys.readouterr().err.split())
    assert not (out / "history.jsonl").exists()


def test_clips_of_a_url_are_copied_once(home: SimpleNamespace, tmp_path: Path, capsys: Any) -> None:
    """The same shards as from the folder itself; what cannot be copied is listed; a package that lacks is named."""
    fsspec = pytest.importorskip("fsspec")
    there = fsspec.filesystem("memory")
    for name in ("0.mp4", "1.mp4"):
        there.pipe(f"/clips/{name}", (home.clips / name).read_bytes())
    there.pipe("/clips/sub/../../../out.mp4", b"x")
    rows = [json.dumps({"file": f"{i}.mp4", "caption": f"one\u2028two\n{i}"}, ensure_ascii=False) for i in range(3)]
    there.pipe("/clips/captions.jsonl", "\n".join(rows).encode())
    out = tmp_path / "encoded"
    words = ["encode", "--model", str(home.model), "--sizes", *SIZES, "--out", str(out), "--data"]
    for url in ("memory://clips", "memory://clips/captions.jsonl"):
        assert cli.run([*words, url]) == 0
    data = Encoded(out)
    assert [(row["clip"], row["caption"]) for row in data.rows] == [(f"{i}.mp4", f"one\u2028two\n{i}") for i in (0, 1)]
    left = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]
    assert ["could not be copied" in row["reason"] or "no video file" in row["reason"] for row in left] == [True, True]
    assert not (tmp_path / "out.mp4").exists()
    for url, advice in (("memory://none", "no such folder"), ("s3://b/c", "s3fs"), ("bogus://c", "Protocol not known")):
        if url.startswith("s3") and importlib.util.find_spec("s3fs"):
            continue
        with pytest.raises(SystemExit) as ended:
            cli.main([*words, url])
        assert ended.value.code == 2
        assert advice in " ".join(capsys.readouterr().err.split())


def config_of(home: SimpleNamespace, out: Path, **more: Any) -> FinetuneConfig:
    given = {
        "steps": 6,
        "batch": 2,
        "lora": 4,
        "lr": 1e-2,
        "validate_every": 3,
        "checkpoint_every": 3,
        "sparsity": SOON,
    }
    given |= {"val_fraction": 0.2, "validation_clips": 1, "warmup": 2}
    return FinetuneConfig(model=home.model, data=home.encoded, out=out, **given | more)


def run_flags(home: SimpleNamespace, out: Path, *more: str) -> list[str]:
    words = ["train", "--model", str(home.model), "--data", str(home.encoded), "--out", str(out), "--lora", "4"]
    words += ["--steps", "6", "--batch", "2", "--lr", "1e-2", "--validate-every", "3", "--checkpoint-every", "3"]
    words += ["--val-fraction", "0.2", "--validation-clips", "1", "--warmup", "2", "--sparsity.budget", "0.5"]
    return [*words, "--sparsity.warmup", "2", "--sparsity.learn-from", "1", "--sparsity.force", *more]


def generated(pipe: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    given = {"prompt": "stripes", "height": 64, "width": 96, "num_frames": 9, "guidance_scale": 1.0}
    return call(pipe, given, steps=3)


def test_lora_from_clips_to_plain_diffusers(home: SimpleNamespace, tmp_path: Path) -> None:
    """Trained by the command line, stopped and resumed; the file that is left does in diffusers what it did here."""
    out = tmp_path / "run"
    tuner = Finetuner(config_of(home, out), on_step=lambda row: tuner.stop() if row["step"] == 4 else None)
    part = tuner.fit()
    assert cli.run(["train", "--resume", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert cli.run(run_flags(home, tmp_path / "whole")) == 0
    whole = [json.loads(line) for line in (tmp_path / "whole" / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[:5] == part  # a stop is agreed on in the next step
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole]
    assert [row["kept"] for row in rows] == [1, 1, 0.5, 0.5, 0.5, 0.5]
    assert rows[5]["validation"] == whole[5]["validation"]

    pipe = diffusers.WanPipeline.from_pretrained(home.model)
    plain = generated(pipe)
    pipe.load_lora_weights(out / "lora")
    ours = Finetuner(config_of(home, out, steps=7))
    ours.resume()
    with torch.no_grad():
        for name, weight in ours.weights.items():
            weight.copy_(ours.ema[name])
    assert ours.handle is not None
    ours.handle.remove()
    twin = diffusers.WanPipeline.from_pretrained(home.model, transformer=ours.model.eval())
    expected, found = generated(twin), generated(pipe)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (found - plain).abs().max() > 1e-3


def test_validation_videos_are_the_pipelines_and_disturb_nothing(
    home: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By EMA weights, as plain diffusers generates; later losses and the random state are the same bits without."""
    real = videos.write

    def write(tuner: Finetuner, places: Any) -> list[str]:
        before = torch.get_rng_state()
        found = real(tuner, places)
        assert torch.equal(torch.get_rng_state(), before)
        return found

    monkeypatch.setattr(videos, "write", write)
    given = {"ema": 0.5, "steps": 4, "validate_every": 9, "checkpoint_every": 9, "workers": 0}
    runs = []
    for every in (2, 0):
        config = config_of(home, tmp_path / str(every), sample_every=every, sample_steps=3, tensorboard=True, **given)
        tuner = Finetuner(config)
        rows = tuner.fit()
        runs.append(([(row["loss"], row["kept"], row["norm"]) for row in rows], tuner.model.training))
        if every:
            names = [row.get("samples") for row in rows]
            shown = tuner
    assert runs[0] == runs[1]
    assert names == [None, ["samples/step-000002-0.mp4"], None, ["samples/step-000004-0.mp4"]]
    with av.open(str(tmp_path / "2" / names[3][0])) as clip:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in clip.decode(video=0)])
    events = EventAccumulator(str(tmp_path / "2" / "events"))
    events.Reload()
    assert [event.step for event in events.Images("samples/0")] == [2, 4]
    assert events.Images("samples/0")[0].encoded_image_string[:6] == b"GIF89a"

    assert shown.handle is not None
    shown.handle.remove()
    shown.handle = None
    pipe = diffusers.WanPipeline.from_pretrained(home.model)
    pipe.load_lora_weights(tmp_path / "2" / "lora")
    pipe.set_progress_bar_config(disable=True)
    [(data, place)] = shown.shown
    noise = torch.randn(data.rows[place]["shape"], generator=stream(7, place))[None]
    height, width = (8 * n for n in noise.shape[-2:])
    same = {"num_inference_steps": 3, "num_frames": 9, "height": height, "width": width, "latents": noise}
    expected = pipe(data.rows[place]["caption"], output_type="latent", **same).frames
    with videos.aside(shown):
        sample, none = (data.batch([place], 512, [empty]) for empty in (False, True))
        torch.testing.assert_close(videos.denoise(shown, sample, none, noise), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        held = shown.about.family.pixels(pipe.vae, sample.latents)
    assert frames.shape == (9, height, 2 * width, 3)
    luma = np.array([0.299, 0.587, 0.114])
    assert np.abs((frames[:, :, :width] - to_uint8(held)[0].astype(float)) @ luma).mean() < 4  # what H.264 leaves
    assert [panel.title for panel in sampled_panels(tmp_path / "2")] == ["Held out", "Generated"]


def test_all_weights_are_trained_and_exported(home: SimpleNamespace, tmp_path: Path) -> None:
    tuner = Finetuner(config_of(home, tmp_path / "run", lora=0, sparse=False, steps=2, lr=1e-3))
    before = {name: p.detach().clone() for name, p in tuner.weights.items()}
    tuner.fit()
    model = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "run" / "transformer")
    for name, p in model.named_parameters():
        assert torch.equal(p, tuner.ema[name]), name
        assert name.endswith("bias") or not torch.equal(p, before[name]), name


def test_losses_are_not_those_of_another_run(home: SimpleNamespace, tmp_path: Path) -> None:
    """A loss that is not finite changes no weight and names the checkpoint; resume refuses what makes another run."""
    tuner = Finetuner(config_of(home, tmp_path / "run", sparse=False, steps=4, checkpoint_every=2))
    real, calls = tuner.loss, []

    def loss(forward: Any) -> torch.Tensor:
        calls.append(forward)
        return real(forward) * (float("nan") if len(calls) > 6 else 1.0)

    tuner.loss = loss  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match=r"nan in step 4, .*checkpoints/step-000002"):
        tuner.fit()
    assert all(p.isfinite().all() for p in tuner.weights.values())
    with pytest.raises(ValueError, match=r"--lr \(lr: 0.01 -> 0.1\)"):
        Finetuner(config_of(home, tmp_path / "run", sparse=False, steps=4, checkpoint_every=2, lr=0.1)).resume()


def test_an_epoch_takes_every_sample_once_and_steps_are_balanced() -> None:
    draw = np.random.default_rng(0)
    bucket = draw.integers(0, 5, 1001)
    tokens = np.array([100, 400, 1600, 3000, 9000])[bucket]
    order = Order(np.arange(1001), bucket, tokens, batch=16, micro=2, seed=3)
    steps = [order.step(n) for n in range(order.steps)]
    assert [order.step(n) for n in range(order.steps)] == steps
    assert set(np.concatenate([np.ravel(step) for step in steps])) == set(range(1001))
    assert sum(np.size(step) for step in steps) <= 1001 + 5 + 16
    worst = []
    for step in steps:
        assert all(bucket[a] == bucket[b] for a, b in step)
        cost = [2 * int(tokens[a]) for a, _ in step]
        hands = deal(cost, 4)
        assert sorted(i for hand in hands for i in hand) == list(range(8))
        loads = [sum(cost[i] for i in hand) for hand in hands]
        worst.append(max(loads) / np.mean(loads))
    assert np.mean(worst) < 1.1  # at random it is 1.6
    assert order.step(order.steps) != steps[0]


@pytest.mark.parametrize("name", ["FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"])
def test_levels_are_the_schedulers(name: str, tmp_path: Path) -> None:
    given = {"shift": 3.0} if name.startswith("Flow") else {"use_flow_sigmas": True, "flow_shift": 3.0}
    if not name.startswith("Flow"):
        given["prediction_type"] = "flow_prediction"
    scheduler = getattr(diffusers, name)(**given)
    config = dict(scheduler.config) | {"_class_name": name}
    flow = noising(config, tmp_path, density="uniform", bounds=(0.0, 1.0))
    plain = torch.linspace(1, 1e-3, 11)[:-1]
    if name.startswith("Flow"):
        scheduler.set_timesteps(sigmas=plain.tolist())
    else:
        scheduler.set_timesteps(10)
    sigmas = scheduler.sigmas[:-1]
    torch.testing.assert_close(flow.levels(plain, 0), sigmas, rtol=1e-4, atol=1e-4)
    assert isinstance(flow, Flow)
    x, noise = torch.randn(2, 1, 3, 1, 1, 1).unbind(0)
    level = sigmas[2:3]
    noisy, t, target = flow.apply(x, noise, level)
    assert abs(t.item() - float(scheduler.timesteps[2])) < 1.0
    torch.testing.assert_close(noisy - level * target, x)
    high = noising(config, tmp_path, density="logit-normal", bounds=(0.875, 1.0))
    drawn = high.levels(torch.rand(1000), 0)
    assert 0.874 < drawn.min() < 0.88
    assert drawn.max() <= 1


def test_diffusion_is_the_schedulers(tmp_path: Path) -> None:
    scheduler = diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    scheduler.save_pretrained(tmp_path / "scheduler")
    config = dict(scheduler.config) | {"_class_name": "CogVideoXDDIMScheduler"}
    found = noising(config, tmp_path, density="uniform", bounds=(0.0, 1.0))
    assert isinstance(found, Diffusion)
    x, noise = torch.randn(2, 3, 3, 1, 1, 1).unbind(0)
    t = found.levels(torch.tensor([0.0, 0.5, 0.9999]), 7)
    assert t.tolist() == [0, 500, 999]
    noisy, given, target = found.apply(x, noise, t)
    assert torch.equal(given, t)
    torch.testing.assert_close(noisy, scheduler.add_noise(x, noise, t))
    torch.testing.assert_close(target, scheduler.get_velocity(x, noise, t))


KINDS = {
    "wan": "WanPipeline", "wan i2v 2.1": "WanImageToVideoPipeline", "wan i2v 2.2": "WanImageToVideoPipeline",
    "skyreels": "SkyReelsV2Pipeline", "ltx": "LTXPipeline", "ltx i2v": "LTXImageToVideoPipeline",
    "cogvideox ddim": "CogVideoXPipeline",
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_the_transformer_is_given_what_the_pipeline_gives_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the pipeline's second step: its latents and time go in by our hands, and the same comes out."""
    pipe, given = made(name)
    pipe = (
        pipe
        if name != "wan i2v 2.2"
        else type(pipe)(**{k: v for k, v in pipe.components.items() if k != "transformer_2"})
    )
    if name == "wan i2v 2.2":
        pipe.set_progress_bar_config(disable=True)
    seen: list[tuple[dict[str, Any], torch.Tensor]] = []
    hook = pipe.transformer.register_forward_hook(lambda _, args, kw, out: seen.append((kw, out[0])), with_kwargs=True)
    call(pipe, given | {"guidance_scale": 1.0}, steps=2)
    hook.remove()
    kw, expected = seen[1]
    family = next(row for row in families.TABLE if KINDS[name] in row.pipelines)
    about = families.About(
        Path(), KINDS[name], dict(pipe.config), {"transformer": dict(pipe.transformer.config)}, {}, family
    )
    noisy, time = kw["hidden_states"], kw["timestep"].flatten()[-1:]
    more = {}
    if "image" in KINDS[name].lower() and "wan" in name:
        noisy, more["image"] = noisy[:, :3], noisy[:, 3:]
        if kw.get("encoder_hidden_states_image") is not None:
            more["image_embeds"] = kw["encoder_hidden_states_image"]
    if "ltx" in name:
        noisy = family.output(about, torch.empty(1, 4, *(kw[k] for k in ("num_frames", "height", "width"))), noisy)
    if "cog" in name:
        noisy = noisy.transpose(1, 2)
    mask = kw.get("encoder_attention_mask", torch.ones(kw["encoder_hidden_states"].shape[:2]))
    sample = families.Sample(noisy, kw["encoder_hidden_states"], mask.bool(), torch.tensor([25.0]), more)
    ours = family.inputs(about, pipe.transformer, noisy, time, sample)
    with torch.no_grad():
        out = pipe.transformer(**ours, return_dict=False)[0]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert family.output(about, noisy, out).shape == noisy.shape
    assert about.tokens(noisy.shape) > 0


@pytest.mark.parametrize("kind", ["blocks", "selective"])
def test_recomputed_blocks_give_the_same_losses(kind: str, home: SimpleNamespace, tmp_path: Path) -> None:
    """Bit for bit, through dense and sparse steps."""
    losses = []
    for number, way in enumerate(("none", kind)):
        tuner = Finetuner(config_of(home, tmp_path / str(number), steps=4, checkpointing=way, val_fraction=0.0))
        losses.append([row["loss"] for row in tuner.fit()])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("checkpointing", "lora"), [("none", 4), ("blocks", 0)])
def test_a_step_costs_what_is_counted_without_memory(checkpointing: str, lora: int, home: SimpleNamespace) -> None:
    """Bytes against those that torch's profiler sees the allocator give, operations against arithmetic."""
    about = families.examine(home.model)
    config = config_of(home, home.root / "none", checkpointing=checkpointing, lora=lora)
    sample = Encoded(home.encoded).batch([0], 16)
    model = diffusers.WanTransformer3DModel.from_config(dict(about.transformers["transformer"]))
    prepare(model, config)
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def step() -> None:
        out = model(sample.latents, torch.tensor([500.0]), sample.text, return_dict=False)[0]
        (out - sample.latents).square().mean().backward()

    step()
    with torch.profiler.profile(profile_memory=True) as seen:
        step()
    now, peak = 0, 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    args = about, "transformer", config, sample, torch.float32
    assert abs(estimate.held(*args, False) / peak - 1) < 0.05
    work = estimate.work(*args)
    tokens, width, layers = 3 * 4 * 6, 64, 2
    assert work.attention == 14 * tokens**2 * width * layers  # two products forward, five backward
    forward = layers * 2 * (tokens * (6 * width * width + 2 * width * 64) + 16 * 2 * width * width)
    assert (2 if lora else 3) * forward < work.rest < (2.7 if lora else 3.7) * forward


def test_mfu_is_of_the_operations_that_are_computed(home: SimpleNamespace, tmp_path: Path) -> None:
    tuner = Finetuner(config_of(home, tmp_path / "run", peak_tflops=0.5, steps=4))
    rows = tuner.fit()
    work = estimate.work(tuner.about, "transformer", tuner.config, tuner.data.batch([0], 512), torch.float32)
    for row in rows:
        done = 2 * work.operations(row["kept"])
        assert row["mfu"] == pytest.approx(done / row["seconds"] / 0.5e12)
        dense = row.get("dense_tokens_per_second", row["tokens_per_second"])
        assert dense / row["tokens_per_second"] == pytest.approx(done / (2 * work.operations()))
    assert rows[-1]["kept"] == 0.5
    assert [costs.peak(name) for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "Voodoo")] == [9.89e14, 3.12e14, None]


def test_dry_run_and_recipes_are_whole_configurations(home: SimpleNamespace, tmp_path: Path, capsys: Any) -> None:
    """What --dry-run prints is a recipe that gives the same again; every recipe of the package names every dial."""
    paths = ["--model", str(home.model), "--data", str(home.encoded), "--out", str(tmp_path / "run"), "--dry-run"]
    dials = {field.name for field in fields(FinetuneConfig)} - {"model", "data", "out", "validation"}
    own = sorted(flags.RECIPES.glob("*.yaml"))
    assert len(own) == 6
    for recipe in own:
        assert set(yaml.safe_load(recipe.read_text())) == dials
    for recipe in (path for path in own if path.stem in ("wan-1.3b-full", "wan2.2-a14b-high-lora")):
        expert = ["--expert", "auto"] if "high" in recipe.stem else []
        assert cli.run(["train", "--config", recipe.stem, *paths, "--gpus", "4", *expert]) == 0
        printed = capsys.readouterr().out
        assert yaml.safe_load(printed)["lr"] == yaml.safe_load(recipe.read_text())["lr"]
    (tmp_path / "again.yaml").write_text(printed)
    assert cli.run(["train", "--config", str(tmp_path / "again.yaml"), "--dry-run", "--gpus", "4"]) == 0
    assert capsys.readouterr().out == printed
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="nor a recipe of that name; recipes are cogvideox-5b-lora, "):
        cli.run(["train", "--config", "wan-1b", *paths])
    with pytest.raises(ValueError, match="--gpus is for --dry-run"):
        cli.run(["train", *paths[:-1], "--gpus", "2"])


def test_a_run_is_logged_to_wandb(home: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    run = SimpleNamespace(log=lambda row, step: said.append((step, row["loss"])), finish=lambda exit_code: None)
    made = lambda **given: said.append(given) or run  # noqa: E731
    fake = SimpleNamespace(init=made, util=SimpleNamespace(generate_id=lambda: "abc"))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = config_of(home, tmp_path / "run", wandb="project", steps=2, sparse=False)
    rows = Finetuner(config).fit()
    assert (said[0]["project"], said[0]["id"], said[0]["name"]) == ("project", "abc", "run")
    assert said[1:] == [(row["step"], row["loss"]) for row in rows]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'foveate\[wandb\]'"):
        Finetuner(config_of(home, tmp_path / "none", wandb="project", steps=2, sparse=False)).fit()
