"""Versions of libraries: the oldest that run, as `pyproject.toml` has them, those that were tried, and their names."""

import inspect
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

LEAST = {"torch": (2, 6), "transformers": (4, 57)}
TRIED = {"torch": ("2.13", "2.14"), "transformers": ("4.57", "5.19", "5.24")}
FORMER = "past_key_values"  # what transformers called the cache before 5.24, and callers may still say


def cache_argument(module: Any) -> str:
    """What a model or its decoder calls the cache that it takes and returns."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else FORMER


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
