"""The policy `dense` changes nothing: bit for bit what stock vLLM answers."""

from __future__ import annotations

from engines import Engines, answers, greedy, prompts

LENGTHS = (300, 17, 129, 64, 410, 33, 1, 200, 95, 256)
CHUNKED = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "enable_prefix_caching": True}


def test_dense_is_bit_equal_to_stock(engines: Engines) -> None:
    """Continuous batches of 4 of 10 prompts, prefilled in chunks, same block size and order of submission."""
    asked = prompts(*LENGTHS)
    expected = answers(engines.stock(**CHUNKED), asked, greedy(24))
    assert answers(engines.sparse("dense", **CHUNKED), asked, greedy(24)) == expected


def test_a_request_that_opts_out_is_served_as_stock_serves_it(engines: Engines) -> None:
    """Alone it is bit-equal; among sparse ones its tokens are the same."""
    asked = prompts(*LENGTHS[:4])
    off = greedy(24, extra_args={"saccade": "off"})
    expected = answers(engines.stock(), asked, greedy(24))
    engine = engines.sparse("streaming:budget=8")
    assert answers(engine, asked, off) == expected
    sparse = [answer.tokens for answer in answers(engine, asked, greedy(24))]
    mixed = answers(engine, asked, [off, greedy(24), off, greedy(24)])
    dense = [answer.tokens for answer in expected]
    assert [answer.tokens for answer in mixed] == [dense[0], sparse[1], dense[2], sparse[3]]
    assert sparse[0] != dense[0], "eight tokens of attention change nothing: the policy does not run"
