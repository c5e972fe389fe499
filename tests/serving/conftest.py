"""Engines in this process, one thread, so that a test can look into the scheduler and the cache of what it runs."""

from __future__ import annotations

import os
import shutil
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:  # xdist's own process runs no test, and its workers wait for it: it imports no vLLM
    from engines import Engines
    from vllm import LLM

MAX_STARTS = 56
"""Of engines, in all that `make test-vllm` runs, which leaves out what walks."""
STARTS_OF_8_BITS = 3
"""More, where the CPU can hold caches of 8 bits: `engines.eight_bits` leaves their tests out elsewhere."""
EVERY_TIME = "not walk"
VISITING = "test_one_engine"
"""The file whose tests share the engine of their policy."""
LONG = ("test_lossless", "test_features", "test_bench", "test_server", "test_two_ranks")
"""The longest first."""
SHARED = {"test_adaptive": "test_lossless"}
"""Files that ask the engines of another one."""
VISIT: dict[str, Any] = {"max_num_batched_tokens": 512, "enable_prefix_caching": True}

_started = 0


@pytest.fixture(scope="session")
def all_engines() -> Iterator[Engines]:
    from engines import Engines

    made = Engines()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _environment_is_read() -> None:
    """An engine that this process has started keeps what the environment was, and tests change it."""
    from vllm import envs

    envs.disable_envs_cache()


@pytest.fixture
def engines(all_engines: Engines) -> Iterator[Engines]:
    """Makes engines that are closed at the end of the test."""
    yield all_engines
    all_engines.close_own()


@pytest.fixture
def visited(all_engines: Engines, policy: str) -> LLM:
    """The engine that all tests of this policy share: prompts in chunks, and a prefix cache."""
    return all_engines.visit(policy, **VISIT)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As a user's, with a cache of its own, and put back afterwards: vLLM writes into it."""
    before = dict(os.environ)
    for name in ("VLLM_CPU_KVCACHE_SPACE", "PROMETHEUS_MULTIPROC_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path / "cache"))
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def runner_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model without its recipe."""
    from saccade.checkpoints.bundled import model_path
    from saccade.recipes.recipe import NAME

    return shutil.copytree(model_path(), tmp_path / "model", ignore=shutil.ignore_patterns(NAME), copy_function=os.link)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share an engine run one after the other; a file of a minute begins first, or one worker ends alone."""
    longest = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: (longest.get(name := group(item.nodeid), len(LONG)), name))


class ByEngine(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types of it
    """And in one process. Not by xdist's groups: on pytest 9 its 3.8 leaves their names out of tests' ids."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByEngine:
    return ByEngine(config, log)


def group(nodeid: str) -> str:
    """Whom a test shares an engine, or else a process, with: its policy, its model or its file."""
    file, (_, _, ids) = Path(nodeid.partition("::")[0]).stem, nodeid.partition("[")
    file = SHARED.get(file, file)
    if file == VISITING and ":" in ids:
        return ids.removesuffix("]").partition("-")[0]
    # What walks over policies starts engines for each, minutes in all.
    apart = file == "test_layer_kinds" or "::test_every_policy_answers" in nodeid
    return f"{file} {ids.partition('-')[0]}" if apart else file


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Workers tell how many engines they have started; too many in all is a failure."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["started"] = started()
    elif started() > most() and session.config.option.markexpr == EVERY_TIME:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_testnodedown(node: Any) -> None:
    global _started
    _started += getattr(node, "workeroutput", {}).get("started", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"engines started: {started()}; every time at most {most()}")


def most() -> int:
    import torch

    holds = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
    return MAX_STARTS + (STARTS_OF_8_BITS if holds else 0)


def started() -> int:
    """By this process or, with xdist, by its workers."""
    return _started + (sys.modules["engines"].Engines.started if "engines" in sys.modules else 0)
