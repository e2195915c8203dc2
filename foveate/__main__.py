"""`python -m foveate`, and the `foveate` command."""

import sys


def main() -> None:
    """The command line; exit code 2 and the command to type where its packages are not installed."""
    try:
        from foveate.cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "foveate":
            raise
        print(f"foveate: the command line needs {error.name}: pip install 'foveate[cli]'", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
