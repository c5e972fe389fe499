"""Files of a model: in its folder, or by hub id in transformers' cache."""

import re
from pathlib import Path

from transformers.utils.hub import cached_file

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
WEIGHTS = "model.safetensors"
SHARDS = "model.safetensors.index.json"


def find(model: str, name: str, *, download: bool = False) -> Path | None:
    """A file of a model, a folder or a hub id; None if it is not there, or no network to look.

    `download`: fetch it from the hub if it is not in the cache.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    if not HUB_ID.fullmatch(model):
        return None
    try:
        found = cached_file(model, name, local_files_only=not download)
    except (OSError, ValueError):  # whatever the hub, the network or the name have against it
        return None
    return None if found is None else Path(found)
