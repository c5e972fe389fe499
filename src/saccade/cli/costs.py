"""The table that `saccade policies --cost` prints: bytes per decoded token, and the ceiling that they set."""

from typing import Any

import torch
from rich import box
from rich.table import Table

from ..checkpoints.load import ModelSource, skeleton_of
from ..checkpoints.preset_sizes import PRESETS
from ..checkpoints.presets import is_preset, read_config
from ..checkpoints.shape import shape_of
from ..checkpoints.traffic import expert_weights, experts_chosen, state_bytes, weights_read
from ..errors import ModelFolderError, SaccadeError
from ..eval.entry import usual_policies
from ..methods.registry import policies
from ..plans.cost import PARTS, Cost, cost_of
from ..recipes.resolve import resolve_all
from .terminal import quiet_libraries, show

CACHE_BYTES = {"float32": 4.0, "fp32": 4.0, "bfloat16": 2.0, "bf16": 2.0, "float16": 2.0, "fp16": 2.0, "fp8": 1.0}
WEIGHT_BYTES = {**CACHE_BYTES, "int8": 1.0, "int4": 0.5}
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def print_costs(
    *,
    model: str | None = None,
    context: int = 131_072,
    batch: int = 1,
    dtype: str = "bf16",
    weights: str | None = None,
    acceptance: float = 1.0,
    policy: list[str] | None = None,
) -> None:
    """Print the table and what it assumes; or raise a SaccadeError about the first setting that is not valid."""
    quiet_libraries()
    weights = weights or dtype
    itemsize, weight_size = _size("dtype", dtype, CACHE_BYTES), _size("weights", weights, WEIGHT_BYTES)
    location = ModelSource.locate(None).location if model is None else model
    config = _config(model)
    network, shape = skeleton_of(config, model), shape_of(config)
    # Dense attention first: every ceiling is quoted against it.
    chosen, said = resolve_all(("dense", *(policy or usual_policies(None, policies())[0])), location, lambda: shape)
    parameters, notes = _weights(network, config, batch)
    notes += said
    costs: dict[str, Cost] = {}
    sizes: Any = {"context": context, "batch": batch, "kv_itemsize": itemsize, "weight_bytes": parameters * weight_size}
    sizes["state_bytes"] = state_bytes(config, torch.float32 if itemsize == 4 else torch.bfloat16)
    if sizes["state_bytes"]:
        notes.append(f"K and V: with the states of recurrent layers, {sizes['state_bytes']:,} bytes of a row")
    for label, entry in {one.to_spec(): one for one in chosen}.items():
        plan = entry.plan(shape)
        costs[label] = cost_of(plan, entry.rectify, shape, **sizes, acceptance=acceptance)
        notes += [*(f"{label}: {note}" for note in costs[label].notes), *plan.notes]
    title = (
        f"{model or 'bundled model'}, {context:,} cached tokens, batch {batch}, cache in {dtype}, "
        f"{parameters:,} weights in {weights}"
    )
    show(_table(title, costs), *dict.fromkeys(notes))


def _size(option: str, name: str, sizes: dict[str, float]) -> float:
    if name not in sizes:
        raise SaccadeError(f"--{option} {name!r} is not valid; valid: {', '.join(sizes)}")
    return sizes[name]


def _weights(network: Any, config: Any, batch: int) -> tuple[int, list[str]]:
    """The weights that a step of a batch reads, and notes; from the configuration alone."""
    inputs, head, notes = network.get_input_embeddings().weight, network.get_output_embeddings(), []
    if head is None or head.weight is not inputs:
        notes.append(f"weights: without the input embedding's {inputs.numel():,}, of which a step reads one row")
    experts, chosen = expert_weights(network), experts_chosen(config)
    if experts and chosen is None:
        notes.append("weights: all experts are counted, of which a small batch reads a few")
    elif experts:
        notes.append(f"weights: of the experts' {experts:,} what rows read that choose {chosen} each for themselves")
    return round(weights_read(network, batch)), notes


def _config(name: str | None) -> Any:
    if name is not None and is_preset(name):
        return read_config(name)
    try:
        # Weights are not needed, so a folder with a configuration is enough.
        return ModelSource.locate(name, weights=False).config()
    except ModelFolderError as error:
        raise ModelFolderError(f"{error}; a preset is one of {PRESETS}") from error


def _table(title: str, costs: dict[str, Cost]) -> Table:
    unit, size = next((unit, size) for unit, size in UNITS if costs["dense"].total >= size)
    columns = ("policy", "weights", "K and V", "scores", "index", "rectification", f"{unit} in all", "ceiling")
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for label, cost in costs.items():
        figures = (f"{value / size:.3f}" if (value := getattr(cost, name).total) else "-" for name in PARTS)
        table.add_row(label, *figures, f"{cost.total / size:.3f}", f"{cost.ceiling_over_dense:.2f}×")
    return table
