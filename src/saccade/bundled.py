"""Where the model that comes with this package lies; `testbed` makes it, everything else only reads it."""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """The folder of the bundled model, in the standard Hugging Face format."""
    return Path(__file__).parent / "testbed" / "model"


RESELECT = 7
"""The bundled model's re-selection layer, found on other contexts than the demo's (`docs/performance.md`)."""


def default_spec(*, bundled: bool) -> str:
    """The policy that decodes where one is needed and the user names none."""
    return f"less_is_more:reselect={RESELECT}" if bundled else "less_is_more"
