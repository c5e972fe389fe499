"""vLLM's offloading on a CUDA device: what a lossless engine has stored in the host's memory comes back."""

from __future__ import annotations

import pytest
from cuda_engines import CudaEngines, core, text
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

EXTRA = {"cpu_bytes_to_use": 2**28, "offload_prompt_only": False}
OFFLOADED = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": EXTRA}


@pytest.mark.parametrize("policy", ["less_is_more:budget=192,reselect=7", "token_clusters:budget=192,sinks=4"])
def test_a_prefix_comes_back_from_the_hosts_memory(policy: str, engines: CudaEngines) -> None:
    """Found there, a prompt and its answer are continued exactly as when they are found in the prefix cache."""
    told = {"dtype": "bfloat16", "block_size": 32, "enable_prefix_caching": True, "logits_processors": []}
    engine = engines.make(f"{policy},rectify=4:verify", kv_transfer_config=OFFLOADED, **told)
    settings, prompt = SamplingParams(temperature=0, ignore_eos=True, max_tokens=60), text()[:1000]

    def ask() -> tuple[list[int], int]:
        (output,) = engine.generate([TokensPrompt(prompt_token_ids=prompt)], settings, use_tqdm=False)
        while core(engine).scheduler.has_requests():
            engine.llm_engine.step()
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    answer, found = ask()
    for expected in (992, 1056):  # whole blocks of 1,000 tokens, and of 60 more that were answered
        kept = ask()
        assert engine.reset_prefix_cache()
        assert found == 0 and ask() == kept == (kept[0], expected)
        prompt = prompt + answer + text()[3000:3020]
