"""Counts what the house is measured by: `make house`. tests/test_architecture.py holds it to the limits."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_architecture import ARROWS, MEASURING, PACKAGE, broken_arrows, circles, modules, room
from test_packaging import project


def main() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    loose = list(PACKAGE.glob("*.py"))
    measuring = sum(length for path, length in lines.items() if path.relative_to(PACKAGE).parts[0] in MEASURING)
    dependencies = project()["project"]["dependencies"]
    counts = {
        "loose files": (len(loose), "6"),
        "rooms": (len({room(name) for name in modules(PACKAGE)} - {PACKAGE.name}), "about 20"),
        "rows of the import table": (len(ARROWS), "18 and adapters.vllm"),
        "imports against the table": (len(broken_arrows(PACKAGE)), "0"),
        "files that import in a circle": (len(circles(PACKAGE)), "0"),
        "lines of Python in src": (sum(lines.values()), "24,000"),
        "of them measuring": (measuring, "7,500"),
        "longest file outside kernels": (max(n for path, n in lines.items() if "kernels" not in path.parts), "400"),
        "hard dependencies": (len(dependencies), "6"),
    }
    for name, (count, most) in counts.items():
        print(f"{name:<32}{count:>8,}   at most {most}")


if __name__ == "__main__":
    main()
