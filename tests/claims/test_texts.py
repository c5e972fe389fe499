"""Texts that judge: of three kinds and of packages, as long as asked; none holds what another one does."""

import re
from itertools import pairwise
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from claims.designs.packages import PackageProblems
from lab import packages
from lab.kinds import QUESTION, texts_by_kind
from saccade.calibrate.problems import NeedleProblems, Problem
from saccade.checkpoints.load import ModelSource
from saccade.errors import DocumentError

LENGTH, COUNT, POSITIONS = 600, 3, 32768
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<answer>"


@pytest.fixture
def begun() -> Any:
    """One that begins texts with a token, which the bundled one does not."""
    made = ModelSource.locate(None).tokenizer()
    made.chat_template = TEMPLATE
    begin = made.convert_ids_to_tokens(0)
    made.add_special_tokens({"bos_token": begin})
    single = TemplateProcessing(single=f"{begin} $A", pair=None, special_tokens=[(begin, 0)])
    made.backend_tokenizer.post_processor = single
    assert made("text")["input_ids"][0] == 0
    return made


def test_texts_are_as_long_as_asked_and_share_nothing(begun: Any) -> None:
    found = texts_by_kind(begun, LENGTH, COUNT, 0, POSITIONS)
    assert [*found] == ["code", "prose", "chat"]
    assert all(len(texts) == COUNT for texts in found.values())
    assert all(len(text) == LENGTH for kind in ("code", "prose") for text in found[kind])
    assert all(text[0] == 0 and 0 not in text[1:] for kind in ("code", "prose") for text in found[kind])
    texts = [begun.decode(text) for kind in found for text in found[kind]]
    pieces = [{text[at : at + 200] for at in range(0, len(text) - 200, 200)} for text in texts]
    assert all(not any(piece in other for piece in pieces[one]) for one in range(9) for other in texts[:one])
    for text in found["chat"]:
        said = begun.decode(text)
        assert LENGTH - 20 < len(text) <= LENGTH, "as much of the text as there is room for"
        assert said.startswith("<user>") and said.endswith(f"{QUESTION}<answer>") and 0 not in text


def test_no_template_no_chat_and_no_more_texts_than_there_are(begun: Any) -> None:
    with pytest.raises(DocumentError, match="8 tokens have no room"):
        texts_by_kind(begun, 8, 1, 0, POSITIONS)
    begun.chat_template = None
    assert [*texts_by_kind(begun, LENGTH, 1, 0, POSITIONS)] == ["code", "prose"]
    with pytest.raises(DocumentError, match="the model has 512 positions"):
        texts_by_kind(begun, LENGTH, 1, 0, 512)


def judging(tokenizer: Any, length: int, count: int, seed: int = 0) -> PackageProblems:
    return PackageProblems(tokenizer, "kv", (length, length), count, 4, seed, POSITIONS)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files of a package, with a table that holds no sentence among them."""
    table = "\n\n" + "".join(f"    0x{number:04x}, 0x{number * 7:04x},\n" for number in range(60))
    files = [
        "\n\n" + "\n".join(f"# Line {number} of file {file} says that {number} is one." for number in range(40))
        for file in range(12)
    ]
    files.insert(3, table)
    monkeypatch.setattr(packages, "package_sources", lambda: iter(files))
    return files


def lines_of(problem: Problem, tokenizer: Any) -> set[str]:
    return set(re.findall(r"Line \d+ of file \d+", tokenizer.decode(problem.tokens)))


@pytest.mark.parametrize("length", [128, 1000])
def test_no_line_is_in_two_texts_that_judge(tokenizer: Any, package: list[str], length: int) -> None:
    """And where they run out there are fewer, all of the wanted length; a table without a sentence stops nothing."""
    source = judging(tokenizer, length=length, count=1000)
    tokens = len(tokenizer("".join(package))["input_ids"])
    assert 0.5 * tokens / (length + 1) < len(source) <= tokens / (length + 1)
    seen: set[str] = set()
    for number in range(len(source)):
        problem = source[number]
        lines = lines_of(problem, tokenizer)
        assert lines and not lines & seen
        assert abs(len(problem.tokens) - length) <= 2 * max(1, length // 40)
        seen |= lines
    starts = packages.Packages(tokenizer).stretches(length, 1000, 0)
    assert min(after - before for before, after in pairwise(starts)) > length, "nor any token"
    assert len(judging(tokenizer, length=length, count=2)) == 2


def test_texts_that_judge_lie_apart_and_are_not_those_that_are_searched(tokenizer: Any, package: list[str]) -> None:
    """Of all stretches that were read, the first and one of the second half; another seed cuts elsewhere."""
    assert len(judging(tokenizer, length=128, count=1000)) > 8
    few = judging(tokenizer, length=128, count=2)
    searched = NeedleProblems(tokenizer, "kv", (128, 128), 2, 4, 0, POSITIONS)
    assert not any(lines_of(searched[number], tokenizer) for number in range(2))
    assert few[0].tokens != judging(tokenizer, length=128, count=2, seed=1)[0].tokens
    assert judging(tokenizer, length=128, count=2)[1] == few[1]


def test_packages_that_judge_are_there(tokenizer: Any) -> None:
    """The real ones: 40 texts of 2,000 tokens, read no further than they need."""
    source = judging(tokenizer, length=2000, count=40)
    assert len(source) == 40 and len(source.corpus) < 4 * 40 * 2000
    assert len({source[number].tokens for number in range(0, 40, 13)}) == 4
