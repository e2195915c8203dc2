"""Flags from a file: `--config run.yaml` beside flags, which win."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parent / "assets" / "recipes"


def known(arguments: Sequence[str], **defaults: Any) -> argparse.Namespace:
    """These flags alone, as text (or whether they are given, where the default is a bool), before all are parsed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, default in defaults.items():
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", default=default)
    try:
        return parser.parse_known_args(list(arguments))[0]
    except argparse.ArgumentError:  # a flag without its value: the parser of all flags says so
        return argparse.Namespace(**defaults)


def expand(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, with those of its `--config` file (YAML or JSON) before them, where there is one.

    A key of the file is a flag without its dashes; it may hold a mapping (model: {width: 128}), and `_` and `-` are
    one. Flags that are also given by hand are left out. ValueError for a file that holds no flags; a key that is no
    flag is left to the parser of flags.
    """
    file = _file(arguments)
    if file is None:
        return list(arguments)
    file = _found(file)
    given = {_plain(item.partition("=")[0]) for item in arguments if item.startswith("--")}
    tokens = []
    for key, value in _flat(_read(file)):
        flag = "--" + _plain(key)
        if flag == "--config":
            raise ValueError(f"{file} names another file by `config`; one file is read")
        if not {flag, _negated(flag)} & given:
            tokens += _tokens(flag, value)
    return [*tokens, *arguments]


def _file(arguments: Sequence[str]) -> Path | None:
    for place, item in enumerate(arguments):
        if item.startswith("--config="):
            return Path(item.partition("=")[2])
        if item == "--config" and place + 1 < len(arguments):
            return Path(arguments[place + 1])
    return None


def _found(file: Path) -> Path:
    """The file itself, or the recipe of this package that has this name."""
    own = RECIPES / f"{file.name.removesuffix('.yaml')}.yaml"
    if file.exists() or file.name != str(file):
        return file
    if not own.is_file():
        known = ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))
        raise ValueError(f"there is no file {file}, nor a recipe of that name; recipes are {known}")
    return own


def _read(file: Path) -> Mapping[str, Any]:
    text = file.read_text(encoding="utf-8")
    try:
        if file.suffix == ".json":
            found = json.loads(text)
        else:
            import yaml

            found = yaml.safe_load(text)
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{file} must hold flags and their values, such as `steps: 1000`")
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _tokens(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else _negated(flag)]
    return [flag, *map(str, value if isinstance(value, list) else [value])]


def _negated(flag: str) -> str:
    """--no-sparse, --sparsity.no-force."""
    inside, dot, name = flag[2:].rpartition(".")
    return f"--{inside}{dot}no-{name}"


def _plain(flag: str) -> str:
    return flag.replace("_", "-")
