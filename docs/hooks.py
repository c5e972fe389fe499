"""What `make docs` asks beyond mkdocs: every public name is described on a page, and the site fetches nothing."""

import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

API = Path(__file__).parent / "api"
_SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the theme would fetch to search pages on the disk; worker.js does that."""
_FETCHED = re.compile(r"""<(?:script|img|iframe)[^>]+src="(?:https?:)?//[^"]*|<link[^>]+href="(?:https?:)?//[^"]*""")


def documented() -> list[str]:
    """Names that the API pages ask for."""
    pages = sorted(API.glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.M)]


def find(name: str) -> Any:
    """The module, or what a module holds, of this dotted name."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return getattr(import_module(module), last)


def members(name: str, thing: Any) -> Iterator[tuple[str, str]]:
    """What a page shows of `thing` and what is said of it: itself, then classes, functions, methods, attributes."""
    yield name, inspect.getdoc(thing) or ""
    if isinstance(thing, ModuleType):
        for inner, value in vars(thing).items():
            own = getattr(value, "__module__", None) == thing.__name__ and callable(value)
            if own and hasattr(value, "__qualname__") and not inner.startswith("_"):
                yield from members(f"{name}.{inner}", value)
    elif isinstance(thing, type):
        said = "\n".join(inspect.getdoc(base) or "" for base in thing.__mro__ if base is not object)
        listed = {one.strip() for names in re.findall(r"^ +([\w, ]+): ", said, re.M) for one in names.split(",")}
        listed |= {*re.findall(r"`(\w+)`", said)}  # fields that the text itself names
        fields = vars(thing).get("__annotations__", {})
        for inner in dict.fromkeys((*fields, *vars(thing))):
            if not inner.startswith("_") and inner not in listed and (inner in fields or _speaks(vars(thing)[inner])):
                owners = (getattr(base, inner) for base in thing.__mro__ if inner in vars(base))
                yield f"{name}.{inner}", "".join(map(_own, owners))


def _own(value: Any) -> str:
    """The docstring of a function, class or property; that of a mere value is its type's."""
    return (inspect.getdoc(value) or "") if _speaks(value) else ""


def _speaks(value: Any) -> bool:
    wrapped = (property, cached_property, classmethod, staticmethod, type)
    return inspect.isfunction(value) or inspect.ismethod(value) or isinstance(value, wrapped)


def undocumented() -> list[str]:
    """Public names of which nothing is said; what overrides takes what the overridden says."""
    shown = (member for name in documented() for member in members(name, find(name)))
    return sorted({name for name, said in shown if not said.strip()})


def homeless() -> list[str]:
    """Names of `saccade` that no API page has."""
    import saccade

    return sorted({f"saccade.{name}" for name in saccade.__all__ if name != "__version__"} - {*documented()})


def on_pre_build(**_: Any) -> None:
    """Stop the build, with all names at once."""
    from mkdocs.exceptions import PluginError

    for what, names in (("without a docstring", undocumented()), ("on no page of docs/api", homeless())):
        if names:
            raise PluginError(f"public names {what}: {', '.join(names)}")


def fetched(text: str) -> list[str]:
    """What a page would load from elsewhere; canonical addresses are only named."""
    return [found for found in _FETCHED.findall(text) if 'rel="canonical"' not in found]


def on_post_build(*, config: Any, **_: Any) -> None:
    """Put our worker into every page, and stop at one that would still fetch anything."""
    from mkdocs.exceptions import PluginError

    site = Path(config["site_dir"])
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        text = text.replace(_SHIM, "../" * len(page.relative_to(site).parts[1:]) + "worker.js")
        page.write_text(text, encoding="utf-8")
        if found := fetched(text):
            raise PluginError(f"{page.relative_to(site)} would fetch {', '.join(found)}")
