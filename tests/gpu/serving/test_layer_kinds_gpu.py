"""Captured steps of models with layers of several kinds: logits of given tokens, as `test_captured_steps` has them.

bfloat16, since vLLM takes Gemma 3 in no float16; how far its roundings carry logits is measured as there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_engines import CudaEngines, Request, Truth, core, distance, feed, say
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import CUDAGraphMode

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
    "gemma3_text": {"query_pre_attn_scalar": 64},
    # Its experts choose by what bfloat16 has rounded: one expert for all leaves attention to tell.
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 2},
}
# Without dense layers, and with sets that are reused.
POLICIES = ("less_is_more:budget=128,dense_layers=0,reselect=1", "quest:budget=128,dense_layers=0")
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


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_logits_are_those_of_the_transformers_adapter(
    policy: str, name: str, engines: CudaEngines, tmp_path: Path
) -> None:
    truth = Truth(saved(tmp_path, name))
    settings: dict[str, Any] = {"model": str(tmp_path), "dtype": "bfloat16"}
    found = feed(engines.make(None, **settings), REQUESTS)
    stock = {one.name: distance(found[one.name], truth.logits("dense", one)) for one in REQUESTS}
    per_kind = {"attention_backend": None, "attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}}}
    engine = engines.make(policy, **settings, **per_kind)
    assert core(engine).vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
    specs = [group.kv_cache_spec for group in core(engine).scheduler.kv_cache_config.kv_cache_groups]
    assert sum(type(spec) is SaccadeAttentionSpec for spec in specs) == 1 < len(specs)
    logits, changed = feed(engine, REQUESTS), 0.0
    for request in REQUESTS:
        exact = truth.logits(policy, request)
        ours = distance(truth.logits(policy, request, torch.bfloat16), exact)
        allowed, far = 2 * max(stock[request.name], ours), distance(logits[request.name], exact)
        effect = distance(truth.logits("dense", request), exact)
        changed = max(changed, effect / allowed)
        say(f"{name} {policy} {request.name}: {far:.4f} of {allowed:.4f}, dense is {effect:.4f} away")
        assert far <= allowed
    assert changed > 1, "the policy changes no more than roundings do: the test could not fail"
