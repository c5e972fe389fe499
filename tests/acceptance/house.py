"""Counts what the house is measured by: `make house`. tests/test_architecture.py holds it to the limits."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_architecture import LIMITS, house


def main() -> None:
    for name, count in house().items():
        print(f"{name:<48}{count:>8,}   at most {LIMITS[name]:,}")


if __name__ == "__main__":
    main()
