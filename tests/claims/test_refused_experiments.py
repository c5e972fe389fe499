"""What the experiments of `python -m claims` refuse before any work, in one line."""

from pathlib import Path

import pytest

from commands import Fails

SIZES = {
    "accumulation": ("--lengths", "256", "--sources", "reference", "--passages", "1"),
    "upkeep": ("--prompt", "100", "--tokens", "128", "--every", "64", "--queries", "2", "--texts", "2"),
    "eviction": ("--context", "1100", "--limit", "3", "--policy", "quest"),
    # Which makes its folder first.
    "gates": ("--target-heads", "4", "--lengths", "128,140", "--device", "cpu", "--output-dir", "."),
    "compare": "--context 160 --texts 3 --asked 2 --plain 3 --budgets 48 --json rows".split(),
}
REFUSED = {
    "accumulation": {
        "--kept 0": "'0'",
        "--lengths 128": "must be longer than its last 128 tokens",
        "--lengths 4096": "1600 positions",
        "--sources novels": "reference, library, facts",
        "--sources facts --lengths 129": "no room for facts",
        "--passages 1000000": "has only",
        "--policy dense": "neither a kept share nor rectification",
        "--policy tidal:budget=9,reselect=2": "leave it out",
        "--policy tidal:reselect=99": "reselect=99",
        "--output-dir /proc/saccade": "'/proc/saccade'",
    },
    "upkeep": {
        "--budget 40": "the smallest is 48",
        "--variants lazy,eager": "'eager'",
        "--queries 5": "a measurement takes 69 tokens",
        "--tokens 4096": "1600 positions",
        "--texts 100000": "--texts 100000",
        "--device quantum": "'quantum'",
        "--json /proc/saccade": "'/proc/saccade'",
    },
    "eviction": {
        "--kvpress absent/python": "claims/eviction/requirements.txt says how to make one",
        "--kvpress /bin/false": "has no kvpress",
        "--context 16000": "1600 positions",
    },
    "gates": {
        "--variants letter,root": "--variants 'root' is not valid: letter, loss, direct, share",
        "--target-heads 1": "--target-heads 1 is not valid: 2 (the heads of layer 0",
        "--lengths 300,200": "--lengths '300,200' is not valid",
        "--lengths 128,4000": "1600 positions",
        "--kept 0": "--kept 0 is not valid",
        "--minutes 0": "--minutes 0 is not valid",
        "--drop-known": "--drop-known is not valid with --task kv",
    },
    "compare": {
        "--task pass_key": "--task 'pass_key' is not valid; kv, listing, passkey, records, several are",
        "--task passkey --asked 12": "--asked 12: a text of 160 tokens has",
        "--budgets 48,160": "--budgets 160 is not valid: it must be smaller than --context 160",
        "--context 100000": "--context 100000: the model has",
        "--context 120": "--context 120 is not valid beside --plain: more than the 128 tokens decoded",
    },
}


@pytest.mark.parametrize("command", REFUSED)
def test_bad_input_is_one_line_before_any_work(refused: Fails, model_folder: Path, command: str) -> None:
    said = {
        given: refused(command, "--model", model_folder, *SIZES[command], *given.split()) for given in REFUSED[command]
    }
    assert {given: line for given, line in said.items() if REFUSED[command][given] not in line} == {}
