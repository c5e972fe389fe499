"""A method of an installed package, found by its entry point: vLLM decodes what transformers does."""

from __future__ import annotations

from pathlib import Path

from engines import Engines, answers, greedy, prompts
from test_one_engine import STEPS, by_transformers

from own_method import NAME, installed


def test_tokens_are_those_of_the_transformers_adapter(tmp_path: Path, engines: Engines) -> None:
    asked = prompts(300, 130)
    with installed(tmp_path, METHOD=NAME):
        engine = engines.sparse(f"{NAME}:budget=64")
        expected = [by_transformers(f"{NAME}:budget=64", prompt) for prompt in asked]
        assert [answer.tokens for answer in answers(engine, asked, greedy(STEPS))] == expected
