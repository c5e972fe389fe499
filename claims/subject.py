"""The model of a claim."""

from saccade.errors import UnsupportedModelError
from saccade.eval.subject import Subject


def plain_subject(model: str | None, device: str, dtype: str) -> Subject:
    """As `Subject.check`; also an UnsupportedModelError for layers of other kinds, of which the papers say nothing."""
    subject = Subject.check(model, device, dtype)
    if subject.shape.kinds:
        told = f"model {subject.source.name!r} has layers of type {subject.shape.other_kinds}"
        raise UnsupportedModelError(f"{told}; claims are tested on models whose layers all have full attention")
    return subject
