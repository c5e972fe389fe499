"""Budget below the context: every set in every way of generating is the oracle's, and the ways agree."""

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import saccade
from forcing import sparse_below_the_budget
from saccade.checkpoints.shape import shape_of
from saccade.types import KVView, Selection

from . import tiny
from .checking import OracleObserver
from .ways import BARE, NEW, WAYS, by_kind, generate, offered, paired

BUDGET = 9
KINDS = ("quest", *BARE)

SAME_AS_GREEDY = offered(
    "chunked prefill",
    "prompt lookup",
    "assisted",
    "static cache",
    "prefilled plain cache",
    "embeddings",
    "by hand",
    "by hand, static",
)

STEPS = {"several turns": 2 * (NEW - 1), "new turn alone": 2 * (NEW - 1)}
"""Decode steps where it is not `NEW - 1`: the first token of every `generate` comes from its prompt, which is dense."""

SPECULATIVE = offered("prompt lookup", "assisted")


@functools.cache
def run(policy: str, way: str) -> tuple[torch.Tensor, saccade.RunStats, OracleObserver]:
    spec = tiny.spec(policy, BUDGET)
    checker = OracleObserver(spec)
    with saccade.sparsify(tiny.llama(), spec, observers=(checker,)) as attached:
        return WAYS[way](tiny.llama()), attached.stats(), checker


@pytest.mark.parametrize(("policy", "way"), by_kind(tiny.SPARSE))
def test_sets_are_the_oracles(policy: str, way: str) -> None:
    """Through beams that reorder rows, drafts that are cropped, chunks, turns, padding and static buffers."""
    _, stats, checker = run(policy, way)
    assert checker.seen and stats.share_attended < 1
    if way in SPECULATIVE:
        assert stats.steps >= NEW - 1  # rejected drafts decode too
    else:
        assert stats.steps == STEPS.get(way, NEW - 1)


@pytest.mark.parametrize(("policy", "dtype"), paired(KINDS, [torch.bfloat16, torch.float16]), ids=str)
def test_sets_are_the_oracles_in_half_precision(policy: str, dtype: torch.dtype) -> None:
    """Scores come from the rounded keys of the cache, in float32."""
    spec = tiny.spec(policy, BUDGET)
    checker = OracleObserver(spec)
    with saccade.sparsify(model := tiny.fresh().to(dtype), spec, observers=(checker,)):
        generate(model, **tiny.padded([30, 7, 19]))
    assert checker.seen


@pytest.mark.parametrize(("policy", "way"), by_kind(tiny.SPARSE, SAME_AS_GREEDY))
def test_ways_agree_with_plain_greedy(policy: str, way: str) -> None:
    """Speculation verifies several sparse positions at once; each must choose for itself, as if it came alone."""
    plain, _, alone = run(policy, "greedy")
    tokens, _, checker = run(policy, way)
    assert tokens[:, -NEW:].tolist() == plain[:, -NEW:].tolist()
    # Drafts that were rejected are in `seen` only until the accepted token at that length overwrites them.
    for key, sets in alone.seen.items():
        assert checker.seen[key] == sets


def test_speculation_rejects_some_and_accepts_some() -> None:
    """More positions than tokens, and with an assistant fewer calls than tokens: else nothing above would be tested."""
    for way in SPECULATIVE:
        calls: list[int] = []
        hook = tiny.llama().register_forward_pre_hook(
            lambda module, args, kwargs, calls=calls: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        with saccade.sparsify(tiny.llama(), tiny.spec("quest", BUDGET)):
            WAYS[way](tiny.llama())
        hook.remove()
        assert sum(calls) > 30 + NEW - 1 and (way == "prompt lookup" or len(calls) < NEW), way


@pytest.mark.parametrize(("policy", "padding"), paired(KINDS, [True, False]))
@torch.no_grad()
def test_several_positions_at_once_are_one_by_one(policy: str, padding: bool) -> None:
    """`run.decoding()`: sets equal, logits equal within float32 rounding."""
    batch = (
        tiny.padded([30, 12]) if padding else {"input_ids": tiny.prompt(), "attention_mask": torch.ones(1, 30).long()}
    )
    new = tiny.prompt(6, rows=batch["input_ids"].shape[0], seed=9)
    mask = torch.cat((batch["attention_mask"], torch.ones_like(new)), dim=1)
    results = []
    for widths in ([6], [1] * 6, [1, 3, 2]):
        spec = tiny.spec(policy, BUDGET)
        checker = OracleObserver(spec)
        with saccade.sparsify(tiny.llama(), spec, observers=(checker,)) as attached:
            cache = tiny.llama()(**batch, use_cache=True).past_key_values
            logits, done = [], 0
            with attached.decoding():
                for width in widths:
                    step = new[:, done : done + width]
                    done += width
                    seen = mask[:, : 30 + done]
                    logits.append(tiny.llama()(step, attention_mask=seen, past_key_values=cache).logits)
            assert attached.stats().steps == 6
        results.append((torch.cat(logits, dim=1), checker.seen))
    for logits, seen in results[1:]:
        assert seen == results[0][1]
        # Logits of order 10 through four float32 layers: some hundred roundings of 2**-24 each.
        torch.testing.assert_close(logits, results[0][0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", ["quest", "tidal, rectified"])
@torch.no_grad()
def test_generate_inside_decoding_reads_sparsely_what_the_cache_lacks(policy: str) -> None:
    """The prompt's last tokens decode as in a hand-written loop; without `decoding()` they are prompt."""
    ids, spec = tiny.prompt(30), tiny.spec(policy, BUDGET)
    with saccade.sparsify(tiny.llama(), spec) as attached:
        cache = tiny.llama()(ids[:, :20], use_cache=True).past_key_values
        with attached.decoding():
            for token in ids[:, 20:-1].T:
                tiny.llama()(token[None], past_key_values=cache)
            told = generate(tiny.llama(), input_ids=ids, past_key_values=cache)
        steps, read = attached.stats().steps, int(cache.get_seq_length())
    assert read == 30 + NEW - 1
    with saccade.sparsify(tiny.llama(), spec) as attached:
        cache = tiny.llama()(ids[:, :20], use_cache=True).past_key_values
        with attached.decoding():
            by_hand = ids
            for position in range(20, 30 + NEW - 1):
                logits = tiny.llama()(by_hand[:, position : position + 1], past_key_values=cache).logits[:, -1]
                if position >= 29:
                    by_hand = torch.cat((by_hand, logits.argmax(-1)[None]), dim=1)
        assert steps == attached.stats().steps
    assert told.tolist() == by_hand.tolist()


@pytest.mark.parametrize("policy", KINDS)
@torch.no_grad()
def test_everything_decoding_from_the_first_token(policy: str) -> None:
    """Sparse-only, as in ReSA's protocol: no prompt at all; padding has no query of its own."""
    spec = tiny.spec(policy, BUDGET)
    with saccade.sparsify(tiny.llama(), spec, observers=(OracleObserver(spec),)) as attached, attached.decoding():
        alone = tiny.llama()(tiny.prompt(20)).logits
        assert attached.stats().steps == 20
    batch = tiny.padded([26, 20])
    batch["input_ids"][1, 6:] = tiny.prompt(20)[0]
    # Page bounds depend on absolute positions, so the padded row's must start where its tokens do.
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with saccade.sparsify(tiny.llama(), spec) as attached, attached.decoding():
        together = tiny.llama()(**batch, position_ids=positions).logits
    assert together.isfinite().all()
    torch.testing.assert_close(together[1:, 6:], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", KINDS)
def test_shortcut_changes_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense shortcut below the budget is only a shortcut, also where a batch or a text grows across it."""
    chosen: list[int] = []
    kind = type(saccade.Policy.from_spec(tiny.spec(policy)).plan(shape_of(tiny.llama().config)).selector)
    select = kind.select

    def selecting(self: Any, q: torch.Tensor, kv: KVView, *given: Any) -> Selection:
        chosen.append(kv.rows.max_len)
        return select(self, q, kv, *given)

    monkeypatch.setattr(kind, "select", selecting)
    budget = 33
    tokens, shortest = [], []
    for path in (nullcontext(), sparse_below_the_budget()):
        with path, saccade.sparsify(tiny.llama(), tiny.spec(policy, budget)):
            tokens.append(generate(tiny.llama(), **tiny.padded([30, 7, 19])).tolist())
        shortest.append(min(chosen))
    assert tokens[0] == tokens[1]
    assert shortest == [budget + 1, 31]
