"""Counts what the house is measured by: `make house`. tests/test_house.py holds it to the limits."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[2])]
sys.path.insert(0, str(Path(__file__).parents[1]))

from limits import limit
from test_house import house


def main() -> None:
    for name, count in house().items():
        print(f"{name:<48}{count:>8,}   at most {limit(name):,}")


if __name__ == "__main__":
    main()
