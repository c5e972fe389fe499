"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from . import figures
from .wording import COLUMNS, Row, grouped, lengths


def comparison_page(results: Mapping[str, Any], gazes: Sequence[Row], samples: Sequence[Row]) -> str:
    """A comparison as HTML: content of `results.json`, lines of `gaze.jsonl` and of `samples.jsonl`."""
    rows = results["rows"]
    loader = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("page.html")
    return template.render(
        complete=results["complete"],
        environment=results["environment"],
        notes=results["notes"],
        lengths=lengths(results["environment"]["context_tokens"]),
        columns=COLUMNS,
        rows=[[cell(row) for cell in COLUMNS.values()] for row in rows],
        labels=[row["label"] for row in rows],
        accuracy=figures.accuracy_against_budget(rows),
        recall=figures.recalls_per_layer(rows),
        overflowed=[(row["spec"], row["overflow"]) for row in rows if row["overflow"]],
        indexes=[row for row in rows if row["index_bytes"]],
        gaze=figures.gaze_maps(rows, gazes) if gazes else None,
        examples=_examples(samples),
    )


def _examples(samples: Sequence[Row], count: int = 6) -> list[dict[str, Any]]:
    """A few questions with the answer under every policy, those on which policies differ first."""
    questions = grouped(samples, lambda sample: (sample["context"], sample["question"]))
    # Those whose answers are partly right and partly wrong.
    differing = sorted(questions.values(), key=lambda asked: len({one["correct"] for one in asked}), reverse=True)
    return [
        {"question": answers[0]["question"], "expected": answers[0]["expected"], "answers": answers}
        for answers in differing[:count]
    ]
