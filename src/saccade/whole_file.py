"""Files that are replaced whole or not at all: a full disk, a crash or a reader in between sees the old one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from .errors import OutputError


def replace_text(path: str | Path, text: str, what: str = "") -> None:
    """Write `text` beside the file, in full and to the disk, and put it in the file's place.

    Args:
        what: the kind of file, for messages.

    Raises:
        OutputError: if it cannot be written; the file is as it was and nothing is left beside it.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
    except OSError as error:
        name = f"{what} {str(path)!r}".lstrip()
        raise OutputError(f"{name} cannot be written: {error.strerror or error}") from error
