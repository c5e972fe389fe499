"""What `python -m benchmarks` refuses before any work, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import Fails

SIZES = {
    "soak": ("--prompt", "80", "--tokens", "40"),
    "growth": ("--context", "300", "--budget", "64", "--head-dim", "8", "--rounds", "2"),
}
REFUSED: dict[str, list[tuple[tuple[str, ...], str]]] = {
    "soak": [
        (("--tokens", "1600"), "1680 tokens, prompt and decoded: the model has 1600 positions"),
        (("--policy", "nonsense"), "unknown policy 'nonsense'"),
        (("--policy", "tidal:rectify=4:verify"), "nothing to verify"),
        (("--dtype", "int8"), "int8"),
        (("--json", "/nowhere/soak.json"), "cannot be written"),
        (("--picture", "/nowhere/soak.svg"), "cannot be written"),
        (("--block", "0"), "greater than or equal to 1"),
    ],
    "growth": [
        (("--selector", "cap64,b-tree"), "unknown selector 'b-tree'; valid: groups, cap64, sqrt, root, quest, exact"),
        (("--context", "64"), "within a budget of 64 nothing is chosen"),
        (("--context", ""), "whole numbers"),
        (("--context", "8k"), "'8k'"),
        (("--dtype", "int8"), "unknown dtype 'int8'; valid: float32, bfloat16, float16"),
        (("--rounds", "0"), "greater than or equal to 1"),
        (("--json", "/nowhere/growth.json"), "cannot be written"),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "says"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_bad_input_is_one_line(
    fails: Fails, model_folder: Path, command: str, arguments: tuple[str, ...], says: str
) -> None:
    model = () if command == "growth" else ("--model", model_folder)
    assert says in fails(command, *model, *SIZES[command], *arguments)
