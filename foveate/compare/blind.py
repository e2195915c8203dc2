"""A blind test of two folders: a page that shows pairs without names, a key that stays at home, and the count.

The page knows the two versions of a pair as x and y, drawn for each pair; which folder is x is written
into the key only. Order and sides are drawn in the page, anew for every reader.
"""

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foveate.compare.intervals import SHARE, at_least, of_share
from foveate.compare.page import read
from foveate.compare.pairs import find, labels
from foveate.report.film import films
from foveate.report.page import ROOM, environment, packing

PAGE, KEY = "blind.html", "blind_key.json"
MOST = 8  # clips of a page that is passed around
QUESTION = "Which one looks better?"
CHOICES = ("x", "y", "none")


def make(
    places: Sequence[Path], clips: int, seed: int, fit: bool, question: str = QUESTION
) -> tuple[str, dict[str, Any]]:
    """The page and its key, of at most `clips` pairs. Raises ValueError for other than two folders, or no pair."""
    if len(places) != 2:
        raise ValueError(f"a blind test is of two folders, got {len(places)}")
    pairs, _ = find(places, fit=fit)
    draw = np.random.default_rng(seed)
    chosen = sorted(draw.permutation(len(pairs))[:clips].tolist())
    names, test = labels(places), secrets.token_hex(4)
    key: dict[str, Any] = {
        "by": "foveate compare --blind", "test": test,
        "folders": [{"label": n, "path": str(p.absolute())} for n, p in zip(names, places, strict=True)], "pairs": {},
    }  # fmt: skip
    shown, lost = [], set()
    for number, place in enumerate(draw.permutation(chosen).tolist()):
        pair = pairs[place]
        videos = read(pair)
        packed = films(videos, int(ROOM / (2 * len(chosen))))
        lost.add(packing(videos[0], packed[0]))
        x = secrets.randbelow(2)  # not by the seed, which others may know
        sides = {"x": x, "y": 1 - x}
        shown.append((f"p{number}", [(side, packed[folder]) for side, folder in sides.items()]))
        key["pairs"][f"p{number}"] = {"name": pair.name} | {side: names[folder] for side, folder in sides.items()}
    text = (
        environment()
        .get_template("blind.html")
        .render(
            test=test,
            question=question,
            pairs=shown,
            fps=pairs[0].clips[0].fps,
            packing=" ".join(sorted(lost)),
            heat=16,
        )
    )
    return text, key


def count(files: Sequence[Path], key_file: Path | None) -> dict[str, Any]:
    """How often each folder was preferred, with the exact binomial interval, over the files that readers saved.

    The key is looked for beside the first file, where none is given. Raises ValueError for files that do not fit it.
    """
    key_file = key_file or files[0].parent / KEY
    if not key_file.is_file():
        raise ValueError(f"the key of the test is needed: {key_file} is not there; give it by --key")
    key = _read(key_file, "pairs")
    names = [one["label"] for one in key["folders"]]
    readers: dict[str, dict[str, Any]] = {}
    for file in files:
        found = _read(file, "answers")
        if found.get("test") != key["test"]:
            raise ValueError(f"{file} answers another test, {found.get('test')}; {key_file} is of {key['test']}")
        wrong = [
            one for one in found["answers"] if one.get("pair") not in key["pairs"] or one.get("choice") not in CHOICES
        ]
        if wrong:
            raise ValueError(f"{file} holds an answer that the test does not know: {wrong[0]}")
        readers[str(found.get("reader"))] = found  # one reader's later file replaces an earlier one
    pairs: dict[str, dict[str, int]] = {}
    total = dict.fromkeys((*names, "none"), 0)
    left = 0
    for found in readers.values():
        for one in found["answers"]:
            about = key["pairs"][one["pair"]]
            choice = about[one["choice"]] if one["choice"] != "none" else "none"
            total[choice] += 1
            left += one["choice"] == one.get("left")
            pairs.setdefault(about["name"], dict.fromkeys((*names, "none"), 0))[choice] += 1
    decided = total[names[0]] + total[names[1]]
    low, high = of_share(total[names[1]], decided) if decided else (0.0, 1.0)
    most = max(total[names[0]], total[names[1]])
    return {
        "by": "foveate compare --answers", "test": key["test"], "folders": names, "readers": len(readers),
        "answers": total, "pairs": pairs, "left": left,
        "preference": {
            "of": names[1], "share": total[names[1]] / decided if decided else None, "low": low, "high": high,
            "decided": decided, "p": min(1.0, 2 * at_least(most, decided)) if decided else 1.0,
        },
        "interval": SHARE,
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """What is printed."""
    first, second = found["folders"]
    one, answers = found["preference"], found["answers"]
    lines = [f"{found['readers']} reader{'s' if found['readers'] != 1 else ''}, {sum(answers.values())} answers"]
    said = {"no difference" if name == "none" else name: count for name, count in answers.items()}
    lines += [f"  {name:{max(map(len, said))}}  {count}" for name, count in said.items()]
    if one["share"] is None:
        return "\n".join([*lines, "Nobody saw a difference: there is no preference to count."])
    lines.append(
        f"{second} is preferred to {first} in {100 * one['share']:.0f} % of {one['decided']} decided answers; exact "
        f"binomial {100 * found['interval']:.0f} % interval {100 * one['low']:.0f} to {100 * one['high']:.0f} %; "
        f"p = {one['p']:.2g} if both were equally good"
    )
    lines.append(f"The left one was chosen {found['left']} times of {one['decided']}.")
    if found["readers"] > 1:
        lines.append("Answers of several readers to one clip are not independent: the interval is then too narrow.")
    return "\n".join(lines)


def _read(file: Path, part: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeError):
        found = None
    if not isinstance(found, dict) or found.get("by") != "foveate compare --blind" or part not in found:
        raise ValueError(f"{file} is no file of {part} by `foveate compare --blind`")
    return found
