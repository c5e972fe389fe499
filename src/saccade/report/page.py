"""Pages: one HTML file each that needs nothing else, made of a results folder's files alone."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..errors import OutputError
from ..eval.output import GAZE, REPORT, RESULTS, SAMPLES, read_json
from ..files import replace_text
from . import figures
from .labels import labelled
from .palette import SHADES
from .tune import RATIOS, WORDS, front_columns, front_notes, front_pictures, front_rows, front_title
from .wording import COLUMNS, Row, grouped, lengths, with_terms

ABOUT = "model", "weights", "read", "texts_of", "context", "questions", "dtype"
"""What a tuning says of itself beside its environment."""


def comparison_report(folder: Path) -> Path:
    """Make the page of a comparison again from what its folder holds; gives the page's path.

    Raises:
        OutputError: it cannot be written, or the folder does not hold all that it is made of.
    """
    for name in (RESULTS, GAZE, SAMPLES):
        if not (folder / name).is_file():
            raise OutputError(f"{str(folder)!r} holds no {name}, of which its report is made")
    lines = ((folder / name).read_text(encoding="utf-8").splitlines() for name in (GAZE, SAMPLES))
    gazes, samples = ([json.loads(line) for line in records] for records in lines)
    replace_text(folder / REPORT, comparison_page(read_json(folder / RESULTS), gazes, samples))
    return folder / REPORT


def comparison_page(results: Mapping[str, Any], gazes: Sequence[Row], samples: Sequence[Row]) -> str:
    """A comparison as HTML: content of `results.json`, lines of `gaze.jsonl` and of `samples.jsonl`."""
    rows = labelled(results)
    looks = grouped(gazes, lambda gaze: str(gaze["spec"]))
    seen = [row for row in rows if row["spec"] in looks]
    return _page(
        "comparison.html",
        rows,
        **{name: results[name] for name in ("complete", "environment", "notes")},
        lengths=lengths(results["environment"]["context_tokens"]),
        columns=with_terms(COLUMNS, rows, "share of cache"),
        accuracy=figures.accuracy(rows),
        times=figures.times(rows),
        recalls=[figures.recalls(rows, measure) for measure in ("recall", "token_recall")],
        indexes=[row for row in rows if row["index_bytes"]],
        gaze_bar=figures.gaze_bar(),
        gazes=[(row, figures.gazes(looks[row["spec"]], f"gaze-{n}")) for n, row in enumerate(seen)],
        examples=_examples(samples, {row["spec"]: row for row in rows}),
    )


def tune_page(results: Mapping[str, Any]) -> str:
    """A tuning as HTML: content of `tune.json`."""
    rows = front_rows(results)
    return _page(
        "tune.html",
        rows,
        about=front_title(results),
        environment={name: results[name] for name in ABOUT if name in results} | results["environment"],
        ratio=RATIOS[results["measure"]],
        wanted=results["wanted"],
        chosen=next((row for row in rows if row["chosen"]), None),
        columns=front_columns(results),
        words=WORDS,
        notes=front_notes(results),
        pictures=front_pictures(results),
    )


def _page(template: str, rows: Sequence[Row], **content: Any) -> str:
    """A page about rows with labels; what those stand for is among what it says."""
    loader = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(template)
    meanings = {row["label"]: row["family"] for row in rows if row["label"] != row["family"]}
    return page.render(shades=SHADES, rows=rows, meanings=meanings, **content)


def _examples(samples: Sequence[Row], rows: Mapping[str, Row], count: int = 6) -> list[dict[str, Any]]:
    """A few questions with the answer under every policy, those on which policies differ first."""
    questions = grouped(samples, lambda sample: (sample["context"], sample["question"]))
    # Those whose answers are partly right and partly wrong.
    differing = sorted(questions.values(), key=lambda asked: len({one["correct"] for one in asked}), reverse=True)
    return [
        {**answers[0], "answers": [(answer, rows[answer["spec"]]) for answer in answers]}
        for answers in differing[:count]
    ]
