"""The trial in docs/calibration.md, made from its file."""

from collections.abc import Sequence
from statistics import fmean

from lab.markdown import table
from saccade.report.wording import grouped

from ..judging.results import slug
from ..stored import stored
from .published import CODE
from .scaled import SHARE
from .table import Results
from .variants import DIRECT_SHARE, VARIANTS

PICTURE = "gates.svg"
"""In docs/images."""

WANTED: Results = {
    "runs": [{"variant": SHARE}, {"variant": DIRECT_SHARE}, {"variant": CODE}],
    "steps": 2000, "lengths": [1024, 6144], "task": "kv", "dtype": "bfloat16",
}  # fmt: skip
"""How gates of another model than the bundled one are to be trained, as a file says it."""


def file_of(model: str | None) -> str:
    """What the file of a model's gates in docs/results is called, None: of the bundled one."""
    return "gates" if model is None else f"gates_{slug(model)}"


def command(trial: Results, model: str | None = None) -> str:
    """What makes the file of a model, None: of the bundled one."""
    variants, name = ",".join(dict.fromkeys(run["variant"] for run in trial["runs"])), file_of(model)
    same = more = ""
    if model is not None:
        same = f" --model {model} --dtype {trial['dtype']}"
        shortest, longest = trial["lengths"]
        more = f" --steps {trial['steps']} --lengths {shortest},{longest} --task {trial['task']}"
    file, apart = f"results/{name}/gates.json", f" --output-dir results/{name}" if same else ""
    train = f"python -m claims gates{same} --device cuda --variants {variants}{more}{apart}"
    asked, kept = (f"{apart}/roles", f"/{name}.json") if same else ("", "")
    return f"{train} && python -m claims roles {file}{same}{asked} && cp {file} docs/results{kept}"


def made(model: str) -> tuple[str, str]:
    """The file of a published model's gates, and what makes it."""
    return file_of(model), command(WANTED, model)


def section(results: Results, model: str | None = None) -> list[str]:
    """Markdown: where each variant has ended, over its seeds, and the answers that its roles keep."""
    file = file_of(model)
    budgets = results["answers"]["budgets"] if "answers" in results else []
    heads = ["gates", "scale", "expected open", "undecided", "above one half"]
    kept = ("those above one half", f"the best {results['target']}")
    heads += [f"right, {roles}, budget {budget}" for roles in kept for budget in budgets]
    body, steps = list[list[str]](), f"{results['steps']:,} steps"
    for name, runs in grouped(results["runs"], lambda run: str(run["variant"])).items():
        cells = [VARIANTS[name].kind, VARIANTS[name].scale, _between([run["expected_l0"] for run in runs], "{:.1f}")]
        cells += [_between([run["grey"] for run in runs], "{:.0%}"), _between([run["open"] for run in runs], "{}")]
        for roles in ("threshold", "exact"):
            cells += [_right(results, name, roles, budget) for budget in budgets]
        body.append(cells)
        if any(run["step"] < results["steps"] for run in runs):
            steps += f", {name} cut off at {_between([run['step'] for run in runs], '{:,}')}"
    own, heads_each = results["environment"], results["kv_heads"]
    told = f"{results['target']} gates of {len(results['layers']) * heads_each} wanted open beside the first layer's "
    told += f"{heads_each}, {steps}, {results['seeds']} seeds, least to most. {own['device']}, {own['dtype']}, torch "
    told += f"{own['versions']['torch']}, {own['date'][:10]}. `{command(results, model)}` "
    told += f"([{file}.json](results/{stored(f'{file}.json').name}))"
    image = ["", f"![Expected open gates, multiplier and loss over the steps of each training](images/{PICTURE})"]
    return [*table(heads, body, heads[:2]), "", told, *(image if model is None else [])]


def _between(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _right(results: Results, variant: str, roles: str, budget: int) -> str:
    """Share of right answers, all seeds together."""
    wanted = (variant, roles, budget)
    rows = [row for row in results["answers"]["rows"] if (row["variant"], row["roles"], row["budget"]) == wanted]
    return f"{fmean(right for row in rows for right in row['right']):.3f}" if rows else "–"
