"""Texts with needles, and tasks of the user's own: what is asked, where its answer stands, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from searching import guessed_task
from tokenizers import Tokenizer, models, trainers
from transformers import PreTrainedTokenizerFast

import starting
from one_line import lacking, refused, said
from saccade.calibrate.problems import TASKS, NeedleProblems, Problem
from saccade.calibrate.task_file import FileProblems
from saccade.checkpoints.load import ModelSource
from saccade.errors import DocumentError
from saccade.eval.document import library_sources

POSITIONS = 32768
STATED = {
    "kv": r"The code of the (\w+ \w+) is (\d{4})\.",
    "listing": r'"(\w+ \w+)": (\d{4}),',
    "records": r'\{"kind": "record", "the code of the (\w+ \w+)": (\d{4}), "checked": true\},',
    "passkey": r"The passkey of the (\w+ \w+) is (\w+(?: \w+){31})\.",
}
ASKED = {
    "kv": "\n\nQuestion: What is the code of the {0}?\nAnswer: The code of the {0} is",
    "listing": '\n\ndata["{0}"] =',
    "records": "\n\nQuestion: What is the code of the {0}?\nAnswer: The code of the {0} is",
    "passkey": "\n\nQuestion: What is the passkey of the {0}?\nAnswer: The passkey of the {0} is",
}


@pytest.fixture(scope="module")
def plain() -> Any:
    return ModelSource.locate(None).tokenizer()


@pytest.fixture(scope="module")
def with_start(plain: Any) -> Any:
    return starting.with_start(plain)


@pytest.fixture(scope="module")
def coarse() -> Any:
    """Pieces that cross spaces and full stops: an answer's tokens hold more than the answer."""
    made = Tokenizer(models.BPE())
    text = library_sources(held_out=True, characters=30_000)[:30_000]
    facts = [f"The code of the amber crow is {n}. The passkey of the wild fox is bear apple.\n" for n in range(100)]
    alphabet = sorted({*text, *map(chr, range(32, 127)), "\n"})
    made.train_from_iterator([text, *facts], trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="a")


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


KINDS = pytest.mark.parametrize(
    ("tokenizer", "task"),
    [("plain", "listing"), ("with_start", "records"), ("coarse", "kv"), ("coarse", "passkey")],
    indirect=["tokenizer"],
)
"""Each tokenizer and each task once, and what is longest by either."""


def needles(tokenizer: Any, task: str = "kv", length: int = 600, **changes: Any) -> NeedleProblems:
    options = {"lengths": (length, length), "count": 6, "asked": 4, "seed": 0, "positions": POSITIONS, **changes}
    return NeedleProblems(tokenizer, task, **options)


def long_enough(tokenizer: Any, task: str) -> int:
    """Ten passkeys take 2600 of the coarse tokens."""
    return 4000 if task == "passkey" and tokenizer.unk_token == "a" else 600


def pieces(tokenizer: Any, tokens: Any) -> list[str]:
    """The characters that each token of a text stands for."""
    return [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in tokens]


@KINDS
def test_a_question_is_about_a_needle_whose_value_is_the_gold(tokenizer: Any, task: str) -> None:
    source = needles(tokenizer, task, long_enough(tokenizer, task))
    for number in range(len(source)):
        problem = source[number]
        parts = pieces(tokenizer, problem.tokens)
        stated = dict(re.findall(STATED[task], "".join(parts)))
        assert len(problem.asks) == min(4, len(stated)) and len(stated) >= 4
        assert len({ask.prompt for ask in problem.asks}) == len(problem.asks)  # another needle each
        for ask in problem.asks:
            asked = "".join(pieces(tokenizer, ask.prompt))
            key = next(key for key in stated if asked == ASKED[task].format(key))
            assert "".join(pieces(tokenizer, ask.answer)) == f" {stated[key]}"
            first, stop = ask.gold
            found = "".join(parts[first:stop])
            # The fewest tokens that hold the value.
            assert stated[key] in found and (found.strip(" .,") == stated[key] or tokenizer.unk_token == "a")
            assert stated[key] not in "".join(parts[first + 1 : stop])
            assert stated[key] not in "".join(parts[first : stop - 1])
            # It is that needle's value, not an equal number elsewhere.
            assert key in "".join(parts[max(first - 40, 0) : first])
            assert "".join(pieces(tokenizer, ask.after)) == ("" if task == "listing" else ".")


def test_three_codes_are_asked_for_at_once(plain: Any) -> None:
    for problem in map(needles(plain, "several").__getitem__, range(3)):
        stated = dict(re.findall(STATED["kv"], plain.decode(problem.tokens)))
        for ask in problem.asks:
            asked, _, begun = plain.decode(ask.prompt).partition("?")
            keys = re.findall(r"of the (\w+ \w+)", asked)
            assert len({*keys}) == 3 and ask.gold is None
            said = [f"The code of the {key} is {stated[key]}" for key in keys]
            assert begun + plain.decode(ask.answer) == "\nAnswer: " + ". ".join(said)


def test_a_problem_is_the_same_whoever_asks_first(plain: Any) -> None:
    forth, back = needles(plain, lengths=(200, 700)), needles(plain, lengths=(200, 700))
    one = [forth[number] for number in range(6)]
    two = [back[number] for number in reversed(range(6))][::-1]
    assert one == two and one == [forth[number] for number in range(6)]
    assert len({problem.tokens for problem in one}) == 6
    # More problems, or fewer questions about each, do not change which texts there are.
    assert needles(plain, lengths=(200, 700), count=9)[4] == one[4]
    fewer = needles(plain, lengths=(200, 700), asked=1)[4]
    assert fewer.tokens == one[4].tokens and fewer.asks == one[4].asks[:1]
    others = needles(plain, lengths=(200, 700), seed=1)
    assert not {problem.tokens for problem in one} & {others[number].tokens for number in range(6)}
    assert others[0].asks != one[0].asks
    assert len({needles(plain, task)[0].tokens[:50] for task in TASKS}) == len(TASKS)  # tasks have texts of their own
    assert len(list(forth)) == 6  # iteration ends
    for number in (-1, 6):
        with pytest.raises(IndexError):
            forth[number]


@pytest.mark.parametrize(("task", "length"), [("passkey", 128), ("kv", 500), ("records", 3000), ("passkey", 3000)])
def test_texts_are_as_long_as_was_asked(with_start: Any, task: str, length: int) -> None:
    source = needles(with_start, task, length, count=5)
    for number in range(5):
        problem = source[number]
        count = len(re.findall(STATED[task], "".join(pieces(with_start, problem.tokens))))
        most, size = {"passkey": (10, 128), "records": (96, 60)}.get(task, (24, 40))
        assert count == max(1, min(most, length // size))
        # At each of a needle's two joints one token can become two or two can become one; the first token is no text.
        assert abs(len(problem.tokens) - 1 - length) <= 2 * count and problem.tokens[0] == 5


def test_lengths_are_spread_over_what_was_asked(plain: Any) -> None:
    source = needles(plain, lengths=(200, 1000), count=60)
    lengths = sorted(len(source[number].tokens) for number in range(60))
    assert 195 <= lengths[0] < 300 and 900 < lengths[-1] <= 1020
    # 60 even draws: fewer than 15 or more than 45 below the middle happen once in 25 000 times.
    assert 15 <= sum(length < 600 for length in lengths) <= 45


def test_what_does_not_fit_is_refused_at_once(plain: Any) -> None:
    refused: list[tuple[dict[str, Any], list[str]]] = [
        ({"lengths": (100, 100)}, ["--context 100", "128"]),
        ({"lengths": (600, 600), "positions": 620}, ["--context 600", "620"]),
        ({"lengths": (600, 30_000), "positions": 29_000}, ["--context 30000", "29000"]),
        ({"lengths": (10**6, 10**6), "positions": 10**8}, ["--context 1000000", "--task"]),
    ]
    lines = ((said(DocumentError, needles, plain, **changes), words) for changes, words in refused)
    assert lacking(lines) == []


@KINDS
def test_what_is_accepted_fits_whichever_problem_it_is(tokenizer: Any, task: str) -> None:
    """One position less than the longest of all problems takes is refused, also if that one is not among the first."""
    length = long_enough(tokenizer, task)
    source = needles(tokenizer, task, length, count=20)
    longest = max(source[number].positions(together=False) for number in range(20))
    with pytest.raises(DocumentError):
        needles(tokenizer, task, length, count=20, positions=longest - 1)


TEXT = "The sky is blue. Grass is green, and green is my favourite. The key is 4711."
GOOD = [
    {"context": TEXT, "question": "What is the key?", "answer": "4711"},
    {"context": TEXT, "question": "Which colour is the sky?", "answer": "blue"},
    {"context": TEXT, "question": "Which colour is grass?", "answer": "green"},
    {"context": " Another text: seven. ", "question": "Which number?", "answer": "seven"},
]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def read(tokenizer: Any, path: Path, positions: int = POSITIONS) -> list[Problem]:
    source = FileProblems(tokenizer, path, positions=positions)
    return [source[number] for number in range(len(source))]


@pytest.mark.parametrize("tokenizer", ["with_start", "coarse"], indirect=True)
def test_lines_of_one_context_are_one_problem(tokenizer: Any, tmp_path: Path) -> None:
    shuffled = [GOOD[0], GOOD[3], GOOD[1], GOOD[2]]
    first, second = read(tokenizer, write(tmp_path / "task.jsonl", shuffled))
    start = tokenizer("a")["input_ids"][: len(tokenizer("a")["input_ids"]) - 1]
    assert "".join(pieces(tokenizer, first.tokens[len(start) :])) == TEXT
    assert list(first.tokens[: len(start)]) == start
    assert "".join(pieces(tokenizer, second.tokens[len(start) :])) == " Another text: seven. "  # as it stands there
    parts = pieces(tokenizer, first.tokens)
    for ask, line in zip((*first.asks, *second.asks), GOOD, strict=True):
        assert "".join(pieces(tokenizer, ask.answer)) == f" {line['answer']}"
        assert "".join(pieces(tokenizer, ask.prompt)) == f"\n\nQuestion: {line['question']}\nAnswer:"
    key, sky, grass = (ask.gold for ask in first.asks)
    assert "4711" in "".join(parts[slice(*key)]) and "4711" not in "".join(parts[slice(*key)][1:])
    assert "blue" in "".join(parts[slice(*sky)]) and "blue" not in "".join(parts[slice(*sky)][:-1])
    assert grass is None  # it stands there twice: nobody knows which one is looked for


def test_only_line_feeds_end_a_line_and_blank_ones_are_fine(plain: Any, tmp_path: Path) -> None:
    """JSON Lines: other separators of Unicode may stand in a string as they are (RFC 8259, section 7), or escaped."""
    path = tmp_path / "task.jsonl"
    for mark in ("\u2028", "\x0b"):
        context = f"A line.{mark}The key is 4711."
        raw = json.dumps({**GOOD[0], "context": context}, ensure_ascii=mark == "\x0b")
        path.write_text(f"{raw}\n", encoding="utf-8")
        (problem,) = read(plain, path)
        assert plain.decode(problem.tokens, clean_up_tokenization_spaces=False) == context
    turned = json.dumps(dict(reversed(GOOD[0].items())))
    path.write_bytes(f"\n{turned}\r\n\n  \n{json.dumps(GOOD[1])}".encode())
    (problem,) = read(plain, path)
    assert len(problem.asks) == 2


BAD = {
    "no answer": '{"context": "a", "question": "b"}',
    "wrong key": '{"context": "a", "question": "b", "answer": "c", "id": 1}',
    "not json": '{"context": "a", ',
    "no object": "[1, 2]",
    "empty answer": '{"context": "a", "question": "b", "answer": " "}',
    "answer of another type": '{"context": "a", "question": "b", "answer": 4711}',
    "deep": "[" * 100_000,
    "half a character": '{"context": "a", "question": "b", "answer": "\\ud800"}',
}


def line_of(tokenizer: Any, path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return said(DocumentError, FileProblems, tokenizer, path, positions=POSITIONS)


def test_a_bad_line_and_a_file_without_a_task_are_named(plain: Any, tmp_path: Path) -> None:
    path, absent = tmp_path / "mine.jsonl", tmp_path / "absent.jsonl"
    first, last = (json.dumps(line) for line in GOOD[:2])
    told = {name: line_of(plain, path, f"{first}\n\n{bad}\n{last}\n".encode()) for name, bad in BAD.items()}
    assert lacking((line, (str(path), "line 3")) for line in told.values()) == []
    assert {name for name, line in told.items() if len(line) >= 500} == set()
    lines = [(line_of(plain, path, content), (repr(str(path)),)) for content in (b"\n \n", b'{"context": "\xff')]
    lines.append((said(DocumentError, FileProblems, plain, absent, positions=POSITIONS), (repr(str(absent)),)))
    assert lacking(lines) == []


def test_a_text_longer_than_the_model_is_refused(plain: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [GOOD[3], {**GOOD[0], "context": "word " * 50 + "4711"}])
    longest = max(problem.positions(together=False) for problem in read(plain, path))
    assert len(read(plain, path, longest)) == 2
    with refused(DocumentError, f"text 2.*{longest}.*{longest - 1}", str(path)):
        read(plain, path, longest - 1)


def test_a_benchmarks_rows_are_problems_too(plain: Any, tmp_path: Path) -> None:
    """As `saccade compare` asks them; the answer is all references in their order."""
    row = {"context": TEXT, "question": "Which?", "answer_prefix": "It is", "answer": ["a", "b"], "max_new_tokens": 4}
    (problem,) = read(plain, write(tmp_path / "rows.jsonl", [row, {**row, "question": "What?", "answer": "c"}]))
    assert plain.decode(problem.tokens) == TEXT
    said = [(plain.decode(ask.prompt), plain.decode(ask.answer)) for ask in problem.asks]
    assert said == [("Which?\nIt is", " a, b"), ("What?\nIt is", " c")]
    with pytest.raises(DocumentError, match="line 1 has no column max_new_tokens"):
        read(plain, write(tmp_path / "rows.jsonl", [{k: v for k, v in row.items() if k != "max_new_tokens"}]))


@pytest.mark.parametrize(("begun", "benchmark"), [("plain", False), ("with_start", False), ("plain", True)])
def test_questions_that_are_answered_without_their_text_are_left_out(
    begun: str, benchmark: bool, folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Behind what the tokenizer begins a text with; a text of which nothing is left goes too."""
    tokenizer, start = request.getfixturevalue(begun), {"plain": (), "with_start": (5,)}[begun]
    path = guessed_task(folder, tmp_path / "mine.jsonl", start, benchmark=benchmark)
    model = ModelSource.locate(folder).weights(torch.device("cpu"), torch.float32)
    whole = FileProblems(tokenizer, path, positions=POSITIONS)
    left = whole.without_known(model)
    assert [len(whole[number].asks) for number in range(len(whole))] == [2, 1, 1]
    assert [left[number] for number in range(len(left))] == [replace(whole[0], asks=whole[0].asks[1:]), whole[2]]
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[2]]))
    with refused(DocumentError, "answers all of it without the texts", str(path)):
        FileProblems(tokenizer, path, positions=POSITIONS).without_known(model)
