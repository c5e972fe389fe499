"""One thread, no network, and the same examples on every run: what a test finds, the next run finds again."""

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No layer that a user's cache holds is found, and none is kept there.
os.environ["SACCADE_CACHE"] = os.devnull

import pytest
from hypothesis import HealthCheck, settings

from limits import COLLECTED
from saccade.recipes.machine import read_bandwidth

# No test judges the bandwidth, and reading a gigabyte takes a second.
read_bandwidth.__kwdefaults__["megabytes"] = 16

EXAMPLES = 100 if os.environ.get("SACCADE_WALK") else 50
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=EXAMPLES)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# Tests on real vLLM and on a GPU need what `make setup` does not install; Triton's interpreter must be asked for before
# anybody imports Triton, as torch does. All run where they are named, each in a process of their own.
collect_ignore = ["serving", "gpu", "kernels/interpreted"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: a full collection of garbage need not look at half a million objects each time."""
    gc.disable()
    result = yield
    gc.enable()
    gc.freeze()
    return result


def pytest_unconfigure() -> None:
    gc.unfreeze()  # at the end of the interpreter all goes, and libraries that count their objects see it


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = len({re.sub(r"\bnative\d+\b", "native", item.nodeid) for item in items})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    asked = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    if any(Path(__file__).resolve().parent.is_relative_to(path) for path in asked):
        terminalreporter.write_line("left out: tests/serving, which run real vLLM; run them with: make test-vllm")
        terminalreporter.write_line("left out: tests/gpu, which need a CUDA device; run them with: make test-gpu")
        terminalreporter.write_line("apart: tests/kernels/interpreted, which make test runs next")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Not imported above: xdist's own process runs no test, and its workers wait for it.
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded(_one_thread: None) -> None:
    import torch

    # Not `torch.manual_seed`, which writes down who has called it for every device that nobody has used yet.
    for generator in (torch.default_generator, *torch.cuda.default_generators):
        generator.manual_seed(0)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody has written is NaN."""
    import torch

    # Not `use_deterministic_algorithms`, which imports torch's compiler: that takes longer than most files of tests.
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode("default")
