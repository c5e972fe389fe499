"""Layers of several kinds: those with full attention decode under the policy, vLLM keeps all others as they are."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    DEFAULTS,
    Answer,
    Engines,
    answer_of,
    answers,
    by_transformers,
    core,
    force_own_path,
    greedy,
    prompt_of,
    prompts,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
)
from vllm import LLM
from vllm.inputs import TokensPrompt

import saccade
from saccade.adapters.vllm import clean
from saccade.adapters.vllm.cache_spec import SaccadeAttentionSpec
from saccade.checkpoints.bundled import model_path
from walking import among, walk

BLOCK = DEFAULTS["block_size"]
WINDOW, STEPS, LENGTHS = 64, 16, (300, 17, 129, 200)
PER_KIND: dict[str, Any] = {"attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}}}
PER_KIND |= {"attention_backend": None}
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 96, "max_num_seqs": 4}
OFF = {"saccade": "off"}
SIZES: dict[str, Any] = {
    **{"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 6},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048},
    # Large weights: attention that picks few tokens, answers that depend on it.
    **{"initializer_range": 0.2, "tie_word_embeddings": False},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2}
EVERY_OTHER = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 3}
TYPES: dict[str, dict[str, Any]] = {
    # A cap among the scores.
    "gemma2": {**SLIDING, "tie_word_embeddings": True, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32},
    "gemma3_text": SLIDING,
    # Layers with full attention have wider heads, fewer of keys, and values that are keys.
    "gemma4_text": {
        **{**EVERY_OTHER, "tie_word_embeddings": True, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
        "per_layer_config": {layer: {"head_dim": 64, "num_key_value_heads": 1} for layer in ("1", "3", "5")},
    },
    "exaone4": SLIDING,
    # Its windows are one token wider in vLLM than in transformers.
    "cohere2": SLIDING,
    # vLLM takes gpt-oss's kinds from the layers' numbers.
    "gpt_oss": {**EVERY_OTHER, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {
        **{"layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2, "hidden_size": 256},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "initializer_range": 0.02},
    },
}
POLICIES = (
    "less_is_more:budget=24,dense_layers=0,reselect=1",
    "quest:budget=32,dense_layers=0",
    "lychee_cluster:budget=48,dense_layers=0",
)
RECTIFIED = "quest:budget=32,dense_layers=0,rectify=11"
FULL = {**dict.fromkeys(TYPES, (1, 4)), **dict.fromkeys(("gemma4_text", "gpt_oss"), (1, 3, 5))}


def folder_of(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SIZES, **TYPES[name]}))
    if name in ("gemma2", "gemma4_text"):
        # The head is the embedding, which large would say again what was said last.
        model.get_input_embeddings().weight.data.mul_(0.1)
    if name == "gpt_oss":
        # Sinks that take a good part of what a set is given: small ones leave the tokens as they are.
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(12.0)
    return saved(folder, model)


@cache
def settings_of(name: str, root: Path) -> dict[str, Any]:
    # vLLM's linear attention on CPUs takes bfloat16 alone.
    dtype = "bfloat16" if name == "qwen3_next" else "float32"
    return {"model": str(folder_of(name, root / name)), "dtype": dtype, "max_model_len": 1024}


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all models lie."""
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture
def kind(name: str, policy: str, root: Path, all_engines: Engines) -> LLM:
    """The engine that all tests of a model under a policy share.

    Prompts come in chunks of 96, and every block of a window is kept, not only those at the end of a prompt.
    """
    kept = {"enable_prefix_caching": True, "prefix_cache_retention_interval": BLOCK}
    return all_engines.visit(policy, **settings_of(name, root), **PER_KIND, **CHUNKED, **kept)


def transformers_of(settings: dict[str, Any]) -> Any:
    # Gemma 2's soft-cap and gpt-oss's sinks are what vLLM computes, and transformers' sdpa does not.
    loaded = {"dtype": getattr(torch, settings["dtype"]), "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(settings["model"], **loaded).eval()


def specs(engine: LLM) -> list[tuple[str, tuple[int, ...]]]:
    """The cache's groups: what they are, and of which layers."""
    groups = core(engine).scheduler.kv_cache_config.kv_cache_groups
    return [
        (type(group.kv_cache_spec).__name__, tuple(int(name.split(".")[2]) for name in group.layer_names))
        for group in groups
    ]


def cases() -> Iterator[Any]:
    """Every model under every policy; every time each model, and each policy at least once."""
    chosen = {
        **{"gemma2": POLICIES[:1], "gemma3_text": (RECTIFIED,), "gemma4_text": POLICIES[2:], "exaone4": POLICIES[1:2]},
        **{"gpt_oss": (POLICIES[0], RECTIFIED)},
    }
    for name, every_time in chosen.items():
        for policy in (*POLICIES, RECTIFIED):
            yield pytest.param(name, policy, marks=() if policy in every_time else walk)


@pytest.mark.parametrize(("name", "policy"), cases())
def test_tokens_are_those_of_transformers(name: str, policy: str, kind: LLM, root: Path) -> None:
    """Windows of 64 under prompts of 300, in one batch; float32, every token; requests that opt out are dense."""
    asked, model = prompts(*LENGTHS), transformers_of(settings_of(name, root))
    assert [found for spec, found in specs(kind) if spec == SaccadeAttentionSpec.__name__] == [FULL[name]]
    sparse, dense = (
        [answer.tokens for answer in answers(kind, asked, greedy(STEPS, extra_args=extra))] for extra in (None, OFF)
    )
    for found, under in ((sparse, policy), (dense, None)):
        assert found == [answer.tokens for answer in by_transformers(model, under, asked, STEPS)]
    assert sparse != dense, "the policy changes nothing: it may not run"


def forced(model: Any, prompt: list[int], tokens: tuple[int, ...], policy: str | None) -> list[float]:
    """Log-probabilities of given tokens by transformers: all at once, or one decoded behind the other by a policy."""
    if policy is None:
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    else:
        cache, steps = DynamicCache(config=model.config), [prompt, *([token] for token in tokens[:-1])]
        with saccade.sparsify(model, policy):
            told = [model(torch.tensor([fed]), past_key_values=cache, logits_to_keep=1).logits[0] for fed in steps]
        logits = torch.cat(told)
    return logits.float().log_softmax(-1)[range(len(tokens)), tokens].tolist()


@torch.inference_mode()
def test_linear_attention_agrees_with_transformers_as_stock_does(engines: Engines, root: Path) -> None:
    """vLLM's linear attention takes bfloat16 alone and rounds elsewhere than transformers: the distance of requests
    that opt out is the budget, twice for the mean of as many other tokens. The policy changes far more than that."""
    settings, asked, policy = settings_of("qwen3_next", root), prompts(*LENGTHS), "streaming:budget=8"
    engine = engines.sparse(policy, **settings, attention_backend="CUSTOM")
    assert [found for kind, found in specs(engine) if kind == SaccadeAttentionSpec.__name__] == [FULL["qwen3_next"]]
    stock, ours = (answers(engine, asked, greedy(STEPS, extra_args=extra)) for extra in (OFF, None))
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16).eval()

    def distance(found: list[Answer], under: str | None) -> float:
        told = [forced(model, ids, answer.tokens, under) for ids, answer in zip(asked, found, strict=True)]
        gaps = (torch.tensor(told) - torch.tensor([answer.logprobs for answer in found])).abs()
        return float(gaps.mean())

    budget, own, dense = 2 * distance(stock, None), distance(ours, policy), distance(ours, None)
    assert own < budget < dense / 4, (own, budget, dense)


@pytest.mark.parametrize("name", among(TYPES, ("gpt_oss",)))
def test_where_the_budget_covers_everything_answers_are_those_of_stock(name: str, engines: Engines, root: Path) -> None:
    """Bit by bit: rows that a budget covers are vLLM's own in every layer."""
    settings, asked = {**settings_of(name, root), **CHUNKED}, prompts(*LENGTHS)
    expected = answers(engines.stock(**settings), asked, greedy(STEPS))
    engines.close()
    engine = engines.sparse(f"less_is_more:budget=1024,dense_layers=0,reselect={FULL[name][1]}", **settings, **PER_KIND)
    assert answers(engine, asked, greedy(STEPS)) == expected


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param("gemma3_text", POLICIES[0], marks=walk),
        ("exaone4", POLICIES[1]),
        ("gemma3_text", RECTIFIED),
        pytest.param("gemma3_text", "quest:budget=32,dense_layers=0,rectify=60", marks=walk),
    ],
)
def test_what_sparse_steps_wrote_into_windows_is_nobody_elses(kind: LLM) -> None:
    """Layers with a window publish their blocks too: of a sparse answer as of the prompt that a later turn has dense.

    The first request decodes sparsely; the second has that answer in its prompt, so that its blocks of full attention
    are computed densely and published; the third finds those, and must not find the first's windows with them.
    """
    prompt, more, others = prompts(300)[0], prompts(20, start=9000)[0], prompts(40, start=12000)[0]

    def turns(wrap: Callable[[list[int]], TokensPrompt]) -> tuple[list[Answer], int]:
        def asked(ids: list[int], steps: int) -> Any:
            return kind.generate([wrap(ids)], greedy(steps), use_tqdm=False)[0]

        first = answer_of(asked(prompt, 100).outputs[0])
        ids = [*prompt, *first.tokens, *more]
        second, third = asked(ids, STEPS), asked([*ids, *others], STEPS)
        return [first, *(answer_of(one.outputs[0]) for one in (second, third))], third.num_cached_tokens or 0

    plain, none = turns(prompt_of)
    cached, hit = turns(lambda ids: TokensPrompt(prompt_token_ids=ids))
    for one, other in zip(cached, plain, strict=True):
        assert (one.tokens, one.logprobs) == (other.tokens, pytest.approx(other.logprobs, abs=1e-4))
    assert none == 0
    assert hit == 420 // BLOCK * BLOCK, "the third request finds what the second has computed"


@pytest.mark.parametrize(("name", "policy"), [("gemma3_text", RECTIFIED)])
def test_a_window_is_held_as_it_was_before_its_unclean_tokens(kind: LLM) -> None:
    """vLLM frees the blocks before a window, and a pass begins up to 11 tokens earlier; block 0 stands for none."""
    scheduler, inner = core(kind).scheduler, kind.llm_engine
    groups = [place for place, (spec, _) in enumerate(specs(kind)) if spec != SaccadeAttentionSpec.__name__]
    inner.add_request("one", prompt_of(prompts(300)[0]), greedy(100))
    freed = set()
    for _ in range(90):
        inner.step()
        (request,) = scheduler.requests.values()
        begins = max(clean.boundary(request) - WINDOW + 1, 0) // BLOCK
        for group in groups:
            held = scheduler.kv_cache_manager.get_block_ids(request.request_id)[group]
            assert 0 not in held[begins:]
            freed.add(held.count(0))
    inner.abort_request(["one"])
    assert len(groups) == 2 and len(freed) > 2


def test_a_cache_without_room_for_what_is_taken_back_is_refused(engines: Engines, root: Path) -> None:
    """vLLM counts a window's blocks without it, and would let the longest request wait for ever."""
    settings = {**settings_of("gemma3_text", root), **PER_KIND, "max_num_batched_tokens": 256}
    with pytest.raises(saccade.ServingError, match=r"needs 68 blocks with the 200 tokens .* lower --max-model-len"):
        engines.sparse("quest:budget=32,dense_layers=0,rectify=200", **settings, num_gpu_blocks_override=60)


LIMIT = 256
HIDING_NOTHING = {**SIZES, "num_hidden_layers": 4}
SHORT = (200, 17, 96, 31)
TIDAL, QUEST = "tidal:budget=4096,reselect=2,dense_layers=1", "quest:budget=4096,dense_layers=1,rectify=5"
UNUSED = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4}
CASES = {
    "all layers have one": (Phi3Config(**HIDING_NOTHING, sliding_window=LIMIT), QUEST),
    "wider than any row": (MistralConfig(**HIDING_NOTHING, sliding_window=300), TIDAL),
    "no layer uses it": (Qwen2Config(**HIDING_NOTHING, **UNUSED), TIDAL),
    "every other layer": (Gemma3TextConfig(**HIDING_NOTHING, sliding_window=LIMIT, sliding_window_pattern=2), QUEST),
}


def saved(folder: Path, model: Any) -> Path:
    """With the bundled model's tokenizer."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model_path() / name).read_bytes())
    return folder


@pytest.mark.parametrize("case", among(CASES, [case for case in CASES if case != "no layer uses it"]))
def test_windows_that_hide_nothing(
    case: str, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32, log-probabilities within 1e-4, as of what is covered; every row through our own operations."""
    config, policy = CASES[case]
    torch.manual_seed(0)
    settings = {"model": str(saved(tmp_path, AutoModelForCausalLM.from_config(config))), "max_model_len": LIMIT}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    expected = by_transformers(model, None, prompts(*SHORT), STEPS)
    assert len({token for answer in expected for token in answer.tokens}) > 3, "equality of one token shows little"
    force_own_path(monkeypatch)
    engine = engines.sparse(policy, **settings)
    specs = [group.kv_cache_spec for group in core(engine).scheduler.kv_cache_config.kv_cache_groups]
    assert [type(spec) for spec in specs] == [SaccadeAttentionSpec]
    found = answers(engine, prompts(*SHORT), greedy(STEPS))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.tokens, ours.logprobs) == (theirs.tokens, pytest.approx(theirs.logprobs, abs=1e-4))
