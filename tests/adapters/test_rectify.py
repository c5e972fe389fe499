"""Rectification inside plain generation: what was decoded sparsely is rewritten densely, or decided about densely."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

import saccade
from forcing import sparse_below_the_budget
from saccade.selection.clusters.index import ClusterIndex
from saccade.selection.scorers.page_bounds import PageBounds
from saccade.types import KVView, Rows

from . import tiny
from .ways import WAYS, generate

EVERY = 3
NEW = 14
SMALLEST = {
    "streaming": "streaming:budget=5",
    "quest": "quest:page=4,budget=4",
    "tidal": "tidal:reselect=3,dense_layers=1,budget=1",
    "less_is_more": "less_is_more:reselect=3,dense_layers=1,budget=6",
    "exact_topk": "exact_topk:dense_layers=1,budget=1",
    "resa": "resa:page=4,min_pages=1,ratio=0.01",
    "lychee_decode": "lychee_decode:roles=every:2,budget=1",
    "lychee_cluster": "lychee_cluster:sinks=2,chunk_min=2,chunk_max=4,dense_layers=1,budget={cluster}",
}
"""Every policy at its smallest legal budget; `cluster`: sinks + chunk_max + what rectification keeps in the buffer."""


def specs(every: int, mode: str = "overwrite") -> dict[str, str]:
    suffix = f",rectify={every}" + ("" if mode == "overwrite" else f":{mode}")
    return {name: spec.format(cluster=2 + 4 + every) + suffix for name, spec in SMALLEST.items()}


@functools.cache
def twin() -> PreTrainedModel:
    """The same weights, never attached."""
    return tiny.fresh("llama")


# --- overwrite ---------------------------------------------------------------------------------------------------


@contextmanager
def clean_cache_is_dense(run: saccade.Run, mask: torch.Tensor | None = None) -> Iterator[list[int]]:
    """After every forward call, the clean slots hold what a dense prefill of the same tokens gives; yields counts."""
    model, checked = tiny.llama(), []

    def check(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        session, cache = run._hook.slot[0], kwargs.get("past_key_values")
        if cache is None:
            return
        clean = min(session.state.history.clean, int(cache.get_seq_length()))
        ids = session.state.history.ids(0, clean)
        assert ids is not None
        visible = torch.ones_like(ids) if mask is None else _wider(mask, ids)
        with torch.no_grad():
            expected = twin()(ids, attention_mask=visible, position_ids=(visible.cumsum(-1) - 1).clamp(min=0))
        for layer, stock in zip(cache.layers, expected.past_key_values.layers, strict=True):
            for ours, theirs in ((layer.keys, stock.keys), (layer.values, stock.values)):
                real = visible.bool()[:, None, :, None]
                # Entries of order 1 through four float32 layers of width 32: the 1e-5 is some 100 roundings.
                difference = (ours[:, :, :clean] - theirs).masked_fill(~real, 0.0)
                assert difference.abs().max() <= 1e-5, f"{float(difference.abs().max())} at {clean} clean slots"
        checked.append(clean)

    handle = model.get_decoder().register_forward_hook(check, with_kwargs=True)
    try:
        yield checked
    finally:
        handle.remove()


def _wider(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The prompt's mask for every beam, and ones for what was generated."""
    rows = mask.repeat_interleave(ids.shape[0] // mask.shape[0], dim=0)
    return torch.nn.functional.pad(rows, (0, ids.shape[1] - mask.shape[1]), value=1)[:, : ids.shape[1]]


REWRITTEN_WAYS: dict[str, Callable[[PreTrainedModel], torch.Tensor]] = {
    "greedy": functools.partial(generate, max_new_tokens=NEW),
    "sampling": functools.partial(generate, max_new_tokens=NEW, do_sample=True, temperature=1.5),
    "beams": functools.partial(generate, max_new_tokens=NEW, num_beams=3, repetition_penalty=2.0),
    "several returned": functools.partial(generate, max_new_tokens=NEW, do_sample=True, num_return_sequences=3),
    "static cache": functools.partial(generate, max_new_tokens=NEW, cache_implementation="static"),
    "static cache, beams": functools.partial(
        generate, max_new_tokens=NEW, cache_implementation="static", num_beams=2, repetition_penalty=2.0
    ),
    "chunked prefill": functools.partial(generate, max_new_tokens=NEW, prefill_chunk_size=7),
    "assisted": WAYS["assisted"],
    "several turns": WAYS["several turns"],
    "by hand": lambda model: tiny.by_hand(model, tiny.prompt(), NEW),
    "by hand, static": lambda model: tiny.by_hand(
        model, tiny.prompt(), NEW, StaticCache(config=model.config, max_cache_len=60)
    ),
}


@pytest.mark.parametrize("way", REWRITTEN_WAYS)
@pytest.mark.parametrize("policy", SMALLEST)
def test_rewritten_keys_and_values_are_those_of_a_dense_prefill(policy: str, way: str) -> None:
    model = tiny.llama()
    with saccade.sparsify(model, specs(EVERY)[policy]) as run, clean_cache_is_dense(run) as checked:
        REWRITTEN_WAYS[way](model)
        done = run.stats()
    # Assistants send several tokens at once, so that a pass comes before there are `EVERY` to run again.
    least = 1 if way == "assisted" else EVERY
    assert done.dense_passes >= 1 and done.rectifications >= done.dense_passes * least
    assert max(checked) > 30


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("policy", SMALLEST)
def test_left_padded_rows_are_rewritten_too(policy: str, beams: int, static: bool) -> None:
    model, batch = tiny.llama(), tiny.padded([30, 7, 19])
    options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
    with (
        saccade.sparsify(model, specs(EVERY)[policy]) as run,
        clean_cache_is_dense(run, batch["attention_mask"]) as checked,
    ):
        generate(model, **batch, max_new_tokens=NEW, num_beams=beams, **options)
        assert run.stats().dense_passes >= 2
    assert max(checked) > 30


def test_the_phase_counts_from_the_prompt() -> None:
    """After `every` sparse steps the next call carries their tokens and its own; `generate` sees one position."""
    fed: list[int] = []
    seen: list[int] = []
    model = tiny.llama()
    with saccade.sparsify(model, specs(EVERY)["quest"]):
        hooks = [
            model.get_decoder().layers[0].register_forward_pre_hook(lambda m, a: fed.append(a[0].shape[1])),
            model.register_forward_hook(lambda m, a, output: seen.append(output.logits.shape[1])),
        ]
        generate(model, max_new_tokens=10)
        for hook in hooks:
            hook.remove()
    assert fed == [30, 1, 1, 1, EVERY + 1, 1, 1, 1, EVERY + 1, 1]
    assert seen[1:] == [1] * 9


def test_nothing_is_run_again_below_the_budget() -> None:
    """What was attended densely needs no rewriting, and the phase stays where it would be."""
    model = tiny.llama()
    with saccade.sparsify(model, "quest:page=4,budget=36,dense_layers=1,rectify=3") as run:
        generate(model, max_new_tokens=14)
        # 30 tokens of prompt, decoded ones at slots 30..42. Turns for a dense call come at 33, 37 and 41;
        # before 37 the longest row had 37 tokens, one more than the budget.
        assert run.stats().dense_passes == 2
    with saccade.sparsify(model, "quest:page=4,budget=200,rectify=3") as run:
        generate(model, max_new_tokens=14)
        assert run.stats().dense_passes == 0


@pytest.mark.parametrize("policy", SMALLEST)
def test_a_row_is_rectified_as_if_alone(policy: str) -> None:
    model, batch = tiny.llama(), tiny.padded([30, 17, 23])
    with saccade.sparsify(model, specs(EVERY)[policy]):
        together = generate(model, **batch, max_new_tokens=NEW)
        for row, mask in enumerate(batch["attention_mask"].bool()):
            alone = generate(model, input_ids=batch["input_ids"][row, mask][None], max_new_tokens=NEW)
            assert together[row, -NEW:].tolist() == alone[0, -NEW:].tolist()


def test_page_bounds_follow_what_was_rewritten() -> None:
    """Bounds of all pages equal those made anew from the cache after every call."""
    model = tiny.llama()

    def check(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        state, held = run._hook.slot[0].state, kwargs["past_key_values"]
        for layer, index in state.indexes._indexes.items():
            assert isinstance(index, PageBounds)
            covered = state.indexes._covered[layer]
            keys = held.layers[layer].keys[:, :, :covered]
            for page in range(-(-covered // 4)):
                tokens = keys[:, :, page * 4 : page * 4 + 4]
                assert torch.equal(index.lower[:, :, page], tokens.amin(2))
                assert torch.equal(index.upper[:, :, page], tokens.amax(2))
                checked.append(page)

    checked: list[int] = []
    with saccade.sparsify(model, specs(EVERY)["resa"]) as run:
        # Sparse calls only: after a rewriting one, the index waits for the next selection.
        hook = model.get_decoder().register_forward_hook(
            lambda m, a, k, o: check(m, a, k, o) if run._hook.slot[0].call.prompt == 0 else None, with_kwargs=True
        )
        generate(model, max_new_tokens=NEW)
        hook.remove()
        assert run.stats().dense_passes > 2
    assert checked


@pytest.mark.parametrize("mode", ["overwrite", "verify"])
@pytest.mark.parametrize("padding", [False, True])
def test_the_cluster_index_is_made_of_rewritten_keys(mode: str, padding: bool) -> None:
    """It equals the same build and the same lazy updates replayed on the keys as they are in the end."""
    model = tiny.llama()
    inputs = tiny.padded([30, 19]) if padding else {"input_ids": tiny.prompt()}
    cache = DynamicCache()
    with saccade.sparsify(model, specs(EVERY, mode)["lychee_cluster"]) as run:
        generate(model, **inputs, max_new_tokens=50, past_key_values=cache)
        session = run._hook.slot[0]
        checked = 0
        for layer, index in session.state.indexes._indexes.items():
            assert isinstance(index, ClusterIndex)
            keys, values = cache.layers[layer].keys.transpose(1, 2), cache.layers[layer].values.transpose(1, 2)
            kv = KVView(keys, values, _rows(inputs, keys.shape[1]))
            replayed = ClusterIndex.empty(index.settings, index.history, kv)
            for row, held in enumerate(index.rows):
                edges = held.edges.tolist()
                assert held.planted + 5 < held.chunks, "many lazy updates"
                # Nothing unclean has left the buffer.
                assert held.end + int(kv.rows.row_start[row]) <= session.state.history.clean
                replayed._plant(kv, row, edges[: held.planted + 1], held.seen)
                replayed._graft(kv, row, edges[held.planted :])
                for name, tensor in index._own(row).tensors().items():
                    assert torch.equal(tensor, getattr(replayed._own(row), name)), name
                    checked += 1
    assert checked


def _rows(inputs: dict[str, torch.Tensor], slots: int) -> Rows:
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    starts = (mask == 0).sum(1).tolist()
    table = torch.arange(len(starts), dtype=torch.int32)[:, None]
    return Rows.on_host(table, starts, [slots - start for start in starts])


def test_rectification_changes_what_is_generated() -> None:
    """Otherwise nothing above would be tested: a polluted cache gives other logits than a rewritten one."""
    logits = []
    # A window over decoded tokens: sinks and the current token alone are never polluted.
    for spec in ("streaming:budget=12,rectify=3", "streaming:budget=12"):
        with saccade.sparsify(tiny.llama(), spec), torch.no_grad():
            cache = DynamicCache()
            tiny.llama()(tiny.prompt(), past_key_values=cache)
            for token in tiny.prompt(9, seed=4)[0]:
                out = tiny.llama()(token[None, None], past_key_values=cache)
            logits.append(out.logits)
    assert (logits[0] - logits[1]).abs().max() > 1e-3


# --- verify ------------------------------------------------------------------------------------------------------

LONG = 200


@functools.cache
def dense_greedy(rows: tuple[int, ...] = ()) -> list[list[int]]:
    model = twin()
    inputs = tiny.padded(list(rows)) if rows else {"input_ids": tiny.prompt()}
    return generate(model, **inputs, max_new_tokens=LONG).tolist()


@pytest.mark.parametrize("policy", SMALLEST)
def test_verified_greedy_is_dense_greedy(policy: str) -> None:
    with saccade.sparsify(tiny.llama(), specs(4, "verify")[policy]) as run:
        tokens = generate(tiny.llama(), max_new_tokens=LONG)
        stats = run.stats()
    assert tokens.tolist() == dense_greedy()
    done = stats
    assert 0 < done.accepted < done.drafted <= 4 * done.dense_passes
    # Every token but the first comes from a dense pass or from a draft that stood.
    assert done.dense_passes + done.accepted == LONG - 1
    assert stats.acceptance_rate == pytest.approx(done.accepted / done.drafted)
    assert stats.tokens_per_dense_pass == pytest.approx((LONG - 1) / done.dense_passes)


@pytest.mark.parametrize("policy", SMALLEST)
def test_verified_batches_are_dense_batches(policy: str) -> None:
    rows = (30, 7, 19)
    with saccade.sparsify(tiny.llama(), specs(4, "verify")[policy]):
        tokens = generate(tiny.llama(), **tiny.padded(list(rows)), max_new_tokens=60)
    assert tokens.tolist() == [row[:90] for row in dense_greedy(rows)]


@pytest.mark.parametrize("policy", ["quest", "tidal", "resa"])
@pytest.mark.parametrize("rows", [(30,), (30, 7, 19)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_verified_sampling_is_stock_sampling(policy: str, rows: tuple[int, ...], seed: int) -> None:
    options: dict[str, Any] = {
        **tiny.padded(list(rows)),
        "max_new_tokens": 40,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 5,
    }

    def sampled(model: PreTrainedModel) -> list[list[int]]:
        torch.manual_seed(seed)
        return model.generate(**options).tolist()  # type: ignore[no-any-return]

    with saccade.sparsify(tiny.llama(), specs(4, "verify")[policy]) as run:
        ours = sampled(tiny.llama())
        assert run.stats().drafted > 0
    assert ours == sampled(twin())


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("mode", ["overwrite", "verify"])
def test_rows_may_end_at_different_times(mode: str, options: dict[str, Any]) -> None:
    batch = tiny.padded([30, 7, 19])
    plain = generate(twin(), **batch, max_new_tokens=40)[:, -40:]
    # A token that ends the rows one after the other, and none of them at once.
    firsts = {int(t): [row.tolist().index(t) if t in row.tolist() else 99 for row in plain] for t in plain.unique()}
    token = next(t for t, at in firsts.items() if len(set(at)) == 3 and min(at) > 2 and sorted(at)[1] < 99)
    ends = {"eos_token_id": token, "pad_token_id": 0, "max_new_tokens": 40, **options}
    expected = generate(twin(), **batch, **ends)
    policy = specs(4, mode)["quest"] if mode == "verify" else "quest:page=4,budget=200,rectify=3"
    with sparse_below_the_budget(), saccade.sparsify(tiny.llama(), policy) as run:
        assert generate(tiny.llama(), **batch, **ends).tolist() == expected.tolist()
        done = run.stats()
    assert done.dense_passes > 0
    if mode == "verify":
        # An ended row's padding is no rejection: else one dense pass per token would follow.
        assert done.accepted > 0


@pytest.mark.parametrize("mode", ["overwrite", "verify"])
def test_streaming_gives_every_token_once(mode: str) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None: ...

    streamer = Streamer()
    with saccade.sparsify(tiny.llama(), specs(4, mode)["tidal"]):
        tokens = generate(tiny.llama(), max_new_tokens=30, streamer=streamer)
    assert streamer.tokens == tokens[0].tolist()


def test_verify_in_a_static_cache_stops_at_its_end() -> None:
    with saccade.sparsify(tiny.llama(), specs(7, "verify")["quest"]) as run:
        tokens = generate(tiny.llama(), max_new_tokens=40, cache_implementation="static")
        assert run.stats().accepted > 0
    assert tokens.tolist() == [row[:70] for row in dense_greedy()]


def test_verify_by_hand_and_over_turns() -> None:
    with saccade.sparsify(tiny.llama(), specs(4, "verify")["quest"]):
        by_hand = tiny.by_hand(tiny.llama(), tiny.prompt(), 30)
        turns = WAYS["several turns"](tiny.llama())
        alone = WAYS["new turn alone"](tiny.llama())
    assert by_hand.tolist() == [row[:60] for row in dense_greedy()]
    assert turns.tolist() == WAYS["several turns"](twin()).tolist()
    assert alone.tolist() == WAYS["new turn alone"](twin()).tolist()


@torch.no_grad()
def test_a_cropped_cache_forgets_its_drafts() -> None:
    """What the user takes back and replaces must not meet the logits of the old draft."""
    model = tiny.llama()
    with saccade.sparsify(model, specs(4, "verify")["quest"]):
        cache = DynamicCache()
        token = model(tiny.prompt(), past_key_values=cache).logits[:, -1:].argmax(-1)
        following = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        cache.crop(-1)
        other = (token + 1) % 60 + 1
        model(other, past_key_values=cache)
        logits = model(following, past_key_values=cache).logits
    expected = twin()(torch.cat((tiny.prompt(), other, following), dim=1)).logits[:, -1:]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "cannot follow beams"),
        ({"prompt_lookup_num_tokens": 3}, "drafts by itself; prompt_lookup_num_tokens"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states is not available"),
    ],
    ids=str,
)
def test_verify_refuses_before_any_work(options: dict[str, Any], message: str) -> None:
    calls: list[int] = []
    with saccade.sparsify(tiny.llama(), specs(4, "verify")["quest"]):
        hook = tiny.llama().get_decoder().register_forward_pre_hook(lambda m, a: calls.append(1))
        with pytest.raises(saccade.UnsupportedModelError, match=message):
            generate(tiny.llama(), **options)
        hook.remove()
    assert not calls


@torch.no_grad()
def test_decoded_embeddings_are_refused() -> None:
    """Also as a new turn behind sparse steps, which would have to be run again together with it."""
    model = tiny.llama()
    embedded = model.get_input_embeddings()(tiny.prompt(8))
    with saccade.sparsify(model, specs(4)["quest"]):
        cache = DynamicCache()
        model(tiny.prompt(), past_key_values=cache)
        with pytest.raises(saccade.UnsupportedModelError, match="needs input_ids"):
            model(inputs_embeds=embedded[:, :1], past_key_values=cache)
        model(tiny.prompt(1), past_key_values=cache)
        with pytest.raises(saccade.UnsupportedModelError, match="needs input_ids"):
            model(inputs_embeds=embedded, past_key_values=cache)


@pytest.mark.parametrize(
    "options",
    [{"inputs_embeds": True}, {"output_hidden_states": True}, {"return_dict": False}, {"labels": True}],
    ids=str,
)
@torch.no_grad()
def test_calls_that_want_more_than_logits_are_dense(options: dict[str, Any]) -> None:
    """Drafts hold logits only, so such a call is run as the stock model would run it."""
    model, token = tiny.llama(), tiny.prompt(1, seed=3)
    given: dict[str, Any] = {"input_ids": token, **options}
    if "inputs_embeds" in options:
        given = {"inputs_embeds": model.get_input_embeddings()(token)}
    if "labels" in options:
        given["labels"] = token
    with saccade.sparsify(model, specs(4, "verify")["quest"]) as run:
        cache = DynamicCache()
        model(tiny.prompt(), past_key_values=cache)
        ours = model(**given, past_key_values=cache)
        assert run.stats().drafted == 0
    expected = twin()(torch.cat((tiny.prompt(), token), dim=1), output_hidden_states=True)
    logits = ours[0] if isinstance(ours, tuple) else ours.logits
    torch.testing.assert_close(logits, expected.logits[:, -1:], rtol=0, atol=1e-4)
    if "output_hidden_states" in options:
        torch.testing.assert_close(ours.hidden_states[-1], expected.hidden_states[-1][:, -1:], rtol=0, atol=1e-4)


# --- interruptions, other runs, other callers ---------------------------------------------------------------------


def interrupt(model: PreTrainedModel, layer: int, after: int) -> Any:
    """A hook that raises in the given layer, the `after`-th time it is reached."""
    calls = iter(range(after + 1))

    def stop(module: Any, args: Any) -> None:
        if next(calls, None) == after:
            raise KeyboardInterrupt

    return model.get_decoder().layers[layer].register_forward_pre_hook(stop)


@pytest.mark.parametrize("after", [0, 2, 4])
@pytest.mark.parametrize("layer", [0, 2])
@torch.no_grad()
def test_an_interrupted_draft_leaves_the_cache_as_it_was(layer: int, after: int) -> None:
    model, tokens = tiny.llama(), tiny.prompt(4, seed=3)
    with saccade.sparsify(model, specs(4, "verify")["quest"]):
        cache = DynamicCache()
        model(tiny.prompt(), past_key_values=cache)
        hook = interrupt(model, layer, after)
        with pytest.raises(KeyboardInterrupt):
            model(tokens[:, :1], past_key_values=cache)
        hook.remove()
        assert {int(held.get_seq_length()) for held in cache.layers} == {30}
        logits = [model(token[None, None], past_key_values=cache).logits for token in tokens[0]]
    expected = twin()(torch.cat((tiny.prompt(), tokens), dim=1)).logits[:, -4:]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("layer", [0, 2])
@torch.no_grad()
def test_an_interrupted_pass_is_made_up_for(layer: int) -> None:
    """The call after it finds the decoded tokens again, unclean as before."""
    model, tokens = tiny.llama(), tiny.prompt(9, seed=3)

    def decode(interrupted: bool) -> torch.Tensor:
        with saccade.sparsify(model, specs(EVERY)["quest"]) as run:
            cache = DynamicCache()
            model(tiny.prompt(), past_key_values=cache)
            logits = []
            for number, token in enumerate(tokens[0]):
                if interrupted and number == EVERY:
                    hook = interrupt(model, layer, 0)
                    with pytest.raises(KeyboardInterrupt):
                        model(token[None, None], past_key_values=cache)
                    hook.remove()
                logits.append(model(token[None, None], past_key_values=cache).logits)
            assert cache.get_seq_length() == 39 and run.stats().dense_passes == 2
            return torch.cat(logits, dim=1)

    torch.testing.assert_close(decode(True), decode(False), rtol=0, atol=1e-4)


def test_another_run_on_the_same_cache_makes_good_what_the_first_left() -> None:
    """Two `with` blocks, a turn each; what the first decoded is clean in the end."""
    model, cache = tiny.llama(), DynamicCache()
    with saccade.sparsify(model, "streaming:budget=12,rectify=32"):
        first = generate(model, max_new_tokens=12, past_key_values=cache)
    ids = torch.cat((first, tiny.prompt(7, seed=5)), dim=1)
    with saccade.sparsify(model, "quest:page=4,budget=4,rectify=32") as run:
        generate(model, input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, past_key_values=cache)
        assert run.stats().rectifications == 11
    with torch.no_grad():
        expected = twin()(ids).past_key_values
    for ours, stock in zip(cache.layers, expected.layers, strict=True):
        assert (ours.keys - stock.keys).abs().max() <= 1e-5 and (ours.values - stock.values).abs().max() <= 1e-5


@pytest.mark.parametrize("mode", ["overwrite", "verify"])
def test_by_hand_without_positions_then_generate(mode: str) -> None:
    model = tiny.llama()

    def mixed(model: PreTrainedModel) -> torch.Tensor:
        cache = DynamicCache()
        with torch.no_grad():
            ids = tiny.by_hand(model, tiny.prompt(), 3, cache)
        return generate(model, input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache)

    spec = "quest:page=4,budget=200,rectify=4" if mode == "overwrite" else specs(4, mode)["quest"]
    with sparse_below_the_budget(), saccade.sparsify(model, spec):
        assert mixed(model).tolist() == mixed(twin()).tolist()


@torch.no_grad()
def test_a_draft_seen_from_elsewhere_does_not_stand() -> None:
    """Another position, or a mask that hides more: the logits that wait were made for other inputs."""
    model = tiny.llama()
    given = {"input_ids": tiny.prompt(), "attention_mask": torch.ones(1, 30, dtype=torch.long)}
    for name in ("position_ids", "attention_mask"):
        with saccade.sparsify(model, specs(4, "verify")["quest"]) as run:
            cache = model(**given, use_cache=True).past_key_values
            token = torch.tensor([[7]])
            options = {"attention_mask": torch.ones(1, 31, dtype=torch.long), "position_ids": torch.tensor([[30]])}
            follower = model(token, past_key_values=cache, **options).logits.argmax(-1)
            changed = {"attention_mask": torch.ones(1, 32, dtype=torch.long), "position_ids": torch.tensor([[31]])}
            if name == "position_ids":
                changed[name] = torch.tensor([[60]])
            else:
                changed[name][:, :5] = 0
            before = run.stats().accepted
            model(follower, past_key_values=cache, **changed)
            assert run.stats().accepted == before


def test_ends_are_resolved_as_transformers_does() -> None:
    """`eos_token_id=None` switches the model's own off; a row that goes on behind it is no ended row."""
    model, batch = tiny.llama(), tiny.padded([30, 7, 19])
    plain = generate(twin(), **batch, max_new_tokens=20)[:, -20:]
    configs = model.generation_config, twin().generation_config
    try:
        with saccade.sparsify(model, specs(4, "verify")["quest"]):
            for token in plain.unique().tolist():
                for config in configs:
                    config.eos_token_id = token
                options = {**batch, "max_new_tokens": 20, "eos_token_id": None}
                assert generate(model, **options)[:, -20:].tolist() == plain.tolist()
    finally:
        for config in configs:
            config.eos_token_id = None


def test_refusals_look_at_every_configuration() -> None:
    model = tiny.llama()
    with saccade.sparsify(model, specs(4, "verify")["quest"]):
        model.generation_config.num_beams = 2
        try:
            with pytest.raises(saccade.UnsupportedModelError, match="cannot follow beams"):
                model.generate(tiny.prompt(), generation_config=GenerationConfig(max_new_tokens=5))
        finally:
            model.generation_config.num_beams = 1


def test_nothing_is_drafted_beyond_the_end() -> None:
    with saccade.sparsify(tiny.llama(), "quest:page=4,budget=4,dense_layers=0,rectify=32:verify") as run:
        generate(tiny.llama(), max_new_tokens=8)
        assert run.stats().drafted <= 6 * run.stats().dense_passes


@pytest.mark.parametrize("policy", ["lychee_cluster:sinks=1,chunk_min=2,chunk_max=4,dense_layers=1,budget=9,rectify=3"])
def test_several_tokens_at_once_never_overrun_the_budget(policy: str) -> None:
    """An index holds back what is unclean; a call of more tokens than that is dense."""
    most: list[int] = []

    class Widest:
        def observe(self, layer: int, span: Any, q: Any, kv: Any, selection: Any, scale: float) -> None:
            if selection is not None:
                most.append(int(selection.tokens(kv.rows.seq_lens).max()))

    with saccade.sparsify(tiny.llama(), policy, observers=(Widest(),)):
        generate(tiny.llama(), max_new_tokens=20, prompt_lookup_num_tokens=10, max_matching_ngram_size=1)
    assert most and max(most) <= 9


def test_restore_takes_everything_off() -> None:
    model = tiny.llama()
    forward = model.forward
    with saccade.sparsify(model, specs(4, "verify")["quest"]):
        assert model.forward != forward
    assert model.forward == forward and "forward" not in model.__dict__
    assert not model.get_decoder()._forward_hooks
    assert generate(model).tolist() == generate(twin()).tolist()
