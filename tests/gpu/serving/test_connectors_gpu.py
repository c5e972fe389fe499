"""vLLM's offloading connector on a CUDA device: what a lossless engine has stored in the host's memory comes back."""

from __future__ import annotations

from typing import Any

import pytest
from cuda_engines import CudaEngines, core, text
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

PROMPT, ANSWER, BLOCK = 1000, 60, 32
OFFLOADED: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 2**28, "offload_prompt_only": False},
}


def ask(engine: Any, prompt: list[int]) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were found anywhere; all that is to be stored then is."""
    settings = SamplingParams(temperature=0, ignore_eos=True, max_tokens=ANSWER)
    (output,) = engine.generate([TokensPrompt(prompt_token_ids=prompt)], settings, use_tqdm=False)
    while core(engine).scheduler.has_requests():
        engine.llm_engine.step()
    return list(output.outputs[0].token_ids), output.num_cached_tokens


@pytest.mark.parametrize("policy", ["less_is_more:budget=192,reselect=7", "token_clusters:budget=192,sinks=4"])
def test_a_prefix_comes_back_from_the_hosts_memory(policy: str, engines: CudaEngines) -> None:
    """Found there, a prompt and an answer are continued exactly as when they are found in the prefix cache."""
    told = {"dtype": "bfloat16", "block_size": BLOCK, "enable_prefix_caching": True, "logits_processors": []}
    engine = engines.make(f"{policy},rectify=4:verify", kv_transfer_config=OFFLOADED, **told)
    prompt = text()[:PROMPT]
    answer, found = ask(engine, prompt)
    assert found == 0
    for given, length in ((prompt, PROMPT), (prompt + answer + text()[3000:3020], PROMPT + ANSWER)):
        kept, near = ask(engine, given)
        assert engine.reset_prefix_cache()
        carried, far = ask(engine, given)
        assert near == far == (length - 1) // BLOCK * BLOCK
        assert carried == kept
    assert engine.reset_prefix_cache(reset_connector=True)
    assert ask(engine, prompt)[1] == 0, "it was elsewhere"
