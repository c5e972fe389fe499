"""Three tasks of RULER (Hsieh et al., 2024, arXiv 2404.06654) without a download, as lm-evaluation-harness has them."""

import random
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from typing import Any
from unittest.mock import patch

import numpy

from ..errors import DocumentError, SaccadeError, install

RULER, TASKS, LEAST = "ruler", ("niah_multikey_2", "niah_multikey_3", "vt"), 2048
"""Together, by themselves, and fewest tokens: the harness never ends where the example of `vt` does not fit."""


def ruler_rows(tokenizer: Any, length: int, count: int, seed: int) -> list[tuple[str, Mapping[str, Any]]]:
    """`count` rows, each task's in turn, in the columns of a benchmark.

    Text, question and answer are at most `length` tokens; answer prefix and chat template come on top.

    Raises:
        DocumentError: too short a length, or a tokenizer that makes too many tokens of words.
        SaccadeError: the harness is not installed, or not all of it.
    """
    if not all(map(find_spec, ("lm_eval", "nltk", "wonderwords"))):
        raise SaccadeError(f"--task {RULER} needs lm_eval: {install('lm-eval')}")
    if length < LEAST:
        raise DocumentError(f"--context {length}: --task {RULER} takes at least {LEAST}")
    if len(tokenizer("The grass is green. " * 50).input_ids) > LEAST // 4:
        raise DocumentError(f"--task {RULER}: the example of `vt` does not fit a tokenizer of so few letters a token")
    each = -(-count // len(TASKS))
    # The harness draws from these, prints, and would fetch what cuts essays into sentences.
    with ExitStack() as after, redirect_stdout(StringIO()), redirect_stderr(StringIO()), patch("nltk.download"):
        after.callback(random.setstate, random.getstate())
        after.callback(numpy.random.set_state, numpy.random.get_state())  # noqa: NPY002
        random.seed(seed)
        numpy.random.seed(seed)  # noqa: NPY002
        from lm_eval.tasks.ruler.niah_utils import TEMPLATE
        from lm_eval.tasks.ruler.prepare_niah import NEEDLE, generate_samples
        from lm_eval.tasks.ruler.vt_utils import sys_vartrack_w_noise_random as chains

        given: dict[str, Any] = {"template": TEMPLATE, "type_haystack": "needle", "num_samples": each}
        given |= {"haystack": NEEDLE, "TOKENIZER": tokenizer, "max_seq_length": length}
        numbers = generate_samples(type_needle_k="words", type_needle_v="numbers", **given)
        uuids = generate_samples(type_needle_k="uuids", type_needle_v="uuids", **given)
        (example,) = chains(tokenizer, 1, max_seq_length=500, incremental=5)
        made = numbers, uuids, chains(tokenizer, each, max_seq_length=length, icl_example=example)
    if (found := [*map(len, made)]) != [each] * len(TASKS):
        raise SaccadeError(f"--task {RULER}: the harness made {found} rows of {each} of each task")
    rows = [_row(task, row) for turn in zip(*made, strict=True) for task, row in zip(TASKS, turn, strict=True)]
    return [(f"{RULER}'s row {number}, {row['task']}", row) for number, row in enumerate(rows[:count], start=1)]


def _row(task: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The last line is what is asked."""
    context, line, question = row["input"].rpartition("\n")
    asked = {"context": context + line, "question": question, "answer_prefix": row["gen_prefix"], "task": task}
    return {**asked, "answer": [*row["outputs"]], "max_new_tokens": 30 if task == "vt" else 128}
