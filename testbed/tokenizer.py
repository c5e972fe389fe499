"""The bundled model's tokenizer: byte-level BPE in which digits come in pairs and key words are one token."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from saccade.eval.document import language_reference, library_sources
from saccade.eval.facts import ADJECTIVES, NOUNS

END = "<|endoftext|>"
VOCABULARY = 2048
_PATTERN = r" ?[A-Za-z]+| ?\d{1,2}| ?[^\sA-Za-z\d]+|\n+|[^\S\n]+(?!\S)|[^\S\n]+"


def _texts() -> Iterator[str]:
    """The training text, and the words that must become one token often enough for that."""
    yield language_reference()
    yield library_sources(characters=300_000)
    words = [f" {word}" for word in ADJECTIVES + NOUNS]
    words += [" Question", "Question", "Answer", " What", " The", " code"]
    words += [f"{space}{number:02d}" for number in range(100) for space in ("", " ")]
    for word in words:
        for _ in range(2000):
            yield word


def train_tokenizer(
    texts: Iterable[str] | None = None, *, vocabulary: int = VOCABULARY, positions: int = 32768
) -> PreTrainedTokenizerFast:
    """Train the bundled model's tokenizer anew, or one of the same kind on other `texts`.

    The same Python version gives the same tokenizer.
    """
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Split(tokenizers.Regex(_PATTERN), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts() if texts is None else texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        bos_token=END,
        pad_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=positions,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Write its files, with the one name of its class that transformers 4.57 and 5 both know."""
    tokenizer.save_pretrained(folder)
    path = Path(folder, "tokenizer_config.json")
    written = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**written, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n", "utf-8")
