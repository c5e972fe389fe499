"""The methods there are: this package's own, those that programs register, and those of installed packages."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType

from ..errors import PolicyError, meant
from . import composed, dense, exact_topk, less_is_more, lychee_cluster, lychee_decode, quest, resa, streaming, tidal
from .method import Method
from .token_clusters import METHOD as TOKEN_CLUSTERS

GROUP = "saccade.methods"
"""Entry points of other packages, each a `Method`; every process finds them, vLLM's workers among them."""

_MODULES = dense, streaming, quest, tidal, less_is_more, lychee_decode, lychee_cluster, resa, exact_topk, composed
_METHODS: dict[str, Method] = {module.METHOD.name: module.METHOD for module in _MODULES}
_METHODS[TOKEN_CLUSTERS.name] = TOKEN_CLUSTERS


def register(method: Method) -> None:
    """Make a method known to this process, under its name, wherever a policy may be named.

    Raises:
        PolicyError: another method has that name.
    """
    if _METHODS.setdefault(method.name, method) is not method:
        raise PolicyError(f"a method {method.name!r} is already there; give yours another name")


def policies() -> Mapping[str, Method]:
    """All methods by name: options, defaults, source. Iterating gives the names.

    Raises:
        PolicyError: an installed package's method cannot be loaded or has the name of another.
    """
    _load_entry_points()
    return MappingProxyType(_METHODS)


def describe(name: str) -> Method:
    """The method `name`.

    Raises:
        PolicyError: if there is none; the message lists those there are.
    """
    known = policies()
    if name not in known:
        of_a_model = name in ("auto", "recipe") or name.endswith(".json")
        where = "; auto and recipes are for decoding (saccade.sparsify, generate, compare, serve)" if of_a_model else ""
        raise PolicyError(f"unknown policy {name!r}; valid: {', '.join(known)}{where or meant(name, known)}")
    return known[name]


@cache
def _load_entry_points() -> None:
    for point in entry_points(group=GROUP):
        try:
            method = point.load()
        except Exception as error:  # importing another package can raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise PolicyError(f"method {point.name} = {point.value} cannot be loaded: {reason}") from error
        if not isinstance(method, Method):
            raise PolicyError(f"method {point.name} = {point.value} is no saccade.Method but {method!r}")
        register(method)
