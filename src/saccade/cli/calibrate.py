"""`saccade calibrate`: find the layers and heads of a model that retrieve."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options
from .group import NeedsEval, OneLineErrors
from .options import count, flag, words

calibrate = typer.Typer(
    no_args_is_help=True,
    cls=OneLineErrors,
    help="Find the layers and the heads of a model that retrieve, and write them into a recipe.",
)


@calibrate.command(cls=NeedsEval)
def layers(
    model: options.Model = None,
    texts: options.Texts = None,
    context: options.Context = 4096,
    budgets: options.Budgets = "256",
    passages: Annotated[int, count("Texts of that length to read, at most.", maximum=10_000)] = 16,
    policy: Annotated[
        str, words("SPEC", "tidal or less_is_more, with options other than reselect and budget.")
    ] = "tidal",
    most: Annotated[int, count("Most layers to choose; a further one is taken if it is better.", maximum=8)] = 1,
    task: Annotated[
        str | None,
        words("NAME_OR_FILE", "Ask questions too, choose by them: kv, several, listing, records, passkey, or a file."),
    ] = None,
    questions: options.Questions = 144,
    output_dir: options.OutputDir = Path("results/layers"),
    recipe: options.RecipePath = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    seed: options.Seed = 0,
    threads: options.Threads = 1,
) -> None:
    """Try every layer as the one that selects again, and write the best into a recipe.

    The probe reads texts densely and tells the model their last tokens under each candidate, one step for each token.
    The four whose steps are nearest to dense attention's on tokens that need a long context, in the text as it is and
    in a passage that is repeated, then take 32 steps in a row, and the nearest stays. With --task questions are asked
    under each, too, and the one with most right answers stays.

    Examples:

      saccade calibrate layers

      saccade calibrate layers --model ./Qwen3-8B --texts ./documents --context 16384 --budgets 1024
    """
    from ..calibrate.layers import LayerSearch, LayerSettings
    from ..calibrate.target import TargetSettings
    from ..report.layers import PICTURE, layer_picture, layer_table
    from .terminal import quiet_libraries

    quiet_libraries()
    shared = TargetSettings(model, task or "", context, questions, output_dir, recipe, device, dtype, seed, threads)
    settings = LayerSettings(shared, policy, budgets, most, texts, passages)
    run_and_show(LayerSearch.check(settings), layer_table, layer_picture, PICTURE)


@calibrate.command(cls=NeedsEval)
def heads(
    model: options.Model = None,
    target_heads: Annotated[
        int | None,
        count(
            "KV heads that may read everything, those of layer 0 among them. Default: four layers' worth, as "
            "TidalDecode's four dense layers."
        ),
    ] = None,
    method: Annotated[
        str,
        words(
            "NAME,NAME",
            "direct: a gate per head, trained by distillation; score: copying in one dense pass; random. The first "
            "one's go into the recipe, the others are compared with it.",
        ),
    ] = "direct",
    exact: Annotated[
        bool, flag("--exact", "Keep exactly --target-heads heads, the best; not those whose gate exceeds 0.5.")
    ] = False,
    steps: Annotated[int, count("Training steps, one text each.")] = 3000,
    lengths: Annotated[str, words("N,N", "Shortest and longest text of training, in tokens.")] = "1024,10240",
    task: options.Task = "passkey",
    drop_known: Annotated[
        bool, flag("--drop-known", "Of a file, leave out questions that dense attention answers without their text.")
    ] = False,
    context: options.Context = 4096,
    budgets: options.Budgets = "64,256,1024",
    questions: options.Questions = 144,
    output_dir: options.OutputDir = Path("results/heads"),
    recipe: options.RecipePath = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    seed: options.Seed = 0,
    threads: options.Threads = 1,
) -> None:
    """Learn which heads retrieve (LycheeDecode), and write them into a role file and a recipe.

    The model stays as it is; only one gate per head is trained, to give the dense model's logits with few heads that
    read everything. Roles are then scored on new texts under lychee_decode.

    Examples:

      saccade calibrate heads --model ./Qwen3-8B --target-heads 32

      saccade calibrate heads --task kv --lengths 256,2048 --steps 800 --method direct,score --budgets 16,64
    """
    from ..calibrate.heads import HeadSearch, HeadSettings, shortest_and_longest
    from ..calibrate.target import TargetSettings
    from ..report.heads import PICTURE, head_picture, head_table
    from .terminal import quiet_libraries

    quiet_libraries()
    shared = TargetSettings(model, task, context, questions, output_dir, recipe, device, dtype, seed, threads)
    settings = HeadSettings(
        shared, method, target_heads, exact, steps, shortest_and_longest(lengths), budgets, drop_known
    )  # fmt: skip
    run_and_show(HeadSearch.check(settings), head_table, head_picture, PICTURE)


def run_and_show(calibration: Any, table: Callable[[Any], Any], draw: Callable[[Any], str], name: str) -> None:
    """Run what was checked, under a bar; draw it into a file of that name, print its table and what it has written."""
    from ..files import replace_text
    from ..recipes.recipe import Recipe
    from ..report.table import WIDE
    from .terminal import PLAIN_WIDTH, progress, show

    with progress(calibration.units) as advance:
        results = calibration.run(advance)
    target = calibration.target
    drawn = target.settings.output_dir / name
    replace_text(drawn, draw(results))
    recipe = Recipe.read(target.recipe_path)
    source = "found by saccade tune" if recipe.tuned else "not tuned"
    said = f"recipe: {target.recipe_path}, policy {recipe.policy}, {source}"
    kind, widest = ("picture", PLAIN_WIDTH) if drawn.suffix == ".svg" else ("report", WIDE)
    show(table(results), f"{kind}: {drawn}", said, widest=widest)
