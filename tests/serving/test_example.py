"""`examples/serve.py` as a user runs it: a server of its own, an answer from the official client, and the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
from server import OURS_ALONE, START_SECONDS

from walking import walk

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve.py"


@walk
def test_the_server_answers_sparsely_and_densely_and_ends(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in OURS_ALONE}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=START_SECONDS,
        check=False,
    )
    log = tmp_path / "server.log"
    assert done.returncode == 0, done.stderr + log.read_text(encoding="utf-8", errors="replace")
    assert "\nsaccade on: 4821\nsaccade off: 4821\nthe server has ended with status 0\n" in done.stdout
    assert "policy   tidal:budget=256,reselect=7" in log.read_text(encoding="utf-8", errors="replace")
    assert [child.cmdline() for child in psutil.Process().children() if "serve" in child.cmdline()] == []
