"""Python as a tree."""

from __future__ import annotations

import ast
import gc


def parsed(source: str) -> ast.Module:
    """With no garbage collected meanwhile: a finalizer that fails is reported with its traceback.

    That parses a line of it, and CPython 3.11 ends a parse within another in a SystemError.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collecting:
            gc.enable()
