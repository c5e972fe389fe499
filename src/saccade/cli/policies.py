"""`saccade policies`: what there is to choose from, and what it costs."""

from typing import Annotated, Any

from ..checkpoints.preset_sizes import PRESETS
from ..errors import SaccadeError
from .options import count, flag, number, words


def policies(
    cost: Annotated[
        bool, flag("--cost", "Print what a decoded token reads and writes instead, and what that allows.")
    ] = False,
    recipes: Annotated[bool, flag("--recipes", "List the papers' choices for single models instead.")] = False,
    model: Annotated[
        str | None,
        words(
            "NAME_OR_DIR",
            f"With --cost: {PRESETS}, a folder or a hub id; only its configuration is read. Default: the "
            "bundled model.",
        ),
    ] = None,
    context: Annotated[int | None, count("With --cost: cached tokens per row. 131072.", 0)] = None,
    batch: Annotated[int | None, count("With --cost: rows decoded together. 1.", 1)] = None,
    dtype: Annotated[
        str | None, words("NAME", "With --cost: of cache and weights: fp32, bf16, fp16, fp8 or the long names. bf16.")
    ] = None,
    weights: Annotated[str | None, words("NAME", "With --cost: of the weights, if another: also int8, int4.")] = None,
    acceptance: Annotated[
        float | None, number("SHARE", "With --cost: mean share of a draft that stands under rectify=N:verify. 1.")
    ] = None,
    policy: Annotated[
        list[str] | None, words("SPEC", "With --cost: a policy, once per policy. Default: all of them.")
    ] = None,
) -> None:
    """List the policies, their options with defaults, and where they come from; or what they cost; or recipes.

    Options are written behind the name: less_is_more:budget=256,reselect=6. Lists join with +: reselect=6+9.

    Example:

      saccade policies --cost --model llama-3.1-8b --context 131072 --batch 8
    """
    sizes: dict[str, Any] = {"model": model, "context": context, "batch": batch, "dtype": dtype, "weights": weights}
    given = {**sizes, "acceptance": acceptance, "policy": policy or None}
    given = {name: value for name, value in given.items() if value is not None}
    if recipes and (cost or given):
        raise SaccadeError(f"--{next(iter(given), 'cost')} does not fit --recipes, which only lists them")
    if recipes:
        _list_recipes()
    elif cost:
        from .costs import print_costs

        print_costs(**given)
    elif given:
        raise SaccadeError(f"--{next(iter(given))} belongs to --cost; add that, or leave it away to list the policies")
    else:
        _list()


def _list() -> None:
    from rich import box
    from rich.table import Table

    from ..methods.registry import policies as known
    from .terminal import output

    console = output()
    for description in known().values():
        console.print(f"[bold]{description.name}[/bold]  {description.summary}", highlight=False)
        if description.source != "-":
            console.print(f"  {description.source}", highlight=False)
        table = Table("option", "default", "meaning", box=box.SIMPLE_HEAD)
        for name, default in description.defaults.items():
            written = "+".join(map(str, default)) if isinstance(default, tuple) else str(default)
            table.add_row(name, "-" if default is None else written, description.help[name])
        console.print(table if table.row_count else "")


def _list_recipes() -> None:
    from ..recipes.published import MARK, PREFIX, PUBLISHED
    from .terminal import output

    console = output()
    console.print(f"Published re-selection layers: {MARK}. auto finds them by the model's name.\n", soft_wrap=True)
    for name, one in PUBLISHED.items():
        console.print(f"[bold]{PREFIX}{name}[/bold]  {one.policy}", highlight=False, soft_wrap=True)
        console.print(f"  {one.found['by']}\n  {', '.join(one.found['models'])}", highlight=False, soft_wrap=True)
