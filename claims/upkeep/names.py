"""Names of what is compared, for a help text that does not wait for torch."""

from __future__ import annotations

ALL = (
    "lazy",
    "lazy/position",
    "lazy/query",
    "replanted",
    "replanted/position",
    "replanted/query",
    "rebuilt",
    "rebuilt-whole",
    "streaming",
    "quest",
)
