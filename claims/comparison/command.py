"""`python -m claims compare`: which method at an equal budget, on a model that people know."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from saccade.cli.options import Device, Dtype, JsonFile, Model, Seed, count, words


def compare(
    model: Model = None,
    budgets: Annotated[str, words("N,N", "Budgets in tokens, each enough for every method.")] = "256,1024",
    context: Annotated[int, count("Length of the texts in tokens.")] = 8192,
    texts: Annotated[int, count("Texts that share no token.")] = 40,
    asked: Annotated[int, count("Questions about each, at most as many as its facts.")] = 12,
    task: Annotated[str, words("NAME", "How facts are stated: kv, several, listing, records or passkey.")] = "kv",
    methods: Annotated[str | None, words("NAME,NAME", "Methods beside dense and quest. Default: all.")] = None,
    plain: Annotated[int, count("Texts of code, and of prose, whose next tokens are judged; 0: none.", 0)] = 8,
    output_dir: Annotated[Path, words("DIR", "Folder; an interrupted run goes on there.")] = Path("results/compared"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Annotated[int, count("CPU threads of decoding.", maximum=1024)] = 1,
    seed: Seed = 20,
    json: JsonFile = None,
) -> None:
    """Ask every method the same questions about the same texts, at equal budgets.

    Texts are sources of installed packages with facts hidden in them. Layers and roles are those of the recipe beside
    the model: calibrate first. You get a table: right answers with a 95% interval over texts, those less Quest's at the
    same budget, by how much the loss of 128 next tokens of plain texts as long is above dense attention's, and what a
    step reads of the cache, its index included.

    Example:

      python -m claims compare --model ./Qwen2.5-Coder-1.5B --budgets 256,1024 --json compared.json
    """
    # Imported here, so that --help and a mistyped option do not wait for torch.
    from saccade.cli.terminal import progress, quiet_libraries, show
    from saccade.eval.entry import parse_budgets
    from saccade.eval.output import check_file, check_folder, write_json
    from saccade.report.table import new_table

    from ..designs.questions import Questions
    from ..judging.study import Study
    from .page import PAIRED
    from .rows import arms_of, check, plain_texts, rows_of

    quiet_libraries()
    study = Study(model, output_dir, device, dtype, threads)
    sizes = parse_budgets(budgets)
    named = methods.split(",") if methods else []
    check(study, sizes, context, task, asked, plain, named)
    arms = arms_of(study, sizes, context, named)
    asking = Questions(tuple(arms), task, (context, context), texts, asked, seed=seed)
    going_on = plain_texts(arms, context, plain, seed)
    units = asking.units(study)  # which makes every policy: what one refuses is told before a file is touched
    units += 0 if going_on is None else going_on.units(study)
    check_folder(output_dir / "plain" if plain else output_dir)
    if json is not None:
        check_file(json)
    with progress(units) as advance:
        answers = asking.run(study, advance)
        decoded = () if going_on is None else going_on.run(study.inside("plain"), advance)
    rows = rows_of(study, asking, arms, answers, decoded)
    results: dict[str, Any] = {"task": task, "context": context, "rows": rows, "environment": asking.conditions(study)}
    if json is not None:
        write_json(json, results, indent=None)
    table = new_table(
        f"right of {rows[0]['n']} answers in {rows[0]['texts']} texts of {context:,} tokens",
        ("policy", "right", "95% interval", "minus quest", "95% interval", "loss above dense", "95% interval", "read"),
        words=("policy",),
    )
    for row in rows:
        paired = [cell for name in PAIRED for cell in _pair(row, name)]
        cells = (f"{row['right']:.3f}", _interval(row["interval"], ""), *paired, f"{row['cache_read']:.1%}")
        table.add_row(row["spec"], *cells)
    show(table)


def _pair(row: Mapping[str, Any], name: str) -> tuple[str, str]:
    return (f"{row[name]:+.3f}", _interval(row[f"{name}_interval"])) if name in row else ("", "")


def _interval(ends: tuple[float, float] | None, sign: str = "+") -> str:
    return "" if ends is None else " to ".join(f"{end:{sign}.3f}" for end in ends)
