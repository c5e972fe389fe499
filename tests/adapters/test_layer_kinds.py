"""Layers of several kinds: a policy concerns those with full attention, and everything else is left as it is."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

import saccade
from forcing import sparse_below_the_budget
from saccade.adapters.hf.graph import GraphedStep
from saccade.checkpoints.shape import shape_of

from . import tiny
from .checking import OracleObserver
from .ways import ENDLESS, VERSION, paired

FULL_LAYERS = (1, 2, 4, 5)
WINDOW, BUDGET, SINKS, NEW, PROMPT = 8, 9, 4, 6, 30


STOCK = {"gpt_oss": "eager", "mimo_v2_flash": "eager"}
"""What a type attends with, if not by torch's function."""
if not Gemma2PreTrainedModel._supports_sdpa:
    STOCK["gemma2"] = "eager"  # since transformers 5.24


def kinds(other: str) -> list[str]:
    return [other, "full_attention", "full_attention"] * 2


SLIDING: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": kinds("sliding_attention")}
GEMMA_4 = {**SLIDING, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 2}
GEMMA_4 |= {"vocab_size_per_layer_input": 64}
MODELS: dict[str, dict[str, Any]] = {
    # A cap among the scores; transformers' sdpa leaves it out.
    "gemma2": {**SLIDING, "head_dim": 8, "attn_logit_softcapping": 1.0},
    "gemma3_text": {**SLIDING, "head_dim": 8},
    "cohere2": SLIDING,
    "gemma4_text": GEMMA_4,
    # The last three layers read what the first and the third keep.
    "gemma3n_text": {**SLIDING, "head_dim": 8, "num_kv_shared_layers": 3, "vocab_size_per_layer_input": 64},
    "gemma4_text, shared": {**GEMMA_4, "num_kv_shared_layers": 3},
    "llama4_text": {
        **{"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": WINDOW},
        "layer_types": kinds("chunked_attention"),
    },
    "gpt_oss": {**SLIDING, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    # Values narrower than keys; its layers with windows have sinks, and twice the KV heads.
    "mimo_v2_flash": {
        **{**SLIDING, "head_dim": 16, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2},
        "moe_intermediate_size": 16,
    },
    "qwen3_next": {
        **{"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
        **{"linear_value_head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
        **{"shared_expert_intermediate_size": 16, "layer_types": kinds("linear_attention")},
    },
}


REFUSED: dict[str, str] = {}
"""What transformers 4 calls or keeps in a way that we refuse."""
STOCK_CANNOT = {
    ("llama4_text", "static cache"): "create_chunked_causal_mask",
    ("qwen3_next", "prompt lookup"): "assisted generation is not supported with stateful models",
}
"""What transformers itself raises for."""
if VERSION < (5,):
    REFUSED = {"gemma3n_text": "found 0 plain attention layers", "qwen3_next": "cache of type Qwen3NextDynamicCache"}
    del STOCK_CANNOT["llama4_text", "static cache"]
if VERSION >= (5, 24):
    del STOCK_CANNOT["llama4_text", "static cache"]


def known(name: str) -> bool:
    """Whether this transformers has a model."""
    return name.partition(",")[0] in CONFIG_MAPPING


HYBRIDS = [name for name in MODELS if known(name) and name not in REFUSED]
KINDS = ("gemma3_text", "gemma3n_text", "llama4_text", "qwen3_next")
"""Windows, layers that share, chunks, recurrent states."""
ATTENTIONS = [(name, STOCK.get(name, "sdpa")) for name in HYBRIDS]
ATTENTIONS += [(name, "eager") for name in ("gemma2", *KINDS) if name in HYBRIDS and name not in STOCK]
"""With the other function, whose masks are other numbers, one of each kind; and the cap, which it alone applies."""


def hybrid(name: str, **changes: Any) -> PreTrainedModel:
    kind, given = name.partition(",")[0], {"attention": STOCK.get(name, "sdpa"), **MODELS[name], **changes}
    model = tiny.fresh(kind, num_hidden_layers=6, **given)
    # The one for groups of experts knows no float64.
    model.config._experts_implementation = "eager"
    return model


def covering() -> str:
    return f"less_is_more:budget={tiny.LARGE},dense_layers=1,reselect=5"


def greedy(model: PreTrainedModel, **options: Any) -> list[list[int]]:
    batch = {**tiny.padded([30, 13]), **options}
    return model.generate(**batch, do_sample=False, max_new_tokens=NEW).tolist()


WAYS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "greedy, left-padded": greedy,
    "beams": lambda model: greedy(model, num_beams=3),
    "static cache": lambda model: greedy(model, cache_implementation="static"),
    "chunked prompt": lambda model: greedy(model, prefill_chunk_size=7),
    "prompt lookup": lambda model: model.generate(
        tiny.prompt().repeat(1, 2), do_sample=False, max_new_tokens=NEW, prompt_lookup_num_tokens=3, **ENDLESS
    ).tolist(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_4_does_otherwise_is_refused(name: str) -> None:
    model = hybrid(name)
    greedy(model)
    with pytest.raises(saccade.UnsupportedModelError, match=REFUSED[name]), saccade.sparsify(model, covering()):
        greedy(model)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "greedy, left-padded"])
@pytest.mark.parametrize("name", [name for name in HYBRIDS if name in KINDS])
def test_a_budget_above_the_context_gives_stocks_tokens(name: str, way: str) -> None:
    """In every way in which the stock model itself can be asked; greedily and below the budget all are asked next."""
    model, generate = hybrid(name), WAYS[way]
    if (name, way) in STOCK_CANNOT:
        with pytest.raises((ValueError, TypeError), match=STOCK_CANNOT[name, way]):
            generate(model)
        return
    stock = generate(model)
    with sparse_below_the_budget(), saccade.sparsify(model, covering()) as run:
        assert generate(model) == stock
        assert run.stats().steps >= NEW - 1


@contextmanager
def naively(model: PreTrainedModel, keep: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Stock, but decoded tokens of layers with full attention attend, head by head, to what `keep` leaves of scores.

    `keep` turns scores `[Hq, T]` of a row into scores of which some are -inf.
    """
    before = model.config._attn_implementation
    mask_function = eager_mask if before == "eager" else sdpa_mask

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        # Of a prompt a layer that shares may be shown the last token alone.
        if module.layer_idx not in FULL_LAYERS or query.shape[2] > 1 or key.shape[2] <= PROMPT:
            code = sys.modules[type(module).__module__]
            stock = code.eager_attention_forward if before == "eager" else AttentionInterface()["sdpa"]
            return stock(module, query, key, value, mask, **kwargs)
        group, rows = query.shape[1] // key.shape[1], []
        for row in range(query.shape[0]):
            seen = None if mask is None else mask[row, 0, 0] if mask.dtype == torch.bool else mask[row, 0, 0] == 0
            first = 0 if seen is None else int(seen.int().argmax())
            scores = torch.stack(
                [key[row, head // group, first:] @ query[row, head, 0] for head in range(query.shape[1])]
            )
            logits, cap = keep(scores) * kwargs["scaling"], kwargs.get("softcap") if before == "eager" else None
            if cap is not None:
                logits = torch.where(logits == -torch.inf, logits, cap * torch.tanh(logits / cap))
            if kwargs.get("s_aux") is not None:
                logits = torch.cat([logits, kwargs["s_aux"][:, None]], dim=-1)
            weights = torch.softmax(logits, dim=-1)[:, : scores.shape[1]]
            rows.append(
                torch.stack([weights[head] @ value[row, head // group, first:] for head in range(len(weights))])
            )
        return torch.stack(rows)[:, None], None

    AttentionInterface.register("naive", attention)
    AttentionMaskInterface.register("naive", mask_function)
    model.set_attn_implementation("naive")
    yield
    model.set_attn_implementation(before)


def window(scores: Tensor) -> Tensor:
    """StreamingLLM: the first tokens and the last ones."""
    length, kept = scores.shape[1], torch.full_like(scores, -torch.inf)
    for position in range(length):
        if position < SINKS or position >= length - (BUDGET - SINKS):
            kept[:, position] = scores[:, position]
    return kept


def best(scores: Tensor) -> Tensor:
    """The current token and the best others of each KV head, by the largest score of its query heads."""
    kept, group = torch.full_like(scores, -torch.inf), len(scores) // 2
    for head in range(2):
        heads = slice(head * group, (head + 1) * group)
        others = scores[heads, :-1].max(0).values.argsort(descending=True, stable=True)[: BUDGET - 1].tolist()
        chosen = [*others, scores.shape[1] - 1]
        kept[heads, chosen] = scores[heads, chosen]
    return kept


def logits(
    model: PreTrainedModel, fed: Tensor | None = None, lengths: tuple[int, ...] = (30, 13)
) -> tuple[Tensor, Tensor]:
    """Tokens `[B, T]` and logits `[B, NEW, V]`, of the tokens `fed` if they are given."""
    batch = tiny.padded(list(lengths))
    forced = None if fed is None else lambda row, before: [int(fed[row, len(before)])]
    answer = model.generate(
        **batch,
        **{"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True},
        prefix_allowed_tokens_fn=forced,
    )
    return answer.sequences, torch.stack(answer.logits, 1)


POLICIES = {f"streaming:budget={BUDGET},sinks={SINKS}": window, f"exact_topk:budget={BUDGET},dense_layers=0": best}


@pytest.mark.parametrize(("one", "spec"), paired(ATTENTIONS, POLICIES), ids=str)
def test_below_the_budget_only_full_attention_is_another(one: tuple[str, str], spec: str) -> None:
    """In float64, against a function that shares nothing with the package."""
    name, attention = one
    model = hybrid(name, attention=attention).double()
    # In float64 most eager functions make NaN of padding: float32's softmax knows no number as low as their masks'.
    lengths = (30, 13) if attention == "sdpa" or name == "gpt_oss" else (30, 30)
    with naively(model, POLICIES[spec]):
        tokens, expected = logits(model, None, lengths)
    with saccade.sparsify(model, spec) as run:
        _, found = logits(model, tokens, lengths)
        layers = run.stats().layers
    # Some hundred sums of numbers around 1, in the order of whoever adds them; attention itself is float32 in ours.
    torch.testing.assert_close(found, expected, rtol=0, atol=float(expected.abs().max()) * 200 * 2.0**-24)
    _, stock = logits(model, tokens, lengths)
    assert float((stock - expected).abs().max()) > 0.01 * float(expected.abs().max())
    assert [layer for layer, one in enumerate(layers) if one.steps] == list(FULL_LAYERS)
    assert all(0 < layers[layer].share < 1 for layer in FULL_LAYERS)


def test_a_model_call_without_a_cache_of_its_own_makes_the_right_one() -> None:
    model = hybrid("gemma3_text")
    with torch.no_grad(), saccade.sparsify(model, covering()):
        held = model(tiny.prompt(30), use_cache=True).past_key_values
    assert [layer.is_sliding for layer in held.layers] == [layer not in FULL_LAYERS for layer in range(6)]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("less_is_more:reselect=3,budget=9", r"reselect=3 is not .*valid layers are 4, 5 \(full attention\)"),
        ("tidal:reselect=6,budget=9", r"reselect=6 is not .*valid layers are 4, 5 \(full attention\)"),
        ("quest:budget=16,dense_layers=4", "4 layers with full attention, so 0 to 3 are valid"),
        ("lychee_decode:budget=9,roles=layers:1+3", r"layer 3 .*valid layers are 1, 2, 4, 5 \(full attention\)"),
        ("lychee_decode:budget=9,roles=heads:1+0.1", r"layers 1, 2, 4, 5 \(full attention\) with KV heads 0 to 1"),
        ("lychee_decode:budget=9,roles=heads:2", "reuses a selection, but no layer below refreshes head 0"),
    ],
)
def test_layers_are_named_as_the_model_counts_them(spec: str, reason: str) -> None:
    with pytest.raises(saccade.PolicyError, match=reason):
        saccade.sparsify(hybrid("gemma3_text"), spec)


@pytest.mark.parametrize("spec", ["resa:page=4", "tidal:budget=9,rectify=4", "quest:page=4,budget=8,rectify=4:verify"])
def test_rectification_beside_recurrent_layers_is_refused(spec: str) -> None:
    with pytest.raises(saccade.UnsupportedModelError, match="layers of type linear_attention have forgotten") as error:
        saccade.sparsify(hybrid("qwen3_next"), spec)
    assert "rectify=none" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.skipif(not known("mimo_v2_flash"), reason="no model of this transformers has such values")
def test_values_of_another_width_are_left_to_torchs_kernels_and_said() -> None:
    with saccade.sparsify(hybrid("mimo_v2_flash"), "streaming:budget=9") as run:
        told = "torch's slower kernels run: its values are 8 wide, its keys 16"
        assert run.notes == (told,)
    assert shape_of(hybrid("mimo_v2_flash").config).token_bytes(2) == 4 * 2 * (16 + 8) * 2
    with saccade.sparsify(hybrid("gpt_oss"), "streaming:budget=9") as run:
        assert not [note for note in run.notes if "wide" in note]


@pytest.mark.parametrize("name", [name for name in HYBRIDS if name in ("gemma3n_text", "gpt_oss", "mimo_v2_flash")])
def test_pages_are_the_oracles(name: str) -> None:
    """By bounds of the very keys that a layer reads, whoever keeps them and however wide their values are."""
    spec, model = "quest:page=4,budget=8,dense_layers=0", hybrid(name)
    checker = OracleObserver(spec)
    with saccade.sparsify(model, spec, observers=(checker,)):
        greedy(model, num_beams=2)
    assert {layer for layer, _ in checker.seen} == set(FULL_LAYERS)


def test_a_graph_is_refused() -> None:
    told = "layers without full attention keep their lengths on the host"
    with (
        saccade.sparsify(hybrid("gemma3_text"), "streaming:budget=9") as run,
        pytest.raises(saccade.UnsupportedModelError, match=told),
    ):
        GraphedStep(run, DynamicCache())


def test_recall_is_that_of_layers_with_full_attention() -> None:
    model = hybrid("gemma3_text")
    with saccade.sparsify(model, f"exact_topk:budget={BUDGET},dense_layers=1", recall=True) as run:
        greedy(model)
        stats = run.stats()
    assert [layer for layer, one in enumerate(stats.layers) if one.recall is not None] == [2, 4, 5]
    assert stats.recall is not None and 0 < stats.recall < 1
    assert stats.share_attended is not None and 0.25 < stats.share_attended < 1


def test_the_default_layer_is_one_with_full_attention() -> None:
    model = hybrid("gemma3_text")
    policy, shape = saccade.Policy.from_spec("less_is_more:budget=9,dense_layers=1"), shape_of(model.config)
    assert "layer 4, the middle one of 4" in policy.plan(shape).notes[0] and shape.full_layers == FULL_LAYERS
    with pytest.raises(saccade.PolicyError, match="no layer is known for this model, whose kinds of layers"):
        saccade.sparsify(model, policy)
