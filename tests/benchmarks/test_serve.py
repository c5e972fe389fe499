"""`python -m benchmarks serve` and `agent` without vLLM: what is refused, what is asked, and what counts."""

import json
import re
import sys
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from benchmarks.serve import load
from benchmarks.serve.clients import ClientsJob, ClientsSettings
from benchmarks.serve.day import Day, replay
from benchmarks.serve.load import Load, LoadedEngine
from benchmarks.serve.rows import beside_stock, percentiles, row_of_load
from benchmarks.serve.table import day_table, load_table, right_of
from claims.stored import RESULTS
from commands import Invoke
from printing import printed
from saccade import SaccadeError
from saccade.bench import engines
from saccade.recipes import machine

pytestmark = pytest.mark.usefixtures("vllm")
SETTINGS: dict[str, Any] = {
    "shape": "smollm2-135m", "contexts": ["64,32"], "batches": ["2"], "threads": ["1"], "policies": ["quest"],
    "budgets": ["2048"], "steps": None, "dtype": "bfloat16", "device": "cpu",
}  # fmt: skip

DAY = Day(conversations=2, turns=3, start=40, end=100, shared=0.25, answers=(4, 16), vocabulary=1000)


def checked(**changed: Any) -> ClientsJob:
    return ClientsJob.check(ClientsSettings(**{**SETTINGS, **changed}))


def test_rectified_policies_are_taken_and_engines_run_one_after_another() -> None:
    job = checked(policies=["resa", "quest"], batches=["2,8"], new_tokens=64)
    assert job.groups == (("stock",), ("resa",), ("quest:budget=2048",), ("stock (last)",))
    assert (job.points, job.units, job.most, job.longest) == ((2, 8), 8, 8, 128)
    # Every client's row at its longest.
    assert job.blocks(8) == 8 * 128 // job.block


def test_prompts_share_what_they_are_told_to() -> None:
    asked = Load(clients=2, lengths=(40, 10), shared=0.5, new_tokens=4, requests=1, vocabulary=1000)
    prompts = list(islice(asked.prompts(), 6))
    assert [len(prompt) for prompt in prompts] == [40, 10] * 3
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    first, *others = prompts
    for prompt in others:
        kept = min(len(prompt), len(first)) // 2
        assert prompt[:kept] == first[:kept] and prompt[kept] != first[kept]
        assert prompt[len(prompt) // 2 :] != first[len(prompt) // 2 : len(prompt)]
    assert len({tuple(prompt[len(prompt) // 2 :]) for prompt in prompts}) == 6
    # Every engine is asked the same, and another load nothing that the cache may hold of this one.
    assert list(islice(asked.prompts(), 6)) == prompts
    more = Load(clients=3, lengths=(40, 10), shared=0.5, new_tokens=4, requests=1, vocabulary=1000)
    assert next(more.prompts())[:20] != first[:20]


@dataclass
class Answering:
    """Stands in for vLLM: a step takes so many seconds and gives every request a token.

    A request's first token comes `wait` steps after it was asked. What was dropped is told of once more, later.
    """

    second: float
    wait: int
    now: float = 0.0
    held: dict[str, dict[str, Any]] = field(default_factory=dict)
    most: int = 0
    stale: list[Any] = field(default_factory=list)
    asked: ClassVar[list[int]] = []

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        assert name not in self.held
        self.asked.append(params.max_tokens)
        self.held[name] = {"waits": self.wait, "tokens": 0, "prompt": prompt, "until": params.max_tokens}

    def step(self) -> list[Any]:
        self.now += self.second
        self.most = max(self.most, len(self.held))
        outputs, self.stale = self.stale, []
        for name, one in list(self.held.items()):
            if one["waits"] > 1:
                one["waits"] -= 1
                continue
            one["tokens"] += 1
            done = one["tokens"] == one["until"]
            answer = SimpleNamespace(token_ids=[0] * one["tokens"])
            outputs.append(
                SimpleNamespace(
                    request_id=name, outputs=[answer], finished=done, prompt_token_ids=one["prompt"],
                    num_cached_tokens=len(one["prompt"]) // 4,
                )
            )  # fmt: skip
            if done:
                del self.held[name]
        return outputs

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            one, answer = self.held.pop(name), SimpleNamespace(token_ids=[0])
            told = {"finished": True, "prompt_token_ids": one["prompt"], "num_cached_tokens": 0}
            self.stale.append(SimpleNamespace(request_id=name, outputs=[answer], **told))

    def has_unfinished_requests(self) -> bool:
        return bool(self.held)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that answer by a clock of their own."""
    inner: list[Answering] = []

    def start(engine: Any, options: Any, **settings: Any) -> None:
        # A policy's step takes half of stock's.
        inner.append(Answering(second=0.5 if options is None else 0.25, wait=3))
        shut = SimpleNamespace(shutdown=lambda: None)
        inner[-1].engine_core = shut  # type: ignore[attr-defined]
        engine.llm, engine.facts = SimpleNamespace(llm_engine=inner[-1]), {"tokens": 10_000}

    monkeypatch.setattr(load.Engine, "__init__", start)
    monkeypatch.setattr(load.time, "perf_counter", lambda: inner[-1].now)
    monkeypatch.setattr(load, "request_for", lambda prompt, tokens: (prompt, SimpleNamespace(max_tokens=tokens)))
    monkeypatch.setattr(Answering, "asked", [])
    monkeypatch.setattr(sys.modules["saccade.cli.bench"], "find_spec", lambda name: object())
    monkeypatch.setattr(engines, "prepare_process", lambda served: None)
    monkeypatch.setattr(machine, "read_bandwidth", lambda device: 100.0)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)


def test_what_counts_begins_when_clients_are_out_of_step() -> None:
    engine = LoadedEngine(None)
    asked = Load(clients=4, lengths=(8,), shared=0.0, new_tokens=8, requests=10, vocabulary=50)
    served = engine.serve(asked)
    # First answers differ in length, all others do not.
    assert Answering.asked == [2, 4, 6, 8] + [8] * (len(Answering.asked) - 4)
    inner: Any = engine.llm.llm_engine
    assert inner.most == 4 and not inner.held
    # Three steps to the first token and seven to the last, whoever else is served.
    assert (set(served.firsts), set(served.gaps)) == ({1.5}, {0.5})
    # Answered in step 4, 6, 8 and 10, and every ten from there on: the tenth that counts is in step 36.
    assert (served.requests, served.seconds) == (10, (36 - 10) * 0.5)
    assert served.tokens == len(served.firsts) + len(served.gaps) == 20 + 22 + 22 + 20
    assert (served.prompt_tokens, served.cached_tokens) == (80, 20)


def test_beside_a_stream_clients_answer_on_and_its_prompts_count() -> None:
    asked = Load(2, lengths=(8, 4), shared=0.0, new_tokens=40, requests=5, vocabulary=50, stream=0.5)
    served = LoadedEngine(None).serve(asked)
    # A prompt every two seconds, four steps, from the clients' first tokens on; each is answered three steps later.
    assert Answering.asked == [40, 40, *[1] * 5]
    assert (served.requests, served.seconds) == (5, 5 * 2 + 3 * 0.5)
    assert (set(served.firsts), set(served.gaps)) == ({1.5}, {0.5})
    assert (len(served.firsts), len(served.gaps)) == (5, 2 * 23) and served.tokens == 5 + 2 * 23
    row = row_of_load("stock", 2, served, asked.stream)
    assert row.pace == row.row_tokens_per_second == 2 != row.requests_per_second
    assert checked(stream=0.5, new_tokens=2048).most == 2 + 4
    with pytest.raises(SaccadeError, match="new-tokens=8 is too few: a client's answer ended"):
        LoadedEngine(None).serve(replace(asked, new_tokens=8))


def test_what_is_shared_is_in_the_cache_before_it_counts_and_clients_that_it_cannot_hold_wait() -> None:
    engine = LoadedEngine(None)
    served = engine.serve(Load(clients=1, lengths=(8, 16, 24), shared=0.5, new_tokens=2, requests=3, vocabulary=50))
    assert (len(Answering.asked), served.requests, served.prompt_tokens) == (3 + 3 + 1, 3, 48)
    job = checked(batches=["200"], new_tokens=8, requests=4)
    assert job.blocks(200) * job.block > 10_000
    results = job.run(lambda unit, results: None)
    assert ([row["clients"] for row in results["rows"]], results["notes"]) == ([200] * 3, [])


def test_rows_of_a_run_and_of_one_that_goes_on() -> None:
    job = checked(batches=["1,2"], new_tokens=8, requests=4)
    results = job.run(lambda unit, results: None)
    assert [(row["clients"], row["policy"]) for row in results["rows"]] == [
        (number, name) for number in (1, 2) for name in ("stock", "quest:budget=2048", "stock (last)")
    ]
    for row in results["rows"]:
        twice = 1 if row["policy"].startswith("stock") else 2
        assert row["over_stock"] == pytest.approx(twice)
        assert row["requests_per_second"] == row["requests"] / row["seconds"]
        assert (row["first_ms"], row["next_ms"], row["next_ms_p99"]) == (1500 / twice, 500 / twice, 500 / twice)
        assert (row["cached_share"], row["drift"], row["void"]) == (0.25, 0.0, False)
        assert row["row_tokens_per_second"] == 2 * twice and 32 <= row["prompt_tokens"] <= 64
    rows = [row for row in results["rows"] if (row["policy"], row["clients"]) != ("stock (last)", 2)]
    cut = {**results, "rows": rows}
    done: list[str] = []
    assert job.run(lambda unit, results: done.append(unit), before=cut)["rows"] == results["rows"]
    assert done == ["2 clients, stock (last)"]
    assert "\n".join(printed(load_table(results), 200)).count("2.00×") == 2


def test_the_file_has_the_fields_of_those_in_docs(invoke: Invoke, tmp_path: Path) -> None:
    file, told = tmp_path / "load.json", "--shared 0.5 --new-tokens 8 --requests 4 --policy quest --device cpu --json"
    assert invoke("serve", "--clients", "2", "--context", "64,32", *told.split(), file).exit_code == 0
    new, old = (json.loads(path.read_text()) for path in (file, RESULTS / "serve_clients_long_h200.json"))
    # Results of before have no rate of drafts, no stream and no tokens a second of a row.
    assert new["settings"].keys() == old["settings"].keys() | {"draft_rate", "stream", "quantization"}
    added = new["rows"][0].keys() - old["rows"][0].keys()
    assert new.keys() == old.keys() and added == {"row_tokens_per_second", "stream"}
    assert new["command"].startswith("python -m benchmarks")
    assert [row["clients"] for row in new["rows"]] == [2] * 3


def test_stock_that_differs_from_itself_makes_a_point_void() -> None:
    def row(policy: str, rate: float, number: int = 1) -> Any:
        seen = load.Served(seconds=10 / rate, requests=10, tokens=1, prompt_tokens=1, firsts=[1.0], gaps=[1.0, 2.0])
        return row_of_load(policy, number, seen)

    rows = beside_stock([row("stock", 1.0), row("quest", 2.0), row("stock (last)", 1.06), row("stock", 3.0, 2)])
    assert [one.void for one in rows] == [True, True, True, False]
    assert rows[1].over_stock == pytest.approx(2 / 1.03) and rows[1].drift == pytest.approx(0.06)
    assert (rows[3].over_stock, rows[3].drift) == (1.0, None)


def test_percentiles() -> None:
    assert percentiles([]) == (0, 0) and percentiles([0.5]) == (500, 500)
    every = [number / 1000 for number in range(101)]
    assert percentiles(every) == pytest.approx((50, 99)) and percentiles(every, 90) == pytest.approx((50, 90))


def test_lengths_are_drawn_once_and_grow_from_start_to_end() -> None:
    day = Day(4, 20, 65_536, 131_072, 0.25, (50, 800), 1000)
    drawn = [day.lengths(number) for number in range(50)]
    assert drawn == [day.lengths(number) for number in range(50)]
    answers = [answer for lengths in drawn for _, answer in lengths]
    # Spread evenly by their logarithms: a quarter of them in each fourth of 50 to 801, which is 16 times as long.
    for low, high in ((50, 100), (100, 200), (200, 400), (400, 801)):
        assert sum(low <= answer < high for answer in answers) / len(answers) == pytest.approx(0.25, abs=0.05)
    for lengths in drawn:
        assert (lengths[0][0], sum(lengths[-1])) == (65_536, 131_072)
        new = [later - sum(before) for before, (later, _) in pairwise(lengths)]
        assert 0 < max(new) - 1 <= min(new) <= max(new)


def test_prompts_are_all_that_was_said() -> None:
    first = []
    for number in range(2):
        talk, said, answer = DAY.conversation(number), list[int](), list[int]()
        for turn, (length, tokens) in enumerate(DAY.lengths(number)):
            prompt, wanted = talk.send(answer) if turn else next(talk)
            assert (len(prompt), wanted, prompt[: len(said)]) == (length, tokens, said)
            answer = [2000 + turn] * tokens
            said = prompt + answer
            first += [] if turn else [prompt]
    assert first[0][:10] == first[1][:10] and first[0][10] != first[1][10]
    # Another number of conversations shares nothing with these, nor does the short day before.
    for other in (replace(DAY, conversations=3), DAY.before(), replace(DAY.before(), conversations=1)):
        assert next(other.conversation(0))[0][:10] != first[0][:10]


def test_codes_are_told_before_they_are_asked_for(model_folder: Path) -> None:
    """Each prompt ends with a question for a code that stood in it, which no other asks for; and answers are judged."""
    day = replace(DAY, turns=4, start=600, end=1000, answers=(8, 16), shared=0.25, model=str(model_folder))
    asked, begun = [], []
    for number, script in enumerate(day.scripts):
        talk, answer, tokenizer = day.conversation(number), list[int](), script.tokenizer
        for turn, (length, tokens) in enumerate(day.lengths(number)):
            prompt, wanted = talk.send(answer) if turn else next(talk)
            assert (len(prompt), wanted) == (length, tokens)
            said = tokenizer.decode(prompt)
            found = re.search(r"What is the code of the (.+)\?\nAnswer", said[-120:])
            assert found is not None and said.endswith(f"The code of the {found[1]} is")
            (code,) = re.findall(rf"The code of the {found[1]} is (\d{{4}})\.", said)
            for text, right in ((f" {code}.", True), (f" {code}1", False), (f" not {code}", False)):
                assert script.right(turn, tokenizer(text, add_special_tokens=False)["input_ids"]) == right
            asked.append(found[1])
            begun += [] if turn else [prompt]
            answer = [0] * tokens
    assert len(set(asked[:4])) == len(set(asked[4:])) == 4
    assert right_of([[True, False], [True]]).startswith("2 of 3 (") and right_of([]) == "-"
    assert begun[0][:150] == begun[1][:150] and begun[0][150:] != begun[1][150:]


def test_a_day_is_counted_step_by_step() -> None:
    """A step takes half a second, a request's first token comes in the third."""
    seen = replay(LoadedEngine(None), DAY)
    assert Answering.asked[:4] == [4] * 4 and len(Answering.asked) == 4 + 6
    days, waits, decodes, ends = [DAY.lengths(number) for number in range(2)], set[int](), list[set[int]](), list[int]()
    for day in days:
        step = 0
        for _, tokens in day:
            waits |= {step + 1, step + 2, step + 3}
            decodes.append(set(range(step + 4, step + 3 + tokens)))
            step += 2 + tokens
        ends.append(step)
    some = set[int]().union(*decodes)
    assert seen.seconds == 0.5 * max(ends)
    assert (seen.decode_seconds, seen.decode_tokens) == (0.5 * len(some), sum(map(len, decodes)))
    alone = sum(len(one - waits) for one in decodes)
    assert (seen.alone_seconds, seen.alone_tokens) == (0.5 * len(some - waits), alone)
    assert (seen.firsts, set(seen.gaps)) == ([1.5] * 6, {0.5})
    assert seen.tokens == len(seen.gaps) + 6 == sum(tokens for day in days for _, tokens in day)
    assert seen.prompts == [sum(day[turn][0] for day in days) for turn in range(3)]
    assert seen.cached == [sum(day[turn][0] // 4 for day in days) for turn in range(3)]


def test_rows_of_a_day_and_of_one_that_goes_on(invoke: Invoke, tmp_path: Path) -> None:
    told = "agent --conversations 2 --start 40 --end 100 --turns 3 --answers 4,16 --policy quest --device cpu --json"
    file = tmp_path / "day.json"
    assert invoke(*told.split(), file).exit_code == 0
    found = json.loads(file.read_text())
    rows = found["rows"]
    assert [row["policy"] for row in rows] == ["stock", "quest:budget=2048", "stock (last)"]
    for row, over in zip(rows, (1, 2, 1), strict=True):
        assert [row[name] for name in ("over_stock", "alone_over_stock", "day_over_stock")] == pytest.approx([over] * 3)
        assert (row["drift"], row["void"], row["answers"], row["first_ms_p90"]) == (0, False, 6, 1500 / over)
        assert row["tokens_per_second"] == (row["tokens"] - 6) / row["decode_seconds"]
        assert row["cached_share"] == pytest.approx(fmean(row["cached_tokens"]) / fmean(row["prompt_tokens"]))
    wanted = [4] * 4 + [tokens for number in (0, 1) for _, tokens in DAY.lengths(number)]
    assert sorted(Answering.asked) == sorted(3 * wanted)
    assert "\n".join(printed(day_table(found), 200)).count("2.00×") == 3
    file.write_text(json.dumps({**found, "rows": rows[:2]}))
    assert invoke(*told.split(), file, "--resume").exit_code == 0
    assert json.loads(file.read_text())["rows"] == rows and len(Answering.asked) == 4 * 10
