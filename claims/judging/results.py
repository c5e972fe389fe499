"""What a run leaves behind, and the ledger: results under docs/results/claims whose criteria are those of the tree."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError
from saccade.eval.output import write_json, writing

from .claim import Listed
from .commits import Commit
from .verdicts import Judgement

RULES = tuple(Path(__file__).with_name(f"{name}.py") for name in ("effects", "verdicts"))
"""What makes a verdict of samples and criteria."""

LEDGER = Path(__file__).parents[2] / "docs" / "results" / "claims"

Result = Mapping[str, Any]


def result(
    listed: Listed, judgement: Judgement, commit: Commit | None, command: str, conditions: Mapping[str, Any]
) -> dict[str, Any]:
    """What `result.json` holds; without a commit it is a draft."""
    claim = listed.claim
    return {
        "claim": listed.number,
        "verdict": judgement.verdict,
        "n": judgement.n,
        "on": conditions.get("model") or conditions["device"],
        "date": datetime.now(timezone.utc).date().isoformat(),
        "draft": commit is None,
        "commit": commit and commit.name,
        "committed": commit and commit.date,
        "fingerprint": claim.fingerprint,
        "rules": rules(),
        "criteria": claim.criteria(),
        "tests": [outcome.to_dict() for outcome in judgement.outcomes],
        "premises": [outcome.to_dict() for outcome in judgement.premises],
        "power": judgement.power,
        "command": command,
        "environment": dict(conditions),
    }


def rules() -> str:
    """A hash of how intervals and verdicts are made."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in RULES)).hexdigest()


def record(found: Result, listed: Listed, ledger: Path = LEDGER) -> Path:
    """Take a result into the ledger, in the place of an earlier one of the same claim and model.

    Raises:
        SaccadeError: a draft, or criteria that are not those of the tree.
    """
    number = found["claim"]
    if found["draft"]:
        raise SaccadeError(f"{number} is a draft: its criteria were not committed, so it cannot enter the ledger")
    if found["fingerprint"] != listed.on(found["on"]).claim.fingerprint:
        raise SaccadeError(f"{number} ran with other criteria than those of {listed.file.name}; run it again")
    path = ledger / f"{number}-{slug(found['on'])}.json"
    with writing(ledger):
        ledger.mkdir(parents=True, exist_ok=True)
    # Tests and premises stand beside what they found.
    criteria = {name: told for name, told in found["criteria"].items() if name not in ("tests", "premises")}
    write_json(path, {**found, "criteria": criteria}, indent=None)
    return path


def recorded(ledger: Path = LEDGER) -> dict[str, list[Result]]:
    """Results of the ledger by claim."""
    held: dict[str, list[Result]] = {}
    for path in sorted(ledger.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        held.setdefault(found["claim"], []).append(found)
    return held


def stale(claims: Mapping[str, Listed], held: Mapping[str, Iterable[Result]]) -> list[str]:
    """What in the ledger is not a result of the tree: an unknown claim, other criteria, other rules, or a draft."""
    complaints = []
    for number, results in held.items():
        for found in results:
            if number not in claims:
                complaints.append(f"{number}: no file of this number")
            elif found["fingerprint"] != claims[number].on(found["on"]).claim.fingerprint:
                complaints.append(f"{number} on {found['on']}: its criteria have changed since; run it again")
            elif found.get("rules") != rules():
                told = "intervals are made in another way since; run it again where its samples lie"
                complaints.append(f"{number} on {found['on']}: {told}")
            elif found["draft"] or not found["commit"]:
                complaints.append(f"{number} on {found['on']}: a draft")
    return complaints


def slug(name: str) -> str:
    """A model's or a device's name as part of a file's."""
    return re.sub(r"[^a-z0-9.]+", "_", Path(name).name.lower()).strip("_")
