"""Make the data of the code model: `python -m testbed.code.corpus --out .training/code`.

Tokenizer, training tokens and held-out stretches, small enough to be carried to another machine. The files of a package
follow one another in path order, a blank line between them, as in `saccade.eval.document.package_sources`.
"""

import argparse
import platform
from collections.abc import Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any, cast

import numpy
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from saccade.errors import SaccadeError
from saccade.eval.tokens import encode

from ..tokenizer import END, save_tokenizer, train_tokenizer
from .packages import HELD_OUT, STANDARD_LIBRARY, TRAINING
from .recipe import VOCABULARY
from .sources import Source, is_code, package_files, training_files
from .windows import POSITIONS, TARGETS, Streams, Stretch, Tokens, write

BETWEEN = "\n\n"
MOST_CHARACTERS = 550_000
"""Of a package other than the standard library: files in path order up to there."""
MOST_BYTES = 9_000_000
"""Of the packed folder."""
STRETCHES_PER_PACKAGE = 16
TOKENIZER_CHARACTERS = 400_000
"""Of each package, from its beginning."""


def joined(files: Sequence[Source]) -> str:
    """The text of a package."""
    return BETWEEN.join(source.text for source in files)


def training_texts(packages: Sequence[str], most: int) -> list[tuple[str, list[Source]]]:
    """The names and files of the packages that are trained on."""
    return list(zip(packages, training_files(packages, {STANDARD_LIBRARY: 10**9}, most), strict=True))


def pack(texts: Sequence[tuple[str, Sequence[Source]]], tokenizer: PreTrainedTokenizerFast) -> Streams:
    """The packages' tokens, each behind an end of text."""
    end = tokenizer.convert_tokens_to_ids(END)
    parts = [numpy.array([end, *encode(tokenizer, joined(files))], dtype=numpy.uint16) for _, files in texts]
    begins = numpy.cumsum([0, *map(len, parts)]).tolist()
    return Streams(numpy.concatenate(parts), tuple(name for name, _ in texts), tuple(begins))


def held_out_stretches(
    package: str, files: Sequence[Source], tokenizer: PreTrainedTokenizerFast, count: int, seed: int
) -> list[tuple[Stretch, Tokens]]:
    """`count` stretches of a package, in path order, whose last `TARGETS` tokens each lie in another file.

    What comes before them is the file so far and the files before it, in path order; so contexts can overlap, targets
    cannot. Files are drawn by their length, as if a token of the text were drawn, and none with targets is a table.

    Raises:
        SaccadeError: the package has fewer files that are long enough.
    """
    rng = numpy.random.default_rng(seed)
    found = dict[int, tuple[Stretch, Tokens]]()
    characters = numpy.array([len(source.text) for source in files])
    candidates = numpy.flatnonzero(characters >= TARGETS)  # a token has a character at least
    odds = characters[candidates] / characters[candidates].sum()
    for number in rng.choice(candidates, len(candidates), replace=False, p=odds).tolist():
        own = encode(tokenizer, files[number].text)
        if len(own) < TARGETS or not is_code(files[number].text):
            continue
        end = int(rng.integers(TARGETS, len(own) + 1))
        tokens, before = own[:end], number
        while len(tokens) < POSITIONS and before:
            before -= 1
            tokens = (*encode(tokenizer, files[before].text + BETWEEN), *tokens)
        if len(tokens) >= POSITIONS:
            stretch = Stretch(package, files[number].path, min(end, POSITIONS) - TARGETS)
            found[number] = stretch, numpy.array(tokens[-POSITIONS:], dtype=numpy.uint16)
        if len(found) == count:
            return [found[number] for number in sorted(found)]
    raise SaccadeError(f"{count} held-out stretches of {package}: only {len(found)} of its files have room for one")


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of the packages, by name."""
    distributions = packages_distributions()
    found = {name: version(distributions[name][0]) for name in packages if name in distributions}
    return {**found, STANDARD_LIBRARY: platform.python_version()}


def make(
    folder: Path, packages: Sequence[str] = TRAINING, most: int = MOST_CHARACTERS, vocabulary: int = VOCABULARY
) -> None:
    """Write the data of `packages` and of `HELD_OUT` into `folder`.

    Raises:
        SaccadeError: a package is not installed, or the data are larger than `MOST_BYTES`.
    """
    texts = training_texts(packages, most)
    learned = (joined(files)[:TOKENIZER_CHARACTERS] for _, files in texts)
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(train_tokenizer(learned, vocabulary=vocabulary, positions=POSITIONS), folder)
    tokenizer = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(folder))
    pairs = [
        pair
        for seed, package in enumerate(HELD_OUT)
        for pair in held_out_stretches(package, [*package_files(package)], tokenizer, STRETCHES_PER_PACKAGE, seed)
    ]
    about: dict[str, Any] = {
        "versions": versions([*packages, *HELD_OUT]),
        "vocabulary": len(tokenizer),
        "files": sum(len(files) for _, files in texts),
        "characters": sum(len(source.text) for _, files in texts for source in files),
    }
    held_out = numpy.stack([tokens for _, tokens in pairs])
    write(folder, pack(texts, tokenizer), [stretch for stretch, _ in pairs], held_out, about)
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MOST_BYTES:
        raise SaccadeError(f"{folder} holds {size:,} bytes, more than {MOST_BYTES:,}: make MOST_CHARACTERS smaller")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    make(arguments.out)
    sizes = {path.name: path.stat().st_size for path in sorted(arguments.out.iterdir())}
    print(f"{sum(sizes.values()):,} bytes in {arguments.out}: {sizes}")


if __name__ == "__main__":
    main()
