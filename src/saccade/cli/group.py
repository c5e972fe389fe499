"""The command group: every error the package raises on purpose is one line on stderr and exit code 2."""

import re
import sys
from importlib.util import find_spec
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import SaccadeError, install

INTERRUPTED = 130
EVAL = ("numpy", "scipy", "matplotlib", "jinja2")
"""What the extra `[eval]` installs."""
_UsageError: Any = typer.BadParameter.__mro__[1]
"""Base of typer's own errors; typer does not export it, and it has moved between versions."""


class OneLineErrors(TyperGroup):
    """A group whose usage errors look like all other errors."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Parse, run and exit; see `click.Command.main`."""
        kwargs["standalone_mode"] = False
        try:
            sys.exit(super().main(*args, **kwargs))
        except SaccadeError as error:
            _fail(str(error), 2)
        except _UsageError as error:
            message = error.format_message()
            # A group without a command has shown its help, and has nothing to say.
            _fail(message, 2) if message.strip() else sys.exit(0)
        except (MemoryError, RuntimeError) as error:
            if not (isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error))):
                raise
            _fail(f"memory ran out; take a smaller context, batch or dtype ({str(error).partition('. ')[0]})", 2)
        except (KeyboardInterrupt, typer.Abort):
            _fail("interrupted", INTERRUPTED)


class NeedsEval(TyperCommand):
    """A command that judges or draws, which takes the extra `[eval]`."""

    def invoke(self, ctx: Any) -> Any:
        """Run, if everything is installed; see `click.Command.invoke`."""
        missing = [name for name in EVAL if find_spec(name) is None]
        if missing:
            what = "saccade" + ctx.command_path.removeprefix(ctx.find_root().command_path)
            raise SaccadeError(f"{what} needs {', '.join(missing)}: {install('eval')}")
        return super().invoke(ctx)


def _fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"saccade: error: {' '.join(message.split())}\n")
    sys.exit(code)
