"""The document of a served policy's drafts: what it says, and that nothing else is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import PolicyError
from saccade.recipes.acceptance import Acceptance

TOLD = {"version": 1, "policy": "quest:rectify=8:verify", "model": None, "date": "2026-11-29"}
TOLD |= {"drafted": [40, 20, 20], "accepted": [30, 12, 0]}
ODD = "drafted and accepted are not valid"


def test_it_reads_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.json"
    Acceptance.from_json(json.dumps(TOLD), "").write(path)
    assert json.loads(path.read_text()) == TOLD and Acceptance.read(path).drafted == (40, 20, 20)
    # Cycles of one draft have none behind it: 12 of 20 reach as far, of which 30 of 40 would.
    assert Acceptance.read(path).chances == pytest.approx([0.75, 0.8, 0.0])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("extra", 1, "unknown key 'extra'; its keys are version, policy"),
        ("version", 2, "this saccade reads version 1"),
        ("policy", "foresight", "unknown policy 'foresight'"),
        ("date", "today", "YYYY-MM-DD"),
        ("drafted", [], "at least one"),
        ("drafted", [40, 20], ODD),
        ("drafted", [40, 20, 0], ODD),
        ("accepted", [41, 12, 0], ODD),
    ],
)
def test_what_is_not_its_own_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=rf"^acceptance a\.json: [^\n]*{words}[^\n]*$"):
        Acceptance.from_json(json.dumps({**TOLD, name: value}), "acceptance a.json")
