"""Where the model that comes with this package lies; `testbed` makes it, everything else only reads it."""

from pathlib import Path


def model_path() -> Path:
    """The folder of the bundled model, in the standard Hugging Face format."""
    return Path(__file__).parent / "model"
