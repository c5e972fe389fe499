"""From a tokenizer to what chunking knows of a text: how it breaks around every piece of the vocabulary."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ..text.levels import Codes

_tables: WeakKeyDictionary[Any, dict[Codes, Sequence[int]]] = WeakKeyDictionary()


def delimiter_table(tokenizer: Any, codes: Codes) -> Sequence[int]:
    """What `codes` makes of every vocabulary id's text; made once per tokenizer, which takes a second or two."""
    tables = _tables.setdefault(tokenizer, {})
    if codes not in tables:
        tokens = [[token] for token in range(len(tokenizer))]
        tables[codes] = codes(tokenizer.batch_decode(tokens, clean_up_tokenization_spaces=False))
    return tables[codes]
