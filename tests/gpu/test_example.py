"""`examples/cuda_graph.py` as a user runs it, where there is a device."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "cuda_graph.py"


def test_a_graph_gives_the_tokens_of_calls(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "graph: ' 4821." in done.stdout
    assert "calls give the same 32 tokens: True" in done.stdout
