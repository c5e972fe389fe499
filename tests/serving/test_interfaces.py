"""Nothing of vLLM that the plugin uses has moved, and if it had, one line would say so and stock vLLM would run on."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig
from vllm import SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import saccade.adapters.vllm
from saccade.adapters.vllm import plugin
from saccade.adapters.vllm import vllm_api as interfaces
from saccade.adapters.vllm.vllm_api import PARTS, TOLD, VERSIONS, Part, borrowed, check_interfaces, lent
from saccade.adapters.vllm.worker.requests import RequestRows
from saccade.errors import ServingError

pytestmark = pytest.mark.usefixtures("_registered")

PACKAGE = Path(next(iter(saccade.adapters.vllm.__path__)))
OPTIONS = {"saccade": {"policy": "quest"}}
MAJOR, MINOR = VERSIONS[-1].split(".")
ANOTHER = f"{MAJOR}.{int(MINOR) + 1}.1"
WRITTEN_FOR = f"this saccade was written for vLLM {TOLD}"


@pytest.fixture
def _registered() -> None:
    """An engine's start does it elsewhere; here no test may depend on one before it."""
    plugin.register()


@pytest.fixture
def _forgotten() -> Iterator[None]:
    """What has been found out about this vLLM is found out anew, and again after the test."""
    interfaces.problem.cache_clear()
    yield
    interfaces.problem.cache_clear()


@pytest.mark.parametrize("place", PARTS)
def test_all_is_where_it_was(place: str) -> None:
    check_interfaces(place)


def test_attributes_that_are_only_annotated_are_found_on_python_3_14() -> None:
    # There a class makes its annotations when it is asked for them.
    class Asked(type):
        __annotations__ = property(lambda owner: {"sliding_window": int})

    assert interfaces._has(Asked("Spec", (), {}), "sliding_window")
    assert not interfaces._has(Asked("Spec", (), {}), "window")


def used() -> set[tuple[str, str]]:
    """Every name that our modules import from below vLLM's package."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "vllm":
                found |= {(str(node.module), alias.name) for alias in node.names}
    return found


def test_the_table_knows_every_import() -> None:
    parts = [part for parts in PARTS.values() for part in parts]
    unknown = used() - {(part.module, part.name.partition(".")[0]) for part in parts}
    # A module that is imported whole is known by its parts.
    assert {f"{module}.{name}" for module, name in unknown if module != "vllm"} <= {part.module for part in parts}


class Moved:
    """A class of which this test says what it has."""

    field: int

    def __init__(self, first: int) -> None:
        self.assigned = first

    def method(self, first: int, *, second: int = 0) -> None: ...

    def open(self, **anything: int) -> None: ...


@pytest.mark.parametrize(
    ("part", "missing"),
    [
        (Part("vllm.nowhere", "Thing"), ["there is no vllm.nowhere"]),
        (Part("vllm.before|vllm.now", "Thing"), ["there is no vllm.before nor vllm.now"]),
        (Part("vllm.before|vllm.config", "VllmConfig"), []),
        (Part("vllm.before|vllm.config", "NoConfig"), ["vllm.config has no NoConfig"]),
        (Part("vllm.config", "NoConfig.field"), ["vllm.config has no NoConfig"]),
        (Part(__name__, "Moved.gone"), [f"{__name__}.Moved has no gone"]),
        (Part(__name__, "Moved", has="field assigned method gone"), [f"{__name__}.Moved has no gone"]),
        (Part(__name__, "Moved", "first"), []),
        (Part(__name__, "Moved.method", "first second third"), [f"{__name__}.Moved.method has no parameter third"]),
        (Part(__name__, "Moved.open", "whatever"), []),
    ],
)
def test_what_has_moved_is_named(part: Part, missing: list[str]) -> None:
    assert part.moved() == missing


@pytest.mark.usefixtures("_forgotten")
def test_one_line_says_what_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "elsewhere", tuple(Part("vllm", f"Gone{number}") for number in range(5)))
    with pytest.raises(ServingError) as refused:
        check_interfaces("elsewhere")
    gone = "vllm has no Gone0, vllm has no Gone1, vllm has no Gone2, and 2 more"
    assert str(refused.value) == f"{WRITTEN_FOR}; here ({vllm.__version__}) {gone}"


def test_what_moved_is_lent_from_where_it_is_and_a_stand_in_where_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "elsewhere", (Part("vllm.before|vllm", "LLM"), Part("vllm|os", "SamplingParams")))
    assert lent("elsewhere", "SamplingParams", "LLM") == [SamplingParams, vllm.LLM]
    assert borrowed("vllm.nowhere", "Thing", object) is object
    assert borrowed("vllm", "Nothing", ValueError) is ValueError
    assert borrowed("vllm", "SamplingParams", object) is SamplingParams


@pytest.mark.parametrize("version", [VERSIONS[0], f"{VERSIONS[0]}.4", f"{VERSIONS[-1]}.1.dev3+cpu"])
@pytest.mark.usefixtures("_forgotten")
def test_versions_of_the_same_line_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    check_interfaces("worker")
    assert not interfaces.written_for(f"{VERSIONS[-1]}0.1"), "it merely begins alike"


def config(text: PreTrainedConfig | None = None, **attention: Any) -> Any:
    chosen = {"backend": AttentionBackendEnum.CUSTOM, "backend_per_kind": {}, **attention}
    model = SimpleNamespace(hf_text_config=text or LlamaConfig(), max_model_len=8192, original_max_model_len=8192)
    return SimpleNamespace(additional_config=OPTIONS, attention_config=SimpleNamespace(**chosen), model_config=model)


@pytest.mark.usefixtures("_forgotten")
def test_in_another_version_our_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", ANOTHER)
    interfaces.problem.cache_clear()  # of what has been registered
    with pytest.raises(ServingError) as refused:
        RequestRows(config())
    assert str(refused.value) == f"{WRITTEN_FOR}; this is vLLM {ANOTHER}"
    assert all(version in TOLD for version in VERSIONS)
    RequestRows(SimpleNamespace(additional_config={}))


CUSTOM, TRITON = AttentionBackendEnum.CUSTOM, AttentionBackendEnum.TRITON_ATTN
WINDOWS = Gemma3TextConfig()
"""Its layers have windows of 4,096, which a context of 8,192 exceeds."""


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        (None, {"backend_per_kind": {"full_attention": TRITON}}, "CUSTOM, not TRITON_ATTN"),
        (WINDOWS, {"backend": TRITON}, "backend_per_kind.*, not TRITON_ATTN"),
        (WINDOWS, {"backend": None, "backend_per_kind": {"sliding_window": CUSTOM}}, "options need --attention-config"),
    ],
)
def test_options_without_the_backend_are_refused(text: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ServingError, match=words):
        RequestRows(config(text, **settings))


@pytest.mark.parametrize("others", [{}, {AttentionBackendEnum.CUSTOM: "somebody.elses.Backend"}])
def test_options_without_the_plugin_are_refused(others: dict[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.attention.backends.registry._ATTN_OVERRIDES", others)
    with pytest.raises(ServingError, match="VLLM_PLUGINS"):
        RequestRows(config())


STOCK_ELSEWHERE = f"""
import vllm
vllm.__version__ = "{ANOTHER}"
from abc import abstractmethod
from vllm.v1.sample.logits_processor import interface
interface.LogitsProcessor.demanded = abstractmethod(lambda self: None)
interface.LogitsProcessor.__abstractmethods__ |= {{"demanded"}}
from saccade.adapters.vllm.worker.requests import RequestRows
RequestRows(vllm.config.VllmConfig())
from saccade.adapters.vllm import plugin
from vllm.v1.attention.backends.registry import AttentionBackendEnum
AttentionBackendEnum.CUSTOM.clear_override()
plugin.register()
assert not AttentionBackendEnum.CUSTOM.is_overridden()
print("stock runs")
from saccade.adapters.vllm.cache_spec import register_cache_spec
register_cache_spec()
register_cache_spec()
"""


def test_what_another_version_demands_of_a_processor_does_not_stop_it() -> None:
    """In a fresh process."""
    command, environment = [sys.executable, "-c", STOCK_ELSEWHERE], {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "stock runs" in done.stdout
    assert f"saccade is not available: {WRITTEN_FOR}" in done.stdout + done.stderr
