"""In which commit criteria stood: a claim is judged by what was written down before."""

import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from saccade.errors import SaccadeError


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit and when it was made, in ISO's form and UTC."""

    name: str
    date: str


def criteria_commit(file: Path, *beside: Path) -> Commit:
    """The last commit that changed a claim's file or what lies `beside` it, all of which is as it was there.

    Raises:
        SaccadeError: the file is not committed, or this is no git checkout.
    """
    said = "its criteria must be committed before it runs; --draft runs it all the same, and never enters the ledger"
    paths = [str(path) for path in (file, *beside)]
    changed = _git(file, "status", "--porcelain", "--", *paths)
    if changed:
        raise SaccadeError(f"{changed.split()[-1]} differs from its last commit: {said}")
    name, _, seconds = _git(file, "log", "-1", "--format=%H %ct", "--", *paths).partition(" ")
    if not name:
        raise SaccadeError(f"{file.name} is in no commit: {said}")
    return Commit(name, datetime.fromtimestamp(int(seconds), timezone.utc).isoformat())


def _git(file: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=file.parent, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        raise SaccadeError(f"git does not know {str(file)!r}; --draft runs a claim all the same") from None
    return done.stdout.strip()
