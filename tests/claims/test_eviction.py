"""Comparison with eviction, without kvpress: the files that both sides exchange, joining them, and one dense pass."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from claims.eviction import presses
from claims.eviction.asking import DENSE, Asking
from claims.eviction.exchange import Cell, Prompt, Said, prompts_of, read_answers, write_lines
from claims.eviction.join import agreement, rows_of
from claims.eviction.report import section
from claims.stored import stored_bytes
from commands import Invoke
from saccade.errors import OutputError
from saccade.eval.context import built_in_contexts
from saccade.eval.interval import wilson
from saccade.eval.tokens import encode
from saccade.methods.policy import Policy
from walking import walk

SNAP = Cell("SnapKVPress", "context", 16)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[Prompt]:
    return prompts_of(tokenizer, built_in_contexts(tokenizer, length=1100, limit=13, positions=8192, seed=0))


def test_prompts_are_the_demos_questions_for_kvpress(prompts: list[Prompt], tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    write_lines(file, map(asdict, prompts))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 13 and len({tuple(line["context"]) for line in lines}) == 2
    for line in lines:
        assert set(line) == {"context", "question", "answer_prefix", "answer", "max_new_tokens"}
        asked, prefix = tokenizer.decode(line["question"]), tokenizer.decode(line["answer_prefix"])
        key = asked.removeprefix("\n\nQuestion: What is the code of the ").removesuffix("?")
        assert prefix == f"\nAnswer: The code of the {key} is"
        # Cut where a token ends: the model reads what `saccade compare` reads.
        assert (*line["question"], *line["answer_prefix"]) == encode(tokenizer, asked + prefix)
        assert f"The code of the {key} is {line['answer']}." in tokenizer.decode(line["context"])


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:

    def write(*records: dict[str, Any] | str) -> Path:
        file = tmp_path / "answers.jsonl"
        file.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in records))
        return file

    return write


def record(said: Said, **changes: Any) -> dict[str, Any]:
    return {**asdict(said.cell), "prompt": said.prompt, "read": said.read, "tokens": said.tokens, **changes}


def test_answers_come_back_as_they_were_written(written: Callable[..., Path]) -> None:
    """What is said before a refusal does not count."""
    said = [Said(DENSE, 1, 9.0, (5, 6)), Said(DENSE, 0, 8.5, (7,)), Said(SNAP, 0, 3.0, ()), Said(SNAP, 1, 3.0, (1,))]
    refused = Cell("DuoAttentionPress", "context", None)
    about = {"versions": {"kvpress": "1"}}, {"pipeline": {"same": 2}}
    told = {**asdict(refused), "refused": "no patterns"}
    answers = read_answers(written(*about, *map(record, said), record(Said(refused, 0, 1, (1,))), told), 2)
    assert list(answers.said) == said and answers.refused == {refused: "no patterns"}
    assert answers.about == {"versions": {"kvpress": "1"}, "pipeline": {"same": 2}}


def test_a_file_that_lacks_something_is_refused_in_one_line(written: Callable[..., Path]) -> None:
    whole = record(Said(SNAP, 0, 1, (1,)))
    for lines, says in (
        (["{"], "line 1 is no record"),
        (["[]", "3"], "line 2 is no record"),
        ([{"method": "TOVAPress", "protocol": "context", "prompt": 0}], "'budget'"),
        ([{**whole, "tokens": ["a"]}], "'a'"),
        ([whole], "answers 1 prompts; each of the 2"),
        ([whole, whole, {**whole, "prompt": 1}], r"SnapKVPress \(context, budget 16\) answers 3 prompts"),
    ):
        with pytest.raises(OutputError, match=says) as caught:
            read_answers(written(*lines), 2)
        assert "\n" not in str(caught.value)


def test_joining_counts_right_answers_by_the_rule_of_the_demo(tokenizer: Any) -> None:
    prompts = [Prompt((context,), (1,), (2,), answer) for context, answer in ((1, "1234"), (1, "5678"), (2, "1234"))]
    texts = (" 1234.", " 5679.", " 1234")
    said = [Said(SNAP, place, place + 1, encode(tokenizer, text)) for place, text in enumerate(texts)]
    longer = [Said(DENSE, place, 9, encode(tokenizer, " 12345")) for place in range(3)]
    snap, dense = rows_of("kvpress", [*said, *longer], prompts, tokenizer)
    assert {key: snap[key] for key in asdict(SNAP)} == asdict(SNAP)
    assert (snap["side"], snap["correct"], snap["n"], snap["read"]) == ("kvpress", 2, 3, 2.0)
    assert snap["correct_by_context"] == [1, 1] and snap["interval"] == wilson(2, 3)
    assert dense["correct"] == 0


def test_agreement_compares_tokens_of_dense_attention() -> None:
    ours = [Said(DENSE, 0, 9, (1, 2)), Said(DENSE, 1, 9, (3, 4)), Said(SNAP, 0, 9, (8,))]
    theirs = [Said(DENSE, 1, 9, (3, 5)), Said(DENSE, 0, 9, (1, 2)), Said(SNAP, 0, 9, (9,))]
    assert agreement(ours, theirs) == {"prompts": 2, "same_tokens": 1}
    for some in (theirs[1:], []):
        with pytest.raises(OutputError, match=f"2 prompts on saccade's side and {min(len(some), 1)} on kvpress's"):
            agreement(ours, some)


def test_the_ratio_keeps_the_budget_as_kvpress_rounds() -> None:
    for budget in (1, 16, 64, 256, 1000):
        # kvpress/utils.py, compute_n_kept: max(1, int(k_len * (1 - compression_ratio))).
        kept = {int(length * (1 - presses.ratio(budget, length))) for length in range(1000, 9000)}
        assert kept == {budget}


@walk
def test_a_question_read_densely_is_as_a_longer_context(model: Any, tokenizer: Any, prompts: list[Prompt]) -> None:
    # One whose sets depend on the text, one on positions, one on which steps were decoded.
    policies = [Policy.from_spec(spec) for spec in ("lychee_cluster:budget=64", "streaming:budget=8", "resa:rectify=4")]
    longer = [replace(one, context=(*one.context, *one.question), question=()) for one in prompts[:2]]
    found, decoded = list[dict[tuple[Cell, int], Said]](), list[set[tuple[int, ...]]]()
    for asked in (prompts[:2], longer):
        asking = Asking(model, tokenizer, asked, policies)
        asking.run(lambda what: None)
        found.append({(one.cell, one.prompt): one for one in asking.said if one.cell.protocol == "query_aware"})
        decoded.append({one.tokens for one in asking.said if one.cell.protocol == "decoding"})
    assert len(found[0]) == 6 and found[0] == found[1]
    assert decoded[0] != {one.tokens for one in found[0].values()}


class Recent:
    """A press of our own, in kvpress's form, that keeps the last tokens and remembers what it was shown."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.shown: list[tuple[torch.Tensor, ...]] = []

    def post_init_from_model(self, model: Any) -> None:
        self.shown.clear()

    def compress(self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, options: Any) -> Any:
        cosines = options["position_embeddings"][0]
        self.shown.append((hidden[:, -presses.TAIL :], cosines[:, -presses.TAIL :], keys, values))
        return keys[:, :, -self.kept :], values[:, :, -self.kept :]


def test_both_sides_say_the_same_under_dense_attention(model: Any, tokenizer: Any, prompts: list[Prompt]) -> None:
    asking = Asking(model, tokenizer, prompts, [Policy.from_spec("dense")])
    told: list[str] = []
    asking.run(told.append)
    assert len(told) == asking.units == 2
    dense = presses.Cell("dense", "dense", None, lambda length: None)
    records = []
    for number, group in ((0, prompts[:12]), (12, prompts[12:])):
        with torch.inference_mode():
            records += list(presses.Asking(model, [dense]).records(number, [asdict(prompt) for prompt in group]))
    theirs = [Said(DENSE, record["prompt"], record["read"], tuple(record["tokens"])) for record in records]
    assert agreement(asking.said, theirs) == {"prompts": 13, "same_tokens": 13}
    assert theirs[0].read == len(prompts[0].context) + len(prompts[0].question) + len(prompts[0].answer_prefix)


def test_one_prefill_shows_presses_what_their_own_would(model: Any, prompts: list[Prompt]) -> None:
    first = asdict(prompts[0])
    after, together = Recent(20), Recent(20)
    cells = [
        presses.Cell("after", "context", 20, lambda length: after),
        presses.Cell("together", "query_aware", 20, lambda length: together),
        presses.Cell("refused", "context", 20, lambda length: 1 // 0),
    ]
    records = {record["method"]: record for record in presses.Asking(model, cells).records(0, [first])}
    assert cells[2].refused == "ZeroDivisionError: integer division or modulo by zero"
    assert records.keys() == {"after", "together"}
    # What is kept, and what follows it uncompressed.
    assert records["after"]["read"] == 20 + len(first["question"]) + len(first["answer_prefix"])
    assert records["together"]["read"] == 20 + len(first["answer_prefix"])

    alone = Recent(20)
    whole = {**first, "context": (*first["context"], *first["question"]), "question": first["answer_prefix"]}
    list(presses.Asking(model, [presses.Cell("alone", "context", 20, lambda length: alone)]).records(0, [whole]))
    assert len(alone.shown) == len(together.shown) == 5
    for shown, seen in zip(alone.shown, together.shown, strict=True):
        for one, other in zip(shown, seen, strict=True):
            # One pass over all tokens against two: sums in another order.
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


SMALL = ("--context", "1100", "--limit", "3", "--budget", "48,64", "--policy", "quest")

STAND_IN = """#!{python}
import json, pathlib, sys
isolated, *given = sys.argv[1:]
assert isolated == "-I"
if given[0] != "-c":
    assert pathlib.Path(given[0]).name == "presses.py"
    prompts, texts, answers = map(pathlib.Path, given[1:4])
    assert given[5:] == ["--budgets", "48", "64", "--threads", "1"]
    assert len(texts.read_text().splitlines()) == 50
    said = [json.loads(line) for line in prompts.with_name("saccade.jsonl").read_text().splitlines()[1:]]
    records = [{{"versions": {{"kvpress": "0", "transformers": "0"}}}}]
    records.append({{"pipeline": {{"compared": 1, "same": 1}}}})
    records += [one for one in said if one["method"] == "dense"]
    name = {{"method": "TOVAPress", "protocol": "context", "budget": 48}}
    records += [{{**name, "prompt": place, "read": 70, "tokens": [1]}} for place in range(3)]
    records.append({{"method": "DuoAttentionPress", "protocol": "context", "budget": None, "refused": "no patterns"}})
    answers.write_text("".join(json.dumps(record) + "\\n" for record in records))
    sys.exit({code})
"""


def stand_in(folder: Path, code: int = 0) -> Path:
    path = folder / "python"
    path.write_text(STAND_IN.format(python=sys.executable, code=code))
    path.chmod(0o755)
    return path


def run(invoke: Invoke, model: Path, folder: Path, code: int = 0) -> Any:
    files = ("--output-dir", folder / "exchange", "--json", folder / "inner" / "eviction.json")
    return invoke("eviction", "--kvpress", stand_in(folder, code), "--model", model, *SMALL, *files)


def test_a_run_joins_both_sides(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    result = run(invoke, model_folder, tmp_path)
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "inner" / "eviction.json").read_text())
    cells = [(row["side"], row["method"], row["protocol"], row["budget"], row["n"]) for row in results["rows"]]
    quest = [("saccade", "quest", name, budget, 3) for budget in (48, 64) for name in ("decoding", "query_aware")]
    assert cells == [
        ("saccade", "dense", "dense", None, 3),
        *quest,
        ("kvpress", "dense", "dense", None, 3),
        ("kvpress", "TOVAPress", "context", 48, 3),
    ]
    read = {(row["method"], row["budget"]): row["read"] for row in results["rows"] if row["side"] == "saccade"}
    assert 48 < read["quest", 48] < read["quest", 64] < read["dense", None]
    assert results["dense"] == {"prompts": 3, "same_tokens": 3}
    assert results["versions"]["kvpress"]["kvpress"] == "0"
    assert "`DuoAttentionPress`, `context`: no patterns" in result.stdout
    assert "| kvpress | `TOVAPress` | `context` | 0/3 (0%–56%), 70 | - | - |" in section(results)


@walk
def test_a_failure_of_the_other_side_is_told(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    result = run(invoke, model_folder, tmp_path, 3)
    assert result.exit_code == 2 and "kvpress's side ended with exit code 3" in result.stderr
    assert not (tmp_path / "inner" / "eviction.json").exists()


def test_the_published_results_are_whole() -> None:
    text = stored_bytes("eviction.json", "python -m claims eviction").decode()
    results = json.loads(text)
    assert results["dense"]["same_tokens"] == results["dense"]["prompts"] == 48
    assert results["pipeline"]["same"] == results["pipeline"]["compared"]
    assert {row["n"] for row in results["rows"]} == {48}
    # Nothing of the machine that it was made on.
    assert not re.search(r"/(home|root|tmp|work|usr)\b", text)
    right = {(row["method"], row["protocol"], row["budget"]): row["correct"] for row in results["rows"]}
    # What the page speaks of.
    assert right["SnapKVPress(window_size=budget/4)", "query_aware", 16] == 48
    assert right["exact_topk:dense_layers=0", "query_aware", 16] == 48
    assert (right["KeyDiffPress", "context", 64], right["quest", "decoding", 64]) == (24, 0)
