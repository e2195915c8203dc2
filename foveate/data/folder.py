"""A folder as sound clips with labels or captions, and which of them are held out for validation."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from foveate.data import captions, index
from foveate.data.files import File, Skip, walk, without
from foveate.video import Clip

Identity = tuple[int, int]


@dataclass(frozen=True)
class Folder:
    """Sound clips at their full size, each with its file's identity; class names; what was passed over and why."""

    clips: list[Clip]
    identities: list[Identity]
    classes: tuple[str, ...]
    skipped: list[Skip]
    quiet: list[Skip]


def read(
    root: Path,
    *,
    exclude: Sequence[str] = (),
    leave_out: Sequence[Path] = (),
    classes: Sequence[str] | None = None,
    table: Path | None = None,
) -> Folder:
    """What `root` holds. `exclude` are names, `leave_out` folders whose files are left out wherever they are met.
    `table` is a file of names and captions (`captions.read`), in place of captions.jsonl.

    Raises ValueError when `root` is no folder, or its captions or class folders do not serve.
    """
    files, folders, skipped, quiet = _files(root, table)
    for other in leave_out:
        if root.resolve().is_relative_to(other.resolve()):
            raise ValueError(f"{root} lies in {other}, whose files are not to be trained on; give another folder")
        inside = {file.identity for file in _files(other)[0]} if other.is_dir() else set()
        kept = without(files, inside)
        if len(kept) < len(files):
            quiet.append((str(other), f"{len(files) - len(kept)} files left out, because they lie there, too"))
        files = kept
        folders = [name for name in folders if not (other.is_dir() and (root / name).samefile(other))]
    files = [file for file in files if file.name not in exclude]
    measured = index.measure(root, files)
    pairs = [(file, clip) for file, clip in zip(files, measured, strict=True) if isinstance(clip, Clip)]
    skipped += [(file.name, clip) for file, clip in zip(files, measured, strict=True) if isinstance(clip, str)]
    if table is None and not os.path.lexists(root / captions.CAPTIONS):
        pairs, found, more = _classes(pairs, folders, classes)
        skipped += more
    else:
        found = ()
    return Folder([clip for _, clip in pairs], [file.identity for file, _ in pairs], found, skipped, quiet)


def _files(root: Path, table: Path | None = None) -> tuple[list[File], list[str], list[Skip], list[Skip]]:
    """The files that a folder names as clips, its folders, and what its layout already rules out."""
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; give a folder of video files")
    listing = walk(root)
    if table is None and not os.path.lexists(root / captions.CAPTIONS):
        return listing.files, listing.folders, listing.skipped, listing.quiet
    files, skipped = captions.read(root, listing, table)
    return files, listing.folders, listing.skipped + skipped, listing.quiet


def _classes(
    pairs: list[tuple[File, Clip]], folders: list[str], known: Sequence[str] | None
) -> tuple[list[tuple[File, Clip]], tuple[str, ...], list[Skip]]:
    """Labels by top folder, if any folder holds a video; then files beside the folders have no class."""
    filled = {clip.name.partition("/")[0] for _, clip in pairs if "/" in clip.name}
    if known and not filled:
        raise ValueError(f"the clips to validate with need the class folders of training: {', '.join(known)}")
    kind = "class folder" if filled else "folder"
    skipped = [(name, f"{kind} without video files") for name in folders if name not in filled]
    if not filled:
        return pairs, (), skipped
    names = tuple(sorted(folders) if known is None else known)
    label = {name: number for number, name in enumerate(names)}
    kept = []
    for file, clip in pairs:
        top, inside, _ = clip.name.partition("/")
        if not inside:
            skipped.append((clip.name, "lies beside class folders, so it has no class"))
        elif top in label:
            kept.append((file, clip._replace(label=label[top])))
        else:
            skipped.append((clip.name, f"training has no class {top}"))
    return kept, names, skipped


def whole_clips(clips: Sequence[Clip], identities: Sequence[Identity], fraction: float) -> Collection[int]:
    """Places of the clips held out, `fraction` of them, alike from each class; all links to one file together.

    A function of names alone, in an order that looks random: it does not depend on how a run cuts its samples, and a
    clip that is added moves few others.
    """
    groups: defaultdict[Identity, list[int]] = defaultdict(list)
    for place, identity in enumerate(identities):
        groups[identity].append(place)
    classes: defaultdict[int, list[tuple[bytes, list[int]]]] = defaultdict(list)
    for group in groups.values():
        first = clips[group[0]]
        digest = hashlib.blake2b(first.name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        classes[first.label].append((digest, group))
    ranked = [
        ((rank + 0.5) / len(inside), digest, group)
        for inside in classes.values()
        for rank, (digest, group) in enumerate(sorted(inside))
    ]
    held = sorted(ranked)[: int(len(groups) * fraction + 1e-9)]
    return {place for *_, group in held for place in group}
