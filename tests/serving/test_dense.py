"""The policy `dense` changes nothing: bit for bit what stock vLLM answers."""

from __future__ import annotations

from engines import Answer, Engines, answers, greedy, prompts
from vllm import LLM

LENGTHS = (300, 17, 129, 64, 410, 33, 1, 200, 95, 256)
CHUNKED = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "enable_prefix_caching": True}


def asked(engine: LLM) -> list[Answer]:
    return answers(engine, prompts(*LENGTHS), greedy(24))


def test_dense_is_bit_equal_to_stock(engines: Engines) -> None:
    """Continuous batches of 4 of 10 prompts, prefilled in chunks, same block size and order of submission."""
    expected = engines.by_stock(asked, **CHUNKED)
    assert asked(engines.sparse("dense", **CHUNKED)) == expected
