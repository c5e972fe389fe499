"""Which software made a result."""

from __future__ import annotations

import platform
from importlib.metadata import version

from . import __version__


def versions(*packages: str) -> dict[str, str]:
    """Versions of saccade, Python, torch, transformers and further packages."""
    found = {name: version(name) for name in ("torch", "transformers", *packages)}
    return {"saccade": __version__, "python": platform.python_version(), **found}
