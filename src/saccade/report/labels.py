"""What tables, pages and pictures call a policy: a short name; its whole spec stands in the JSON and on hover."""

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from ..plans.head_list import KIND, HeadList
from .wording import Row

LONGEST = 34
"""Characters of a label, at most."""
_VALUE = 16
"""Characters of an option's value, at most; of a longer one both ends are kept, since lists differ in either."""


def labels(specs: Iterable[str], kv_heads: int = 0, layers: int = 0) -> dict[str, str]:
    """A short name for every spec, no two alike.

    Args:
        specs: in the order in which those are numbered whose names would be the same.
        kv_heads, layers: of the model, layers with full attention, which say how many heads a list of heads names; 0:
            not known.
    """
    found: dict[str, str] = {}
    for spec in dict.fromkeys(specs):
        name, colon, told = spec.partition(":")
        options = (_option(*option.partition("="), kv_heads, layers) for option in told.split(","))
        wanted = label = _cut(name + colon + ",".join(options), LONGEST)
        taken, number = set(found.values()), 1
        while label in taken:
            number += 1
            label = f"{_cut(wanted, LONGEST - len(f' #{number}'))} #{number}"
        found[spec] = label
    return found


def full_layers(environment: Mapping[str, Any]) -> list[int]:
    """Layers with full attention as the model counts them; of results that do not tell, all."""
    return list(environment.get("full_layers", range(environment.get("layers", 0))))


def family(spec: str) -> str:
    """A spec without its budget: what the rows of one policy have in common."""
    name, _, options = spec.partition(":")
    return ":".join(filter(None, (name, ",".join(one for one in options.split(",") if not one.startswith("budget=")))))


def labelled(results: Mapping[str, Any]) -> list[Row]:
    """Rows of a comparison or a tuning with their policy's `family` and its `label`."""
    here, rows = results["environment"], [{"family": family(row["spec"]), **row} for row in results["rows"]]
    found = labels((row["family"] for row in rows), here.get("kv_heads", 0), len(full_layers(here)))
    return [{**row, "label": found[row["family"]]} for row in rows]


def meanings(found: Mapping[str, str]) -> list[str]:
    """What labels stand for, those that are not whole specs."""
    return [f"{label} is {spec}" for spec, label in found.items() if label != spec]


def _option(key: str, equals: str, value: str, kv_heads: int, layers: int) -> str:
    if kv_heads and value.startswith(f"{KIND}:"):
        heads = sum(kv_heads if head is None else 1 for _, head in HeadList.parse(value).entries)
        return f"heads={heads} of {kv_heads * layers}"
    if len(value) > _VALUE:
        value = PurePath(value).name
    return key + equals + (value if len(value) <= _VALUE else f"{value[: _VALUE // 2]}…{value[1 - _VALUE // 2 :]}")


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
