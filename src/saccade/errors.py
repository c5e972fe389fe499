"""Every error that saccade raises on purpose, as one tree below `SaccadeError`."""

import difflib
from collections.abc import Iterable


class SaccadeError(Exception):
    """Base of all errors of this package; its message is one line a user can act on."""


class PolicyError(SaccadeError, ValueError):
    """A policy, an option or a spec string that is unknown, out of range or contradictory."""


class UnsupportedModelError(SaccadeError):
    """A model, cache or call that cannot run sparsely; the message says which property and why."""


class AttachmentError(SaccadeError):
    """`sparsify` on a model that is already attached, or use of a run that has been restored."""


class ModelFolderError(SaccadeError):
    """A model or tokenizer that cannot be read: absent, truncated, or without what is needed."""


class DocumentError(SaccadeError):
    """A document that is absent, empty, not UTF-8, or longer than the model's positions."""


class OutputError(SaccadeError):
    """A results folder or file that cannot be written."""


class KernelError(SaccadeError, ValueError):
    """An operation called with tensors it is not made for, or an implementation that cannot take them."""


class ServingError(SaccadeError):
    """A server that cannot start, or a request that it cannot take; the message says what would be valid."""


def meant(given: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest that there is, case and hyphens aside; "" if none is."""
    folded = {_folded(name): name for name in known}
    near = difflib.get_close_matches(_folded(given), folded, n=1)
    return f"; did you mean {folded[near[0]]}?" if near else ""


def install(extra: str) -> str:
    """How to get what an extra brings: from a checkout, since `saccade-attention` is not published yet."""
    return f'pip install ".[{extra}]" in a checkout of saccade'


def _folded(name: str) -> str:
    return name.strip().lower().replace("-", "_")
