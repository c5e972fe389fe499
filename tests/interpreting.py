"""Triton's interpreter without what it does in vain.

For every launch and every call inside of a kernel it looks through its whole language for functions to replace, and
every sum of integers it computes three times; most kernels take less.
"""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
import triton.runtime.interpreter as interpreter


@cache
def builtin_names(owner: Any) -> tuple[str, ...]:
    """What the interpreter replaces in a module or class; to be asked first before it has."""
    return tuple(name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member))


def _patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
    for name in builtin_names(owner):
        member = getattr(owner, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(owner, name, member, builder, scope)


@cache
def languages(fn: Any) -> tuple[Any, ...]:
    """Triton's modules that a kernel names."""
    return tuple(one for one in fn.__globals__.values() if one is tl or one is tl.core)


def quicken() -> None:
    """Look once for functions to replace, replace none in a kernel that another calls, and remember numpy's types."""
    patch_lang, np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    of_scalar = cache(np_dtype)

    def _patch_lang(fn: Any) -> Any:
        if any(tl.core.is_builtin(one.load) for one in languages(fn)):
            return patch_lang(fn)
        return interpreter._LangPatchScope()

    def _get_np_dtype(kind: Any) -> Any:
        one = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return np_dtype(one) if isinstance(one, tl.pointer_type) else of_scalar(one)

    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "without it, what an overflow is compared with is computed and then not looked at"
    builder.options = replace(builder.options, sanitize_overflow=False)
    vars(interpreter).update(_patch_builtin=_patch_builtin, _patch_lang=_patch_lang, _get_np_dtype=_get_np_dtype)
