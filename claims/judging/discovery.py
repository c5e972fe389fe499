"""All claims, found by their files: `claims/PAPER/cNUMBER_what.py`, each with a `CLAIM`."""

import re
from importlib import import_module
from pathlib import Path

from saccade.errors import SaccadeError, meant

from .claim import Listed

ROOT = Path(__file__).parents[1]
_FILE = re.compile(r"c(?P<number>\d+)(?P<part>[a-z]?)_\w+")


def found() -> dict[str, Listed]:
    """Every claim by its number, in their order: C1, C2, C3a."""
    claims = {}
    for path in sorted(ROOT.glob("*/c*_*.py"), key=_order):
        name = _FILE.fullmatch(path.stem)
        if name is not None:
            number = f"C{name['number']}{name['part']}"
            module = import_module(f"claims.{path.parent.name}.{path.stem}")
            claims[number] = Listed(number, path, module.CLAIM)
    return claims


def one(number: str) -> Listed:
    """The claim of a number, in letters of any case.

    Raises:
        SaccadeError: there is none.
    """
    claims = found()
    own = {name.lower(): claim for name, claim in claims.items()}
    if number.lower() not in own:
        raise SaccadeError(f"there is no claim {number!r}; there are {', '.join(claims)}{meant(number, claims)}")
    return own[number.lower()]


def _order(path: Path) -> tuple[int, str]:
    name = _FILE.fullmatch(path.stem)
    return (int(name["number"]), name["part"]) if name else (0, "")
