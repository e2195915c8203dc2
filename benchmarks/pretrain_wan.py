"""How tests/assets/wan_tiny.safetensors was made: a small diffusers Wan, on real footage, minutes on one GPU.

    pip install -e '.[diffusers]' ale-py==0.12.1
    python benchmarks/pretrain_wan.py runs/wan --footage runs/atari.npz [--minutes 6]

The footage (8 Atari games, 4,000 pictures each, random play, 96 x 80 pixels) is made on the CPU in half a minute where
the file is not there yet; ale-py (GPL, for this example alone) is needed for that only. Rectified flow, text dropped
for classifier-free guidance, EMA. The learning rate follows the clock, so a run ends decayed whenever it has to end:
its last act, always, is to save the EMA weights and a sheet of samples. Not covered: resuming.

The file in the repository: `--minutes 5.5 --compile` on one H200 (November 2026), 5,277 steps of 16 clips.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import tiny_wan
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_wan import CONFIG, FRAMES, GAMES, HEIGHT, WIDTH
from torch import Tensor, nn

HELD_OUT = 0.1  # of each game's pictures, its last ones
LEVELS = 4  # noise levels that a held-out clip is judged at


def play(game: str, pictures: int, seed: int) -> np.ndarray:
    """uint8 (pictures, HEIGHT, WIDTH, 3): one game, played at random, every fourth frame.

    Two frames are joined by their maximum, as sprites flicker; actions stick, so that things get somewhere.
    """
    import ale_py  # pyright: ignore[reportMissingImports]
    from ale_py import roms  # pyright: ignore[reportMissingImports]

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.loadROM(roms.get_rom_path(game.replace(" ", "_")))
    draw, actions = np.random.default_rng(seed), ale.getMinimalActionSet()
    action, frames = actions[0], []
    for _ in range(pictures):
        if draw.random() < 0.3:
            action = actions[draw.integers(len(actions))]
        for _frame in range(3):
            ale.act(action)
        before = ale.getScreenRGB()
        ale.act(action)
        frames.append(np.maximum(before, ale.getScreenRGB()))
        if ale.game_over():
            ale.reset_game()
    whole = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    parts = [nn.functional.interpolate(x, (HEIGHT, WIDTH), mode="bilinear", antialias=True) for x in whole.split(500)]
    return torch.cat(parts).permute(0, 2, 3, 1).numpy()


def footage(file: Path, pictures: int) -> Tensor:
    """uint8 (games, pictures, HEIGHT, WIDTH, 3). The file holds differences of neighbouring pictures, lossless."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        changes = {}
        for seed, game in enumerate(GAMES):
            frames = play(game, pictures, seed)
            changes[game] = np.diff(frames, axis=0, prepend=np.zeros_like(frames[:1]))  # modulo 256
        np.savez_compressed(file, **changes)
    with np.load(file) as opened:
        return torch.stack([torch.from_numpy(np.cumsum(opened[game], axis=0, dtype=np.uint8)) for game in GAMES])


def clips(frames: Tensor, game: Tensor, start: Tensor, length: int) -> Tensor:
    """uint8 (B, length, HEIGHT, WIDTH, 3) of these games from these pictures on."""
    return frames[game[:, None], start[:, None] + torch.arange(length, device=frames.device)]


def flow_loss(model: nn.Module, latents: Tensor, noise: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    """Mean squared error of the predicted velocity, noise - latents; (B,)."""
    level = sigma.view(-1, 1, 1, 1, 1)
    with torch.autocast(latents.device.type, torch.bfloat16, enabled=latents.is_cuda):
        said = model((1 - level) * latents + level * noise, 1000 * sigma, text, return_dict=False)[0]
    return (said.float() - (noise - latents)).square().flatten(1).mean(1)


@torch.no_grad()
def validate(model: nn.Module, frames: Tensor, text: Tensor, length: int) -> float:
    """Mean loss over one held-out clip a game and place, at fixed noise and levels."""
    games, pictures = frames.shape[:2]
    held, losses = pictures - round(HELD_OUT * pictures), []
    draw = torch.Generator(frames.device).manual_seed(0)
    for level in range(LEVELS):
        for place in (0.25, 0.75):
            start = held + int(place * (pictures - held - length))
            game = torch.arange(games, device=frames.device)
            latents = tiny_wan.to_latents(clips(frames, game, torch.full_like(game, start), length))
            noise = torch.randn(latents.shape, generator=draw, device=frames.device)
            sigma = torch.full((games,), (level + 0.5) / LEVELS, device=frames.device)
            losses.append(flow_loss(model, latents, noise, sigma, text[:games]).mean())
    return torch.stack(losses).mean().item()


def train(options: argparse.Namespace, model: Any, frames: Tensor) -> tuple[nn.Module, list[dict]]:
    """The EMA weights' model and the history, after `minutes` or `steps`, whichever comes first."""
    began, device = time.monotonic(), frames.device
    text = torch.cat([tiny_wan.prompt_embeds(GAMES), tiny_wan.prompt_embeds([""])]).to(device)
    average, weights = copy.deepcopy(model).requires_grad_(False).eval(), list(model.parameters())
    averaged = list(average.parameters())
    optimizer = torch.optim.AdamW(
        weights, lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda"
    )
    if options.compile:
        model.compile_repeated_blocks(fullgraph=True)
    draw = torch.Generator(device).manual_seed(options.seed)
    first, history, losses = round((1 - HELD_OUT) * frames.shape[1]) - options.frames, [], []
    step, done = 0, 0.0
    while done < 1:
        shape = {"size": (options.batch,), "generator": draw, "device": device}
        game = torch.randint(len(GAMES), **shape)
        latents = tiny_wan.to_latents(clips(frames, game, torch.randint(first, **shape), options.frames))
        noise = torch.randn(latents.shape, generator=draw, device=device)
        sigma = torch.randn(**shape).sigmoid()  # logit-normal, then shifted to the noisy side as sampling is
        sigma = options.shift * sigma / (1 + (options.shift - 1) * sigma)
        dropped = torch.rand(**shape) < 0.1
        loss = flow_loss(model, latents, noise, sigma, text[game.masked_fill(dropped, len(GAMES))]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.param_groups[0]["lr"] = options.lr * min(1, (step + 1) / 200) * (0.5 + 0.5 * math.cos(math.pi * done))
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(averaged, weights, max(1 - options.ema, 9 / (10 + step)))
        losses.append(loss.detach())
        step += 1
        last = step == options.steps
        if step % options.every == 0 or last:
            row = {"step": step, "loss": torch.stack(losses).mean().item(), "seconds": time.monotonic() - began}
            losses.clear()
            if step % (10 * options.every) == 0 or last:
                row["validation"] = validate(average, frames, text, options.frames)
            print(json.dumps(row), flush=True)
            history.append(row)
        done = max((time.monotonic() - began) / (60 * options.minutes), step / options.steps if options.steps else 0)
    history.append({"step": step, "seconds": time.monotonic() - began,
                    "validation": validate(average, frames, text, options.frames)})  # fmt: skip
    print(json.dumps(history[-1]), flush=True)
    return average, history


def sheet(samples: Tensor, file: Path) -> None:
    """Six frames of each clip, uint8 (B, F, Y, X, 3), a row a clip."""
    frames = samples[:, torch.linspace(0, samples.shape[1] - 1, 6).long()]
    rows = frames.transpose(1, 2).flatten(2, 3).flatten(0, 1)
    Image.fromarray(rows.numpy()).resize((rows.shape[1] * 2, rows.shape[0] * 2), Image.Resampling.NEAREST).save(file)


def save(model: Any, file: Path, options: argparse.Namespace, history: list[dict]) -> None:
    """bf16 weights; configuration, recipe and data in the file's header."""
    recipe = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
    header = {
        "config": json.dumps({**CONFIG, **options.model}),
        "recipe": json.dumps({"script": "benchmarks/pretrain_wan.py", **recipe, "end": history[-1]}),
        "data": f"Atari 2600 through ale-py 0.12.1, random play: {', '.join(GAMES)}; {options.pictures} pictures each, "
        f"every 4th frame, {HEIGHT} x {WIDTH} pixels, last {HELD_OUT:.0%} held out",
    }
    weights = {name: x.to(torch.bfloat16).contiguous() for name, x in model.state_dict().items()}
    save_file(weights, file, header)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--footage", type=Path, default=Path("runs/atari.npz"))
    parser.add_argument("--pictures", type=int, default=4000, help="a game, when the footage is made")
    parser.add_argument("--minutes", type=float, default=6.0, help="training stops and saves after so long")
    parser.add_argument("--steps", type=int, default=0, help="or after so many steps, if not 0")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--frames", type=int, default=FRAMES)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--ema", type=float, default=0.998)
    parser.add_argument("--shift", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--every", type=int, default=50, help="steps between log lines; ten of them between validations"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile the blocks")
    parser.add_argument("--model", type=json.loads, default={}, help="JSON over tiny_wan.CONFIG, for small trials")
    parser.add_argument("--sampling-steps", type=int, default=50)
    options = parser.parse_args()
    from diffusers import WanTransformer3DModel

    options.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    frames = footage(options.footage, options.pictures).to(device)
    options.pictures = frames.shape[1]
    torch.manual_seed(options.seed)
    model: Any = WanTransformer3DModel(**{**CONFIG, **options.model})
    model, history = train(options, model.to(device).train(), frames)
    save(model, options.out / "wan_tiny.safetensors", options, history)
    (options.out / "history.json").write_text(json.dumps(history))
    shape = (options.frames, HEIGHT, WIDTH)
    for guidance in (1.0, 3.0):
        began = time.monotonic()
        made = tiny_wan.generate(
            tiny_wan.pipeline(model), GAMES, range(len(GAMES)), steps=options.sampling_steps, guidance=guidance,
            shape=shape,
        )  # fmt: skip
        print(f"{len(GAMES)} samples at guidance {guidance:g}: {time.monotonic() - began:.1f} s", flush=True)
        sheet(tiny_wan.to_clips(made), options.out / f"samples_guidance{guidance:g}.png")
    print(f"{options.out / 'wan_tiny.safetensors'}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
