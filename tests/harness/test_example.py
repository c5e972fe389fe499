"""The example: short, and it runs as it stands."""

import os
import subprocess
import sys
from pathlib import Path

from walking import walk

EXAMPLE = Path(__file__).parents[2] / "examples" / "lm_eval.sh"


@walk
def test_the_example_runs_both_policies() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 60
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        [str(EXAMPLE)],
        env={**os.environ, "PATH": path, "LIMIT": "1"},
        **{"capture_output": True, "text": True, "check": False},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = [line for line in done.stdout.splitlines() if line.startswith("saccade ({'pretrained'")]
    assert ["'policy': 'dense'" in line for line in told] == [True, False]
    assert sum(line.startswith("|ruler_fwe") for line in done.stdout.splitlines()) == 2
