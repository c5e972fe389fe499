"""vLLM's offloading on a CUDA device: a prompt that a lossless engine has stored in the host's memory comes back."""

from cuda_engines import CudaEngines, core, text
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

EXTRA = {"cpu_bytes_to_use": 2**28, "offload_prompt_only": False}
OFFLOADED = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": EXTRA}


def test_a_prompt_comes_back_from_the_hosts_memory(engines: CudaEngines) -> None:
    """It is continued as when the prefix cache has it. (Of answers bfloat16 rounds otherwise when they come again.)"""
    told = {"dtype": "bfloat16", "block_size": 32, "enable_prefix_caching": True, "logits_processors": []}
    policy = "less_is_more:budget=192,reselect=7,rectify=4:verify"
    engine = engines.make(policy, kv_transfer_config=OFFLOADED, **told)
    settings, prompt = SamplingParams(temperature=0, ignore_eos=True, max_tokens=60), text()[:1000]

    def ask() -> tuple[list[int], int]:
        (output,) = engine.generate([TokensPrompt(prompt_token_ids=prompt)], settings, use_tqdm=False)
        while core(engine).scheduler.has_requests():
            engine.llm_engine.step()
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    first, kept = ask(), ask()
    assert engine.reset_prefix_cache()
    assert first[1] == 0 and ask() == kept == (kept[0], 992)  # whole blocks of 1,000 tokens
