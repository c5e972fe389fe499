"""Where the time of `.ci/run` goes: minutes by stage, and by file of tests. `make times`; `times.py LOG` reads a log.

Times of tests are summed over pytest's processes, so that a stage of two processes takes about half of its sum.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
STAGE = re.compile(r"stage: (.+)")
TOOK = re.compile(r"stage took (\d+) s: (.+)")
TEST = re.compile(r"([\d.]+)s (?:setup|call|teardown) +(\S+?)::")


def main(log: Path) -> None:
    stages, files, now = {}, {}, "?"
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if begins := STAGE.fullmatch(line):
            now = begins[1]
            files[now] = Counter[str]()
        elif took := TOOK.fullmatch(line):
            stages[took[2]] = int(took[1])
        elif test := TEST.match(line):
            files.setdefault(now, Counter())[test[2]] += float(test[1])
    table = Table("stage, and files of tests", "minutes", "share")
    whole = sum(stages.values()) or 1
    for stage, seconds in stages.items():
        table.add_row(stage, f"{seconds / 60:.1f}", f"{seconds / whole:.0%}", style="bold")
        for file, own in files.get(stage, Counter()).most_common(12):
            table.add_row(f"    {file}", f"{own / 60:.1f}", "")
    table.add_row("all", f"{whole / 60:.1f}", "", style="bold")
    Console(width=120).print(table)


def run(log: Path) -> int:
    """`.ci/run`, which tells its stages and every test that takes 5 ms and more."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as written:
        return subprocess.run(
            ["bash", str(ROOT / ".ci" / "run")],
            env={**os.environ, "PYTEST_ADDOPTS": "--durations=0"},
            stdout=written,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


if __name__ == "__main__":
    if len(sys.argv) > 1:
        raise SystemExit(main(Path(sys.argv[1])))
    status = run(ROOT / "results" / "times.log")
    main(ROOT / "results" / "times.log")
    raise SystemExit(status)
