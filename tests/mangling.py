"""Valid files of JSON that speak of a model, and what is nearly one: a part changed or left out, or another there."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from saccade import Recipe
from saccade.plans.role_file import RoleFile
from saccade.types import ModelShape

SHAPE = ModelShape(8, 4, 2, 8, "qwen3", "9f31c2", hidden_size=32, intermediate_size=64)
MODEL = {
    "architecture": "qwen3", "layers": 8, "query_heads": 4, "kv_heads": 2, "head_dim": 8, "weights": "9f31c2",
    "hidden_size": 32, "intermediate_size": 64,
}  # fmt: skip
PLAIN = st.none() | st.booleans() | st.integers(-9, 2**70) | st.floats(allow_nan=False, allow_infinity=False)
FREE = st.dictionaries(st.text(max_size=5), PLAIN | st.text(max_size=5) | st.lists(PLAIN, max_size=2), max_size=3)
"""What a part may hold that nobody reads."""


@dataclass(frozen=True)
class Document:
    """A valid file of a kind, and texts of its neighbours."""

    kind: type[Any]
    valid: Mapping[str, Any]

    def changed(self, **parts: Any) -> str:
        return json.dumps({**self.valid, **parts})

    def of_model(self, **parts: Any) -> str:
        return self.changed(model={**self.valid["model"], **parts})

    def without(self, key: str, inner: str | None = None) -> str:
        data = json.loads(json.dumps(self.valid))
        del (data if inner is None else data[key])[inner or key]
        return json.dumps(data)

    @property
    def mangled(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """What no kind of file may hold, and words of the line that says so."""
        whole, keys, changed, of_model = json.dumps(self.valid), ", ".join(self.valid), self.changed, self.of_model
        return {
            "truncated": (whole[:-20], ("not JSON",)),
            "deep": ("[" * 100_000, ("not JSON",)),
            "a huge number": (whole.replace('"version": 1', '"version": 1' + "0" * 5000), ("not JSON",)),
            "a list": ("[]", ("the file is not an object", keys)),
            "NaN": (changed(found={"loss": math.nan}), ("NaN", "finite")),
            "a number beyond floats": (changed(found=0).replace('"found": 0', '"found": 1e999'), ("1e999", "finite")),
            "a key twice inside": (
                whole.replace('"layers": ', '"layers": 9, "layers": '),
                ("'layers' is given twice",),
            ),
            "an unknown key": (changed(extra=1), ("unknown key 'extra'", keys)),
            "an unknown key of the model": (of_model(heads=2), ("unknown key 'model.heads'", "kv_heads")),
            **{f"no {key}": (self.without(key), (f"key '{key}' is missing", keys)) for key in self.valid},
            "no weights": (self.without("model", "weights"), ("'model.weights' is missing",)),
            "version 2": (changed(version=2), ("version=2", "reads version 1")),
            "version true": (changed(version=True), ("version=True",)),
            "a model that is a name": (changed(model="qwen3"), ("model is not an object", "architecture")),
            "an architecture that is a number": (of_model(architecture=3), ("model.architecture=3",)),
            "no layers": (of_model(layers=0), ("model.layers=0", "at least 1")),
            "a boolean size": (of_model(head_dim=True), ("model.head_dim=True",)),
            "heads that do not divide": (of_model(query_heads=5), ("query_heads=5", "multiple of kv_heads=2")),
            "no width": (of_model(hidden_size=0), ("model.hidden_size=0", "at least 1, or null")),
            "found that is text": (changed(found="somehow"), ("found='somehow'",)),
        }

    @property
    def others(self) -> st.SearchStrategy[str]:
        """Any value of JSON at one place."""
        names = st.sampled_from([*self.valid, *self.valid["model"]])
        plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
        value = st.recursive(
            plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner), max_leaves=8
        )
        return st.builds(self._at, names, value)

    def _at(self, key: str, value: Any) -> str:
        return self.of_model(**{key: value}) if key in self.valid["model"] else self.changed(**{key: value})


ROLE_FILE = Document(
    RoleFile,
    {
        "version": 1,
        "model": {**MODEL, "layers": 3},
        "roles": [["publish", "publish"], ["reuse", "publish"], ["reuse", "reuse"]],
        "found": {"method": "hardkuma", "steps": 3000, "expected": [0.25, 1e-3]},
    },
)
RECIPE = Document(
    Recipe,
    {
        "version": 1,
        "model": MODEL,
        "policy": "less_is_more:reselect=5",
        "reselect": [5],
        "roles": "heads:0+3.1",
        "found": {"by": "saccade calibrate layers", "seed": 0},
        "scores": {"5": [0.5, 1e-3]},
        "versions": {"saccade": "0.1.0", "python": "3.12.1", "torch": "2.9.0", "transformers": "5.0.0"},
        "layers": {"tidal": [6]},
    },
)
