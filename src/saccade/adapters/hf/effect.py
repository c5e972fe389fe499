"""Whether a call did what its policy asks for, by what its layers did and not by what was said of it; else one line."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers.cache_utils import Cache

from ...errors import UnsupportedModelError


@dataclass(slots=True, eq=False)
class Text:
    """What a `generate` call has fed to the model: its input has `unread` positions yet, and tokens were `decoded`."""

    unread: int
    decoded: int = 0

    def feed(self, queries: int, decoded: int) -> None:
        """Note a call of `queries` positions, of which `decoded` were decoded; a new token must be."""
        if decoded == 0 and queries == 1 and self.unread < 1:
            raise _refusal("a new token of generate was taken for a part of its prompt")
        self.unread, self.decoded = self.unread - (queries - decoded), self.decoded + decoded

    def end(self, new: int) -> None:
        """Require that of `new` tokens all were decoded but the first, which follows from the prompt."""
        if self.decoded < new - 1:
            raise _refusal(f"generate made {new} tokens and decoded {self.decoded} under the policy")


def require_known(kept: str, arguments: Mapping[str, Any]) -> None:
    """Require that a call brings its cache as `kept`, under no other name."""
    for name, value in arguments.items():
        if name != kept and isinstance(value, Cache):
            raise _refusal(f"the cache comes as {name!r}, and {kept!r} is where this model takes it")


def require_keys(layer: int, keys: int, past: int, queries: int, *, fixed: bool) -> None:
    """Require that a layer sees keys of `past` tokens and `queries` new ones; a `fixed` cache has room behind them."""
    if keys < past + queries or (keys > past + queries and not fixed):
        raise _refusal(f"layer {layer} sees {keys} keys, and the call was taken for {queries} tokens behind {past}")


def require_answers(answered: Mapping[int, int], queries: int, layers: Collection[int], implementation: str) -> None:
    """Require that saccade's attention has `answered` for `queries` positions in each of some layers."""
    missing = [layer for layer in layers if answered.get(layer, 0) < queries]
    if missing:
        told = ", ".join(map(str, missing[:4])) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise _refusal(f"layers {told} did not call the attention {implementation!r}; was their forward replaced?")


def _refusal(found: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the policy would not run: {found} (transformers {transformers.__version__})")
