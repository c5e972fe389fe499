"""The oldest libraries that the package runs with; `pyproject.toml` says the same, but may not have been asked."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from ..errors import SaccadeError

LEAST = {"torch": (2, 6), "transformers": (4, 57)}


def outdated() -> str | None:
    """What is too old and how to mend it, in one line; None if nothing is. Imports neither library."""
    for name, least in LEAST.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue  # its import says so
        if tuple(map(int, re.findall(r"\d+", found)[:2])) < least:
            wanted = f"{name}>={'.'.join(map(str, least))}"
            return f'{name} {found} is too old for saccade: pip install "{wanted}"'
    return None


def refuse_outdated() -> None:
    """Raise a SaccadeError if a library is too old."""
    old = outdated()
    if old is not None:
        raise SaccadeError(old)
