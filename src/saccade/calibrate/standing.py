"""What is known of the candidates in the middle of a tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Standing:
    """Answers as they come; nobody stands there before the first question is asked.

    Attributes:
        families: specs of every family, most expensive first.
        records: of the ledger, which grows.
    """

    families: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    records: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """A row per candidate: `n` questions, and the `ratio` of its right answers to dense attention's to the same."""
        right: dict[str, dict[int, list[int]]] = {}
        for record in self.records.values():
            right.setdefault(record["spec"], {})[record["problem"]] = record["right"]
        dense, rows = right.get("dense", {}), []
        for family, specs in self.families.items():
            for spec in specs:
                own = {number: marks for number, marks in right.get(spec, {}).items() if number in dense}
                best = sum(sum(dense[number]) for number in own)
                ratio = sum(map(sum, own.values())) / best if best else None
                rows.append({"family": family, "spec": spec, "n": sum(map(len, own.values())), "ratio": ratio})
        return rows
