"""The command group: every error the package raises on purpose is one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from ..errors import SaccadeError

INTERRUPTED = 130
_USAGE_ERROR = typer.BadParameter.__mro__[1]
"""Base of typer's own errors; typer does not export it, and it has moved between versions."""


class OneLineErrors(TyperGroup):
    """A group whose usage errors look like all other errors."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        """Parse and run; see `click.Command.main`."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **kwargs)
        try:
            sys.exit(super().main(*args, standalone_mode=False, **kwargs))
        except SaccadeError as error:
            _fail(str(error), 2)
        except _USAGE_ERROR as error:
            _fail(str(getattr(error, "format_message", error.__str__)()), 2)
        except (KeyboardInterrupt, typer.Abort):
            _fail("interrupted", INTERRUPTED)


def _fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"saccade: error: {' '.join(message.split())}\n")
    sys.exit(code)
