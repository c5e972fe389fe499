"""Captured steps of models with layers of several kinds: logits of given tokens, as `test_captured_steps` has them.

bfloat16, since vLLM takes Gemma in no float16; how far its roundings carry logits is measured as there.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_engines import CudaEngines, GivenTokens, Request, Truth, begin, core, distance, feed, finish, say, scheduled
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import LLM
from vllm.config import CUDAGraphMode
from vllm.model_executor.models.utils import extract_layer_index

from saccade.adapters.vllm.cache_spec import SaccadeAttentionSpec
from saccade.checkpoints.bundled import model_path

WINDOW = 128
SIZES: dict[str, Any] = {
    **{"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 6},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096},
    **{"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 3},
    **{"initializer_range": 0.06, "tie_word_embeddings": False},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
TYPES: dict[str, dict[str, Any]] = {
    # Scores reach 3: a cap that bites.
    "gemma2": {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 2.0, "tie_word_embeddings": True},
    "gemma3_text": {"query_pre_attn_scalar": 64},
    # Its experts choose by what bfloat16 has rounded: one expert for all leaves attention to tell.
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 2},
}
# Without dense layers, and with sets that are reused.
POLICIES = ("less_is_more:budget=128,dense_layers=0,reselect=1", "quest:budget=128,dense_layers=0")
PER_KIND: dict[str, Any] = {
    "attention_backend": None,
    "attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}},
}
REQUESTS = [
    Request("long", 0, 1500, 24),
    Request("off", 5000, 700, 16, sparse=False),
    Request("grows", 7000, 120, 32),
    Request("short", 9000, 33, 16),
]


def saved(folder: Path, name: str) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SIZES, **TYPES[name]}))
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "sinks"):
                module.sinks.normal_(1.0, 1.0)
    model.save_pretrained(folder)
    for part in ("tokenizer.json", "tokenizer_config.json"):
        (folder / part).write_bytes((model_path() / part).read_bytes())
    return folder


def engine_of(policy: str, folder: Path, engines: CudaEngines) -> LLM:
    """Captured, with two kinds of groups, one of them ours."""
    engine = engines.make(policy, model=str(folder), dtype="bfloat16", **PER_KIND)
    assert core(engine).vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
    specs = [group.kv_cache_spec for group in groups_of(engine)]
    assert sum(type(spec) is SaccadeAttentionSpec for spec in specs) == 1 < len(specs)
    return engine


def groups_of(engine: LLM) -> list[Any]:
    groups: list[Any] = core(engine).scheduler.kv_cache_config.kv_cache_groups
    return groups


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_logits_are_those_of_the_transformers_adapter(
    policy: str, name: str, engines: CudaEngines, tmp_path: Path
) -> None:
    truth = Truth(saved(tmp_path, name), "eager")
    found = feed(engines.make(None, model=str(tmp_path), dtype="bfloat16"), REQUESTS)
    stock = {one.name: distance(found[one.name], truth.logits("dense", one)) for one in REQUESTS}
    logits, changed = feed(engine_of(policy, tmp_path, engines), REQUESTS), 0.0
    for request in REQUESTS:
        exact = truth.logits(policy, request)
        ours = distance(truth.logits(policy, request, torch.bfloat16), exact)
        allowed, far = 2 * max(stock[request.name], ours), distance(logits[request.name], exact)
        effect = distance(truth.logits("dense", request), exact)
        changed = max(changed, effect / allowed)
        say(f"{name} {policy} {request.name}: {far:.4f} of {allowed:.4f}, dense is {effect:.4f} away")
        assert far <= allowed
    assert changed > 1, "the policy changes no more than roundings do: the test could not fail"


def block_of(position: int, engine: LLM, request: Request) -> dict[str, torch.Tensor]:
    """What every layer holds in the block with a position, whatever its layout."""
    ids = core(engine).scheduler.kv_cache_manager.get_block_ids(scheduled(engine, request.name).request_id)
    layers = core(engine).vllm_config.compilation_config.static_forward_context
    held = {}
    for group, blocks in zip(groups_of(engine), ids, strict=True):
        block = blocks[position // group.kv_cache_spec.block_size]
        assert block, "vLLM has given it back"
        held |= {name: layers[name].kv_cache[block].float().cpu() for name in group.layer_names}
    return held


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("runner", ["V2", "V1"])
def test_rectified_blocks_are_those_of_a_dense_prefill(
    runner: str, name: str, engines: CudaEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every layer, those with a window too: a pass of 48 tokens reads windows as they were 47 tokens before."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "V2")))
    engine = engine_of("quest:budget=128,dense_layers=0,rectify=47", saved(tmp_path, name), engines)
    assert core(engine).vllm_config.use_v2_model_runner == (runner == "V2")
    # Blocks begin at multiples of at most 32 tokens: the one with token 620 is full at 640.
    assert {32 % group.kv_cache_spec.block_size for group in groups_of(engine)} == {0}
    held = []
    for request, lengths in ((Request("sparse", 0, 600, 60), (644, 650)), (Request("dense", 0, 660, 2), (660,))):
        begin(engine, request)
        for length in lengths:
            while not any(known == request.name and number >= length for known, number in GivenTokens.logits):
                engine.llm_engine.step()
            held.append(block_of(620, engine, request))
        engine.llm_engine.abort_request([request.name])
        finish(engine)
    unclean, clean, wanted = held
    told, failed = 0.0, []
    for number, layer in enumerate(sorted(wanted, key=extract_layer_index)):
        size = wanted[layer].square().mean().sqrt()
        before, after = (float((one[layer] - wanted[layer]).square().mean().sqrt() / size) for one in (unclean, clean))
        # Rounded to 8 bits in every layer below, in other orders of summation.
        allowed = 2.0**-8 * (2 + number)
        told = max(told, before / allowed)
        say(f"{name} {runner} {layer}: {after:.5f} of {allowed:.5f}, {before:.5f} before the pass")
        failed += [(layer, after, before)] if after > allowed else []
    assert not failed
    assert told > 1, "sparse steps write what a prefill writes: the test could not fail"
