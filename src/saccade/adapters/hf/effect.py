"""Whether a call did what its policy asks for, by what its layers did and not by what was said of it; else one line."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers.cache_utils import Cache

from ...errors import UnsupportedModelError


@dataclass(slots=True, eq=False)
class Text:
    """What `generate` has fed to the model on its `cache`: `unread` positions of its input are left, `decoded` made."""

    unread: int
    decoded: int = 0
    cache: object = None

    def is_on(self, cache: object) -> bool:
        """Whether a call on a cache reads this text; on others, guidance and criteria ask about theirs."""
        return self.cache is None or self.cache is cache

    def feed(self, queries: int, decoded: int, cache: object = None) -> None:
        """Note a call of `queries` positions, of which `decoded` were decoded; a new token must be."""
        if not self.is_on(cache):
            return
        self.cache = cache
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


def require_shape(layer: int, seen: tuple[int, int], past: int, queries: int, *, fixed: bool) -> None:
    """Require that a layer has `seen` as many queries and keys as the call; a `fixed` cache has room behind them."""
    asked, keys = seen
    if asked != queries or keys < past + queries or (keys > past + queries and not fixed):
        raise _refusal(f"layer {layer} sees {asked} queries on {keys} keys, the call {queries} tokens behind {past}")


def require_all(layers: Iterable[int], done: Collection[int], told: str) -> None:
    """Require that all of some layers are among those that have `done` what the others are told to have left out."""
    missing = [layer for layer in layers if layer not in done]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        name = f"layer{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:4]))}{more}"
        raise _refusal(f"{name} {told}")


def _refusal(found: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the policy would not run: {found} (transformers {transformers.__version__})")
