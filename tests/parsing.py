"""Python as a tree, with no garbage collected meanwhile: CPython 3.11 ends a parse within another in a SystemError.

A finalizer that fails is reported with its traceback, of which a line is parsed too.
"""

import ast
import gc


def parsed(source: str) -> ast.Module:
    collecting = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collecting:
            gc.enable()
