"""Questions as rows of one batch against the same asked alone; what is asked leaves no trace in layers of any kind."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import saccade
from adapters import tiny
from adapters.test_layer_kinds import HYBRIDS, REFUSED, WINDOW, hybrid, kinds
from methods import oracles
from saccade.checkpoints.shape import shape_of
from saccade.eval import comparison, reader
from saccade.eval.comparison import Comparison
from saccade.eval.context import Context, Question, built_in_contexts
from saccade.eval.gaze import BINS
from saccade.eval.reader import Reader

POLICIES = ["less_is_more:reselect=2,budget=16", "quest:page=4,budget=16", "streaming:budget=32"]
POLICIES += ["lychee_cluster:budget=64", "resa:page=8,min_pages=2,rectify=4"]
SHARED = 2


@dataclass
class Kept:
    """What a comparison writes, question by question."""

    lines: dict[tuple[str, str, str], list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, name: str, line: dict[str, Any]) -> None:
        asked = line.get("question") or str(line["depth"])
        self.lines.setdefault((name, line["spec"], asked), []).append(line)


def asked_of(text: Sequence[int]) -> tuple[Question, ...]:
    """Questions and answers of all lengths, with equal first tokens; of one nobody knows where the answer lies."""
    made = []
    for number, (size, longest) in enumerate([(9, 2), (3, 6), (6, 1), (4, 5), (9, 4)]):
        tokens = (5, 7, *text[11 * number : 11 * number + size])
        span = None if number == 3 else (20 * number + 3, 20 * number + 6)
        made.append(Question(tokens, f"{number}?", "", lambda _: 1.0, longest, span, float(number), number == 1))
    return tuple(made)


@pytest.fixture(scope="module")
def context(tokenizer: Any) -> Context:
    text = built_in_contexts(tokenizer, length=1024, limit=1, positions=4096, seed=0)[0].tokens[:230]
    return Context(text, asked_of(text))


def compared(model: Any, tokenizer: Any, context: Context, spec: str) -> tuple[Kept, dict[str, Any], list[str]]:
    kept, specs = Kept(), [saccade.Policy.from_spec(one) for one in ("dense", spec)]
    run = Comparison(model, tokenizer, [context], specs, kept)  # type: ignore[arg-type]  # has the one method
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "workers_for", lambda *_, **__: 1)
        run.run(lambda _: None)
    return kept, {row["spec"]: row for row in run.rows()}, run.notes


@dataclass
class Looking:
    """An observer that keeps, step by step and layer by layer, what heads attended to, and both recalls of sets."""

    length: int
    span: tuple[int, int]
    shares: dict[int, list[list[float]]] = field(default_factory=dict)
    recalls: dict[int, list[list[tuple[float, float]]]] = field(default_factory=dict)
    touched: list[tuple[set[int], bool]] = field(default_factory=list)
    looks: bool = False

    def begin(self) -> None:
        """A token is fed."""
        for kept in (self.shares, self.recalls):
            for steps in kept.values():
                steps.append([])  # type: ignore[attr-defined]  # a list of lists either way

    def observe(self, layer: int, span: Any, q: torch.Tensor, kv: Any, selection: Any, softmax: Any) -> None:
        tokens, group = int(kv.rows.seq_lens[0]), q.shape[1] // kv.k.shape[2]
        keys = kv.k[0, :tokens].transpose(0, 1).double().numpy()
        queries = q[0].double().numpy()
        sets = [list(range(tokens)) for _ in queries]
        if selection is not None:
            per = len(queries) // selection.groups
            for head in range(len(queries)):
                units = [unit for unit in selection.ids[0, head // per].tolist() if unit >= 0]
                sets[head] = [at for u in units for at in range(u * selection.unit, (u + 1) * selection.unit)]
                sets[head] = [at for at in sets[head] if at < tokens]
        self.shares.setdefault(layer, [[]])[-1] += [len(one) / tokens for one in sets]
        if not self.looks:
            return
        recalls = self.recalls.setdefault(layer, [[]])
        if selection is None:
            return
        mass = oracles.attention_recall(queries, keys, sets, softmax.scale)
        for head, one in enumerate(sets):
            scores = (keys[head // group] @ queries[head]).tolist()
            own = oracles.best(scores, range(tokens), len(one))
            recalls[-1].append((mass[head], len({*own} & {*one}) / len(one)))
            bins = {at * BINS // self.length for at in one if at < self.length}
            self.touched.append((bins, any(self.span[0] <= at < self.span[1] for at in one)))


@dataclass
class Alone:
    said: list[int]
    seen: Looking
    passes: int


def alone(model: Any, tokenizer: Any, context: Context, question: Question, spec: str, skipped: int) -> Alone:
    """A question in a cache of its own; shares are kept behind its first `skipped` tokens."""
    seen, cache = Looking(len(context.tokens), question.value_span or (0, 1)), DynamicCache(config=model.config)
    said, fed = list[int](), list(question.tokens)
    with torch.inference_mode(), saccade.sparsify(model, spec, tokenizer=tokenizer, observers=[seen]) as run:
        model(torch.tensor([context.tokens]), past_key_values=cache)
        with run.decoding():
            for place, token in enumerate(fed):
                seen.looks = place >= len(question.tokens) - 1
                seen.begin()
                at = torch.tensor([[len(context.tokens) + place]])
                logits = model(torch.tensor([[token]]), past_key_values=cache, position_ids=at).logits
                if place < skipped:
                    seen.shares.clear()
                if seen.looks:
                    said.append(int(logits[0, -1].argmax()))
                    text = tokenizer.decode(said)
                    ends = question.sentence and ("." in text or "\n" in text.lstrip())
                    if said[-1] != tokenizer.eos_token_id and len(said) < question.longest and not ends:
                        fed.append(said[-1])
        return Alone(said, seen, run.stats().dense_passes)


def mean_share(asked: Sequence[Alone]) -> float:
    """Over steps, layers and heads of all questions; a dense pass attends to everything."""
    layers = {layer for one in asked for layer in one.seen.shares}
    steps = {layer: [fmean(s) for one in asked for s in one.seen.shares.get(layer, []) if s] for layer in layers}
    count, passes = len(next(iter(steps.values()))), sum(one.passes for one in asked)
    return (fmean(map(fmean, steps.values())) * count + passes) / (count + passes)


def check(model: Any, tokenizer: Any, context: Context, spec: str) -> list[str]:
    """Hold what is written against questions asked alone; gives the notes."""
    kept, rows, notes = compared(model, tokenizer, context, spec)
    spec = str(saccade.Policy.from_spec(spec))
    skipped = 0 if "rectify" in spec else SHARED
    asked = [
        alone(model, tokenizer, context, question, spec, skipped if number else 0)
        for number, question in enumerate(context.questions)
    ]
    for question, one in zip(context.questions, asked, strict=True):
        (sample,) = kept.lines["samples.jsonl", spec, question.asked]
        end = one.said[-1] == tokenizer.eos_token_id
        assert sample["answer"] == tokenizer.decode(one.said[: len(one.said) - end]).strip()
        assert sample["tokens"] == len(one.said)
        # A dense pass is no step whose sets anybody sees.
        own = {layer: [step for step in seen if step] for layer, seen in one.seen.recalls.items()}
        steps = kept.lines.get(("recall.jsonl", spec, question.asked), [])
        assert [line["step"] for line in steps] == list(range(max(map(len, own.values()), default=0)))
        for layer, values in own.items():
            found = [line["attention_recall"][layer] for line in steps], [line["token_recall"][layer] for line in steps]
            if values:
                for measure in (0, 1):
                    wanted = [fmean(head[measure] for head in heads) for heads in values]
                    # Lines are rounded to four digits; masses are float32 softmaxes of rows of 240.
                    assert found[measure] == pytest.approx(wanted, abs=7e-5), (layer, measure)
            else:
                assert {*found[0], *found[1]} <= {None}
        sets = one.seen.touched
        if question.value_span is None or not sets:
            assert sample["fact_held"] is None and ("gaze.jsonl", spec, str(question.depth)) not in kept.lines
            continue
        assert sample["fact_held"] == pytest.approx(fmean(held for _, held in sets), abs=1e-6)
        (gaze,) = kept.lines["gaze.jsonl", spec, str(question.depth)]
        bins = [fmean(number in touched for touched, _ in sets) for number in range(BINS)]
        assert gaze["bins"] == pytest.approx(bins, abs=6e-4)  # rounded to three digits
    assert len({len(one.said) for one in asked}) > 2, "answers of one length prove little"
    # A float32 division per head and step.
    assert rows[spec]["share_attended"] == pytest.approx(mean_share(asked), abs=1e-6)
    assert rows["dense"]["share_attended"] == 1 and 0 < rows[spec]["share_attended"] < 1
    assert rows[spec]["n"] == len(context.questions) and rows[spec]["ms_per_token"] > 0
    return notes


@pytest.mark.parametrize(("spec", "rows"), [(spec, 5 - 3 * (place % 2)) for place, spec in enumerate(POLICIES)])
def test_questions_together_are_what_each_is_alone(
    model: Any, tokenizer: Any, context: Context, spec: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one batch; and two at a time, so that the last batch is filled up."""
    widths = set[int]()
    monkeypatch.setattr(comparison, "rows_that_fit", lambda model, tokens, longest, asked, workers=1: min(asked, rows))
    fed = reader.Reader.feed_rows
    monkeypatch.setattr(reader.Reader, "feed_rows", lambda one, *given: widths.add(len(given[0])) or fed(one, *given))
    notes = check(model, tokenizer, context, spec)
    assert widths == {1, rows}
    short = "memory is short of 5 copies of a text of 230 tokens: 2 of its questions are decoded together"
    assert notes == [short] * (rows < 5)


KINDS = [("gemma3_text", "quest:page=4,budget=8,dense_layers=1,rectify=3")]
KINDS += [("qwen3_next", "exact_topk:budget=9")] if "qwen3_next" in HYBRIDS else []


@pytest.mark.parametrize(("name", "spec"), KINDS)
def test_layers_that_no_crop_brings_back(tokenizer: Any, name: str, spec: str) -> None:
    model = hybrid(name, vocab_size=2048)
    text = tuple(torch.randint(2, 64, (120,), generator=torch.Generator().manual_seed(2)).tolist())
    check(model, tokenizer, Context(text, asked_of(text)), spec)
    assert shape_of(model.config).kinds


def test_what_is_verified_is_asked_one_at_a_time(model: Any, tokenizer: Any, context: Context) -> None:
    """Its drafts, and the passes over them, are those of each question; its answers are dense attention's."""
    spec = str(saccade.Policy.from_spec("quest:page=4,budget=16,rectify=3:verify"))
    kept, rows, _ = compared(model, tokenizer, context, spec)
    shares, steps = list[float](), list[int]()
    for question in context.questions:
        (dense,), (said,) = (kept.lines["samples.jsonl", one, question.asked] for one in ("dense", spec))
        assert (said["answer"], said["tokens"]) == (dense["answer"], dense["tokens"])
        read = reader.Reader(model, context.tokens)
        with torch.inference_mode(), saccade.sparsify(model, spec) as run, run.decoding():
            read.feed(question.tokens[:-1])
            token = int(read.feed(question.tokens[-1:]).argmax())
            for _ in range(said["tokens"] - 1):
                token = int(read.feed([token]).argmax())
            shares.append(run.stats().share_attended or 0.0)
            steps.append(run.stats().steps)
    wanted = sum(share * count for share, count in zip(shares, steps, strict=True)) / sum(steps)
    assert rows[spec]["share_attended"] == pytest.approx(wanted, abs=1e-6) and 0 < wanted < 1


TEXT = tiny.prompt(30)[0].tolist()  # several windows long
ONE, OTHER = [5, 7, 9, 11, 2], [5, 7, 3, 4, 6]
THREE = ["dense", "streaming:budget=9", "exact_topk:budget=9,dense_layers=1"]
EXPERTS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8}


def model_of(name: str) -> Any:
    """Of each kind of other layers; MiniMax keeps recurrent states in a cache of its own."""
    if name != "minimax":
        return hybrid(name)
    model = tiny.fresh("minimax", num_hidden_layers=6, layer_types=kinds("linear_attention"), **EXPERTS)
    model.config._experts_implementation = "eager"
    return model


OTHER_LAYERS = ("gemma3_text", "gemma3n_text", "llama4_text", "qwen3_next")
NAMES = [*(name for name in OTHER_LAYERS if name in HYBRIDS), "minimax"]
"""Windows, layers that share, chunks, recurrent states in layers, and in the cache itself."""
RECTIFIED = "quest:page=4,budget=8,dense_layers=1,rectify=3"
CASES = [(name, THREE[place % 3], 1 + 2 * (place % 2)) for place, name in enumerate(NAMES)]
CASES += [(name, THREE[(place + 1) % 3], 3 - 2 * (place % 2)) for place, name in enumerate(NAMES)]
CASES += [(name, RECTIFIED, 3) for name in NAMES if name not in ("qwen3_next", "minimax")]


@pytest.mark.skipif("qwen3_next" not in REFUSED, reason="this transformers keeps all caches in layers")
def test_a_cache_without_layers_is_refused() -> None:
    with pytest.raises(saccade.UnsupportedModelError, match=REFUSED["qwen3_next"]):
        Reader(hybrid("qwen3_next"), TEXT)


@pytest.mark.parametrize(("name", "policy", "rows"), CASES)
def test_what_is_asked_leaves_no_trace(name: str, policy: str, rows: int) -> None:
    """Each of the models with one row and several, under two policies; what can be rectified too."""
    model = model_of(name)

    def last(*asked: list[int]) -> torch.Tensor:
        """Logits of the last question to a fresh reader."""
        reader = Reader(model, TEXT)
        if rows > 1:
            reader.repeat(rows)
        with saccade.sparsify(model, policy) as run, run.decoding():
            for tokens in asked:
                found = torch.cat([reader.feed_rows([tokens] * rows, 0), reader.feed_rows([[3]] * rows, 0)], dim=1)
                assert reader.decoded == len(tokens) + 1
                reader.crop()
                assert reader.decoded == 0
        return found

    alone = last(OTHER)
    assert torch.equal(last(ONE, OTHER), alone) and torch.equal(last(OTHER, ONE, ONE, OTHER), alone)
    assert not torch.equal(last(ONE), alone)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_decoded_densely_is_what_stock_says(name: str) -> None:
    """In one pass without a cache, in float64; Qwen3-Next computes recurrent states in float32, by its cache's way."""
    model = model_of(name).double()
    reader = Reader(model, TEXT)
    with saccade.sparsify(model, "dense") as run, run.decoding():
        reader.feed(ONE)
        reader.crop()
        found = reader.feed_rows([OTHER], 0)[0]
    with torch.no_grad():
        expected = model(torch.tensor([[*TEXT, *OTHER]]), use_cache=False).logits[0, len(TEXT) :]
        if name == "qwen3_next":
            held = model(torch.tensor([TEXT]), use_cache=True).past_key_values
            expected = model(torch.tensor([OTHER]), past_key_values=held).logits[0]
    # Some hundred sums of numbers around 1, in the order of whoever adds them; attention itself is float32 in ours.
    torch.testing.assert_close(found, expected, rtol=0, atol=float(expected.abs().max()) * 200 * 2.0**-24)


@pytest.mark.parametrize(("name", "policy"), [(name, THREE[place % 3]) for place, name in enumerate(NAMES)])
def test_a_marked_place_is_come_back_to(name: str, policy: str) -> None:
    model = model_of(name)
    reader = Reader(model, TEXT)
    rest: list[torch.Tensor] = []
    fresh_ones = [Reader(model, TEXT) for _ in range(2)]
    with saccade.sparsify(model, policy) as run, run.decoding():
        for tokens, fresh in zip((ONE, OTHER), fresh_ones, strict=True):
            fresh.feed(tokens[:SHARED])
            rest.append(fresh.feed_rows([tokens[SHARED:]], 0))
        for _ in range(2):
            reader.feed(ONE[:SHARED])
            reader.mark()
            for tokens, expected in zip((ONE, OTHER), rest, strict=True):
                assert torch.equal(reader.feed_rows([tokens[SHARED:]], 0), expected)
                reader.crop(SHARED)
            reader.crop()
        reader.feed(ONE)
        with pytest.raises(saccade.UnsupportedModelError, match=r"have forgotten .* 2 tokens behind the text"):
            reader.crop(SHARED)
        reader.crop()


def test_copies_are_of_what_layers_hold_and_not_of_the_text() -> None:
    """A window's keys are a view of the whole prompt's; a copy of that would be as large as the text."""
    reader = Reader(hybrid("gemma3_text"), tiny.prompt(90)[0].tolist())
    (place,) = reader._places.values()
    kept = [one for held in place.held for one in held.values() if isinstance(one, torch.Tensor) and one.dim() == 4]
    token = 2 * 8 * 4  # 2 heads of 8 numbers, float32
    assert [one.untyped_storage().nbytes() for one in kept] == [token * (WINDOW - 1)] * 4  # keys, values, 2 layers
