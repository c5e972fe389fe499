"""Our docstrings say `a, b: what holds of both`; pages of the API, and the check of signatures, want a line each."""

import re
from typing import Any

import griffe

_JOINT = re.compile(r"^(?P<margin> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=margin) +\S.*)*)", re.M)


class JointNames(griffe.Extension):
    """Says the same of each name."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Rewrite the `Args` of a docstring before it is read."""
        if func.docstring is not None:
            func.docstring.value = _JOINT.sub(_apart, func.docstring.value)


def _apart(found: re.Match[str]) -> str:
    margin, names, text = found.group("margin", "names", "text")
    return "\n".join(f"{margin}{name}: {text}" for name in names.split(", "))
