"""Which foveate this is: the one place of its number, and the revision of a checkout."""

import subprocess
from pathlib import Path

__version__ = "0.1.0.dev0"  # pyproject.toml reads it here


def described() -> str:
    """The version, and for a git checkout its revision, with a + where the package's files differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        if not git("ls-files", "version.py"):  # installed, perhaps into a folder of somebody else's checkout
            return f"foveate {__version__}"
        changed = "+" if git("status", "--porcelain", ".") else ""
        return f"foveate {__version__}, revision {git('rev-parse', '--short', 'HEAD')}{changed}"
    except (OSError, subprocess.SubprocessError):
        return f"foveate {__version__}"
