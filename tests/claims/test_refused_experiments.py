"""What the experiments of `python -m claims` refuse before any work, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import Fails

SIZES = {
    "accumulation": ("--lengths", "256", "--sources", "reference", "--passages", "1"),
    "upkeep": ("--prompt", "100", "--tokens", "128", "--every", "64", "--queries", "2", "--texts", "2"),
    "eviction": ("--context", "1100", "--limit", "3", "--policy", "quest"),
    # Which makes its folder first.
    "gates": ("--target-heads", "4", "--lengths", "128,140", "--device", "cpu", "--output-dir", "."),
}
REFUSED: dict[str, list[tuple[tuple[str, ...], str]]] = {
    "accumulation": [
        (("--kept", "0"), "'0'"),
        (("--kept", "nan"), "'nan'"),
        (("--every", "0"), "'0'"),
        (("--lengths", "x"), "'x'"),
        (("--lengths", "128"), "must be longer than its last 128 tokens"),
        (("--lengths", "4096"), "1600 positions"),
        (("--sources", "novels"), "reference, library, facts"),
        (("--policy", "dense"), "neither a kept share nor rectification"),
        (("--policy", "tidal:budget=9,reselect=2"), "leave it out"),
        (("--policy", "tidal:reselect=99"), "reselect=99"),
        (("--passages", "0"), "from 1"),
        (("--device", "quantum"), "'quantum'"),
        (("--output-dir", "/proc/saccade"), "'/proc/saccade'"),
    ],
    "upkeep": [
        (("--budget", "x"), "'x'"),
        (("--budget", "40"), "the smallest is 48"),
        (("--variants", "lazy,eager"), "'eager'"),
        (("--queries", "5"), "a measurement takes 69 tokens"),
        (("--tokens", "4096"), "1600 positions"),
        (("--texts", "0"), "from 1"),
        (("--texts", "100000"), "--texts 100000"),
        (("--device", "quantum"), "'quantum'"),
        (("--json", "/proc/saccade"), "'/proc/saccade'"),
    ],
    "eviction": [
        (("--kvpress", "absent/python"), "claims/eviction/requirements.txt says how to make one"),
        (("--kvpress", "/bin/false"), "has no kvpress"),
        (("--budget", "x"), "'x'"),
        (("--context", "16000"), "1600 positions"),
    ],
    "gates": [
        (("--variants", "letter,root"), "--variants 'root' is not valid: letter, loss, direct, share"),
        (("--target-heads", "1"), "--target-heads 1 is not valid: 2 (the heads of layer 0"),
        (("--target-heads", "11"), "--target-heads 11"),
        (("--lengths", "300,200"), "--lengths '300,200' is not valid"),
        (("--lengths", "128,4000"), "1600 positions"),
        (("--kept", "0"), "--kept 0 is not valid"),
        (("--rate", "2"), "--rate 2 is not valid"),
        (("--minutes", "0"), "--minutes 0 is not valid"),
        (("--device", "quantum"), "'quantum'"),
        (("--output-dir", "/proc/gates"), "'/proc/gates'"),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "says"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_bad_input_is_one_line_before_any_work(
    refused: Fails, model_folder: Path, command: str, arguments: tuple[str, ...], says: str
) -> None:
    assert says in refused(command, "--model", model_folder, *SIZES[command], *arguments)
