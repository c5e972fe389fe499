"""A valid file of JSON and what is nearly one: a part changed or left out, or whatever else stands in its place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

import saccade


@dataclass(frozen=True)
class Document:
    """Gives texts of its neighbours; one of its parts is a `model`."""

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
    def truncations(self) -> list[str]:
        whole = json.dumps(self.valid)
        return [whole[:cut] for cut in range(0, len(whole), 37)]

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


def reads_or_says_why(read: Callable[[str], object], text: str, beginning: str) -> None:
    """A text reads, or one line says why not."""
    try:
        read(text)
    except saccade.PolicyError as error:
        assert str(error).startswith(beginning) and len(str(error).splitlines()) == 1  # noqa: PT017  # or none
