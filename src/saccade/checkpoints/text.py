"""From a tokenizer to what chunking knows of a text: the strongest delimiter in every piece of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ..text.levels import delimiter_levels

_tables: WeakKeyDictionary[Any, Sequence[int]] = WeakKeyDictionary()


def delimiter_table(tokenizer: Any) -> Sequence[int]:
    """Delimiter level of every vocabulary id, 0 for none; made once per tokenizer, which takes a second or two."""
    table = _tables.get(tokenizer)
    if table is None:
        tokens = [[token] for token in range(len(tokenizer))]
        pieces = tokenizer.batch_decode(tokens, clean_up_tokenization_spaces=False)
        table = _tables[tokenizer] = delimiter_levels(pieces)
    return table
