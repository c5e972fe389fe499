"""The sparse path where nobody needs it: sets are chosen although the budget covers every row."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from saccade.decode.state import DecodeState


@contextmanager
def sparse_below_the_budget() -> Iterator[None]:
    """Inside, every decoding step chooses its sets, as far as its policy chooses any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeState, "needs_selection", lambda state, max_len: state.plan.selector is not None)
        yield
