"""Texts that judge: as long as asked, none holding what another does; read together, each says what it says alone."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from claims.accumulation.accumulation import DENSE, SPARSE_ONLY, TARGETS, Accumulation, Case, cases_of
from claims.accumulation.passages import Passage
from claims.designs import accumulated, continuation
from claims.designs.accumulated import Accumulated
from claims.designs.continuation import Continuation
from claims.designs.packages import PackageProblems
from claims.designs.together import rows_together
from claims.judging.claim import Sample
from claims.judging.study import Study
from lab import packages
from lab.kinds import QUESTION, texts_by_kind
from saccade.calibrate.problems import NeedleProblems, Problem
from saccade.checkpoints.load import ModelSource
from saccade.errors import DocumentError
from saccade.methods.policy import Policy

LENGTH, COUNT, POSITIONS = 600, 3, 32768
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<answer>"


@pytest.fixture
def begun(tokenizer: Any) -> Any:
    """One that begins texts with a token, which the bundled one does not."""
    made = copy.deepcopy(tokenizer)
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


SPARSE = "tidal:budget=40,reselect=3,heads=query,sinks=4,window=8"
ARMS = ("dense", SPARSE, f"{SPARSE},rectify=4")
PLAIN = Continuation(ARMS, prompt=130, decoded=22, texts=2, apart=(4,), kinds=("code", "prose"), nearer=(60,))
SUFFIXES = Accumulated("resa:min_pages=1", (0.3, 1.0), (8, 40), (300,), passages=2)
ROUNDED = 2e-6 + 1e-12
"""Measures keep six digits, of float32: half a unit on each side, the sums' order, and what binary fractions miss."""


def together(count: int) -> Callable[..., int]:
    return lambda *_: count


@pytest.fixture
def study(model_folder: Path, tmp_path: Path) -> Callable[[str], Study]:
    def made(name: str) -> Study:
        (tmp_path / name).mkdir()
        return Study(str(model_folder), tmp_path / name, device="cpu")

    return made


def by_name(samples: list[Sample]) -> dict[tuple[str, str, str], float]:
    return {(one.text, one.arm, name): value for one in samples for name, value in one.values.items()}


def test_plain_texts(study: Callable[[str], Study], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two kinds behind two prompts; three of four at once, so that a batch holds both kinds."""
    found = []
    for rows in (1, 3):
        monkeypatch.setattr(continuation, "rows_together", together(rows))
        here, steps = study(f"{rows}"), list[str]()
        found.append(by_name([*PLAIN.run(here, steps.append)]))
        assert len(steps) == PLAIN.units(here) == 3 * 2 * (4 if rows == 1 else 2)
    alone, batched = found
    assert alone.keys() == batched.keys()
    assert {arm for _, arm, _ in alone} == {f"behind {at}, {spec}" for at in (130, 60) for spec in ARMS}
    assert {text for text, _, _ in alone} == {f"{kind} {number}" for kind in PLAIN.kinds or () for number in range(2)}
    assert max(abs(alone[name] - batched[name]) for name in alone) <= ROUNDED

    model = ModelSource.locate(str(here.model)).weights(torch.device("cpu"), torch.float64)
    targets = dict[str, tuple[int, ...]]()
    for batch in PLAIN._batches(here):
        for name, text in zip(batch.names, batch.texts, strict=True):
            assert len(text) == batch.prompt + 22 + 1
            with torch.no_grad():
                logits = model(torch.tensor([text])).logits[0, batch.prompt : -1]
            losses = [-float(row.log_softmax(-1)[token]) for row, token in zip(logits, text[-22:], strict=True)]
            told = [alone[name, f"{batch.front}dense", f"loss{part}"] for part in ("", "@1", "@4", "~4")]
            # Every fifth step is a dense pass under rectify=4.
            sparse = [loss for step, loss in enumerate(losses, 1) if step % 5]
            expected = [numpy.mean(part) for part in (losses, losses[:6], losses[-5:], sparse)]
            # float32's logits are within 1e-5 of these.
            assert told == pytest.approx(expected, abs=2e-5)
            assert targets.setdefault(name, text[-22:]) == text[-22:], "a shorter prompt moves no target"


def test_own_texts(study: Callable[[str], Study], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model writes behind its prompts is what it is then told; next to temperature 0 that is the likeliest."""
    cold, warm = replace(PLAIN, nearer=None, own=1e-6), replace(PLAIN, nearer=None, own=1.0)
    monkeypatch.setattr(continuation, "rows_together", together(4))
    here = study("own")
    (given,), (drawn,), (again,), (own,) = (
        [*one._batches(here)] for one in (replace(cold, own=None), warm, warm, cold)
    )
    assert drawn == again
    model = ModelSource.locate(str(here.model)).weights(torch.device("cpu"), torch.float64)
    for before, text, other in zip(given.texts, own.texts, drawn.texts, strict=True):
        assert text[:130] == other[:130] == before[:130] and len(text) == len(other) == len(before) == 130 + 22 + 1
        assert text != other != before
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, 129:-1]
        logits[:, model.config.eos_token_id] = -torch.inf
        near = logits.gather(-1, torch.tensor(text[130:])[:, None])[:, 0]
        # float32's logits are within 1e-5 of these.
        assert float((logits.amax(-1) - near).max()) < 2e-5
    samples = by_name([*cold.run(here, lambda _: None)])
    assert {arm for _, arm, _ in samples} == set(ARMS) and samples["code 0", "dense", "right"] > 0.9


def test_passages(study: Callable[[str], Study], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rows in (1, 3):
        monkeypatch.setattr(accumulated, "rows_together", together(rows))
        found.append(by_name([*SUFFIXES.run(study(f"{rows}"), lambda _: None)]))
    alone, batched = found
    assert alone.keys() == batched.keys()
    assert max(abs(alone[name] - batched[name]) for name in alone) <= ROUNDED
    for text in ("reference 0", "library 1"):
        # What attends to all diverges by rounding alone; what does not, does.
        assert all(abs(alone[text, f"1, {arm}", "divergence"]) <= ROUNDED for arm in ("decode-only", "every 40"))
        apart = [alone[text, f"0.3, {arm}", "divergence"] for arm in ("decode-only", "every 8", "every 40")]
        assert min(apart) > ROUNDED and len(set(apart)) == 3
        assert alone[text, "0.3, every 40", "growth"] == pytest.approx(apart[2] - apart[0])
        assert (text, "dense", "divergence") not in alone


def test_divergence_is_that_of_dense_from_a_case() -> None:
    """By its definition in float64, a mean over predictions; sparse-only has none."""
    generator = torch.Generator().manual_seed(3)
    dense, other = (torch.randn(2, TARGETS, 11, generator=generator) for _ in range(2))
    passages = [Passage("noise", number, (0,) * (TARGETS + 1)) for number in range(2)]
    case = next(cases_of(Policy.from_spec("resa:min_pages=1"), (0.5,), (8,), 64, sparse_only=False))
    one = Accumulation(None, None, passages, [case], 0, batch=2)
    tokens = torch.zeros(2, TARGETS + 1, dtype=torch.long)
    one._record(Case(64, None, None, DENSE, None), passages, dense, tokens)
    one._record(case, passages, other, tokens)
    one._record(replace(case, setting=SPARSE_ONLY), passages, other, tokens)
    told = {(held.setting, passage.number): values for held, passage, values in one.by_passage()}
    found, right = ({at: values.get(name) for at, values in told.items()} for name in ("divergence", "right"))
    for row in range(2):
        p, q = (numpy.exp(numpy.float64(logits[row].numpy())) for logits in (dense, other))
        p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
        above = (dense[row] > dense[row, :, :1]).sum(-1)
        assert right[DENSE, row] == pytest.approx(float((above < 3).double().mean())), "the target is token 0"
        assert found[case.setting, row] == pytest.approx((p * numpy.log(p / q)).sum(-1).mean(), rel=1e-5)
        assert found[DENSE, row] is None and found[SPARSE_ONLY, row] is None


def test_as_few_and_as_even_batches_as_may_be() -> None:
    gpu = torch.device("cuda")
    assert [rows_together(gpu, *told) for told in ((32, 8448), (24, 30_128), (3, 2**19), (5, 10))] == [16, 8, 1, 5]
    assert rows_together(torch.device("cpu"), 32, 10) == 1
