"""Every part of vLLM that this plugin relies on, checked at start-up: one clear line when something has moved."""

from __future__ import annotations

VERSION = "0.32"


def check_interfaces() -> None:
    """Raise unless this is the vLLM that the plugin was written for.

    Raises:
        ServingError: naming what is missing.
    """
