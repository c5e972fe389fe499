"""What a long run shows: a table and a bar where somebody watches, and nothing of them in a file or a pipe."""

import io
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.table import Table

from saccade.cli import terminal
from saccade.cli.terminal import progress, until_stopped
from saccade.report.table import new_table


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    """A terminal of 100 columns and 40 lines on both outputs; what it is sent.

    No fixture: pytest sets both outputs again when a test's setup is over.
    """
    fake = FakeTerminal()
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100"), ("LINES", "40")):
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdout", fake)
    monkeypatch.setattr(sys, "stderr", fake)
    return fake


def shown(screen: FakeTerminal) -> str:
    """What stood on the screen, one picture below another."""
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", screen.getvalue())


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(terminal, "monotonic", lambda: self.now)


class Counted:
    """A job of three answers, and the table of those that are there."""

    units = 3

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.done, self.made = 0, 0
        self._clock, self._seconds = clock, seconds

    def run(self, advance: Callable[[str], None]) -> None:
        for _ in range(self.units):
            self.done += 1
            self._clock.now += self._seconds
            advance("a policy with a name of far more than the columns that it gets")

    def table(self) -> Table:
        self.made += 1
        table = new_table("so far", ("policy", "right"), ("policy",))
        table.add_row("quest", f"{self.done}/3")
        return table

    def keep(self, complete: bool) -> dict[str, Any]:
        return {"complete": complete, "done": self.done}


def test_a_terminal_shows_the_table_the_bar_and_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal_of(monkeypatch)
    work = Counted(Clock(monkeypatch), seconds=2.0)
    assert until_stopped(work, work.keep, work.table) == {"complete": True, "done": 3}
    said = shown(screen)
    assert "quest     3/3" in said and "so far" in said
    assert "3/3" in said and "left" in said and "━" in said
    # Names that are too long leave the bar where it is.
    assert "a policy with a name of far more th…" in said
    assert max(map(len, said.replace("\r", "\n").splitlines())) <= 100
    # What was shown is taken away again: the cursor goes up over every line of it, and lines are erased.
    assert screen.getvalue().rstrip("\x1b[?25h").endswith("\x1b[1A\x1b[2K")


@pytest.mark.parametrize(("seconds", "made"), [(0.1, 1), (0.5, 2), (2.0, 4)])
def test_a_table_is_made_anew_once_a_second_at_most(seconds: float, made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal_of(monkeypatch)
    work = Counted(Clock(monkeypatch), seconds)
    until_stopped(work, work.keep, work.table)
    assert work.made == made


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_elsewhere_nothing_is_shown_and_no_table_made(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe on either side is enough: `saccade compare > table.txt` is nobody's terminal."""
    screen, pipe = terminal_of(monkeypatch), io.StringIO()
    monkeypatch.setattr(sys, stream, pipe)
    work = Counted(Clock(monkeypatch), seconds=2.0)
    assert until_stopped(work, work.keep, work.table)["complete"]
    assert (screen.getvalue(), pipe.getvalue(), work.made) == ("", "", 0)


def test_without_a_table_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal_of(monkeypatch)
    with progress(2) as advance:
        advance("half")
    assert "half" in shown(screen) and "1/2" in shown(screen)
