"""The bundled model as lm-evaluation-harness sees it, and RULER's tasks that it makes without a network."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as the harness's command line has it

from saccade.checkpoints.bundled import model_path

RULER = ("niah_multikey_2", "ruler_fwe")
"""Two of those whose texts are made of words and numbers, of which the example asks all."""

Ask = Callable[..., dict[str, list[str]]]


@pytest.fixture(scope="session")
def bundled() -> str:
    return str(model_path())


@contextmanager
def few_words() -> Iterator[None]:
    """While the harness's module is imported, which then stays: it sorts all pairs of its words, six million."""
    import wonderwords

    words = {name: some[:100] for name, some in wonderwords.RandomWord()._categories.items()}
    with patch("wonderwords.RandomWord", lambda: SimpleNamespace(_categories=words)):
        yield


@pytest.fixture(scope="session")
def ruler(bundled: str) -> dict[str, Any]:
    """The tasks, loaded: of 500 texts the first, which tests ask, from fewer words; short answers."""
    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__file__).parent / "ruler"
    with few_words(), pytest.MonkeyPatch.context() as monkey:
        for place in ("lm_eval.tasks.ruler.prepare_niah.tqdm", "tqdm.tqdm"):  # the first one stays imported
            monkey.setattr(place, lambda numbers, **_: numbers[:1])
        given = {"pretrained": bundled, "max_seq_lengths": [512]}
        found = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False, metadata=given).load(list(RULER))
    for task in found["tasks"].values():
        task.config.generation_kwargs["max_gen_toks"] = 12
    return found


@pytest.fixture(scope="session")
def ask(ruler: dict[str, Any]) -> Ask:
    """What a model says, task by task, by the harness's own `evaluate`."""
    from lm_eval.evaluator import evaluate

    def asking(model: Any, limit: int = 1) -> dict[str, list[str]]:
        samples = evaluate(lm=model, task_dict=ruler, limit=limit, bootstrap_iters=0)["samples"]
        assert set(samples) == set(RULER)
        return {name: [one["resps"][0][0] for one in asked] for name, asked in samples.items()}

    return asking
