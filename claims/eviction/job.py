"""The eviction experiment as the user asked for it, checked from end to end before any work."""

from __future__ import annotations

import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saccade.errors import OutputError, SaccadeError
from saccade.eval.context import built_in_contexts
from saccade.eval.document import language_reference
from saccade.eval.entry import at_budgets, parse_budgets, policies_for
from saccade.eval.subject import Subject
from saccade.methods.policy import Policy
from saccade.recipes.machine import kernels_on, versions

from ..subject import plain_subject
from .asking import Asking
from .exchange import Prompt, prompts_of, read_answers, write_lines
from .join import agreement, rows_of

PRESSES = Path(__file__).with_name("presses.py")
REQUIREMENTS = "claims/eviction/requirements.txt"
EVERY_LAYER = ("quest:dense_layers=0", "exact_topk:dense_layers=0")
"""Beside the usual policies: what attends to a budget in every layer, as presses do."""
TEXTS, CHARACTERS = 50, 4000
"""What DuoAttention scores heads on: as many texts as kvpress takes of BookSum."""


@dataclass(frozen=True, slots=True)
class EvictionSettings:
    """What the user can choose; see `python -m claims eviction --help`. No `policies` means the default ones."""

    kvpress: Path
    model: str | None
    policies: tuple[str, ...]
    budget: str
    context: int
    limit: int
    seed: int
    threads: int


@dataclass(frozen=True, slots=True)
class EvictionJob:
    """Settings that passed every check.

    Attributes:
        notes: what the user should know about budgets and plans, each once.
    """

    settings: EvictionSettings
    subject: Subject
    prompts: tuple[Prompt, ...]
    policies: tuple[Policy, ...]
    budgets: tuple[int, ...]
    notes: tuple[str, ...]

    @classmethod
    def check(cls, settings: EvictionSettings) -> EvictionJob:
        """Resolve settings, or raise a SaccadeError: one line about the first that is not valid."""
        subject = plain_subject(settings.model, "cpu", "float32")
        named, said = policies_for(settings.policies, subject.source)
        budgets = parse_budgets(settings.budget)
        policies, notes = at_budgets((*named, *(() if settings.policies else EVERY_LAYER)), budgets)
        planned = [note for policy in policies for note in policy.plan(subject.shape).notes]
        contexts = built_in_contexts(
            subject.tokenizer,
            length=settings.context,
            limit=settings.limit,
            positions=subject.positions,
            seed=settings.seed,
        )
        prompts = tuple(prompts_of(subject.tokenizer, contexts))
        _check_kvpress(settings.kvpress)
        return cls(settings, subject, prompts, policies, budgets, tuple(dict.fromkeys((*notes, *said, *planned))))

    def write_prompts(self, prompts: Path, texts: Path) -> None:
        """What kvpress's side reads."""
        write_lines(prompts, map(asdict, self.prompts))
        reference = language_reference()
        step = (len(reference) - CHARACTERS) // (TEXTS - 1)
        write_lines(texts, [reference[begin : begin + CHARACTERS] for begin in range(0, TEXTS * step, step)])

    def asking(self, model: Any) -> Asking:
        """saccade's side, ready to run."""
        return Asking(model, self.subject.tokenizer, self.prompts, self.policies)

    def write_answers(self, path: Path, asking: Asking) -> None:
        """What saccade's side has said so far, as kvpress's side writes it."""
        flat = ({**asdict(one.cell), **asdict(one)} for one in asking.said)
        records = [{key: value for key, value in one.items() if key != "cell"} for one in flat]
        write_lines(path, [{"versions": versions("numpy")}, *records])

    def results(self, ours: Path, theirs: Path) -> dict[str, Any]:
        """What the results file holds, from both sides' files."""
        sides = {name: read_answers(path, len(self.prompts)) for name, path in (("saccade", ours), ("kvpress", theirs))}
        rows = [
            row
            for name, answers in sides.items()
            for row in rows_of(name, answers.said, self.prompts, self.subject.tokenizer)
        ]
        settings = {key: value for key, value in asdict(self.settings).items() if key not in ("kvpress", "model")}
        return {
            "model": self.subject.source.name,
            "settings": settings,
            "context_tokens": [len(context) for context in dict.fromkeys(prompt.context for prompt in self.prompts)],
            "dtype": self.subject.dtype_name,
            "kernels": kernels_on(self.subject.device),
            "versions": {name: answers.about["versions"] for name, answers in sides.items()},
            "dense": agreement(*(answers.said for answers in sides.values())),
            "pipeline": sides["kvpress"].about["pipeline"],
            "rows": rows,
            "refused": [{**asdict(cell), "refused": reason} for cell, reason in sides["kvpress"].refused.items()],
            "notes": list(self.notes),
        }


def ask_kvpress(job: EvictionJob, prompts: Path, texts: Path, answers: Path) -> None:
    """Run kvpress's side in its own environment, from which nothing is fetched.

    Raises:
        SaccadeError: if it fails; what it said went to the terminal.
    """
    budgets = [str(budget) for budget in job.budgets]
    files = (prompts, texts, answers, job.subject.source.location)
    given = [*map(str, files), "--budgets", *budgets, "--threads", str(job.settings.threads)]
    done = _run(job.settings.kvpress, str(PRESSES), *given, threads=job.settings.threads)
    if done.returncode:
        raise SaccadeError(f"kvpress's side ended with exit code {done.returncode}; what it said stands above")


def _check_kvpress(python: Path) -> None:
    """Raise unless the other environment has kvpress, before any work."""
    try:
        found = _run(python, "-c", "import importlib.metadata as m; m.version('kvpress')", capture_output=True)
        reason = "" if found.returncode == 0 else "has no kvpress"
    except OSError as error:
        reason = f"cannot be run ({error.strerror})"
    if reason:
        raise OutputError(f"--kvpress {str(python)!r} {reason}; the head of {REQUIREMENTS} says how to make one")


def _run(python: Path, *given: str, threads: int = 1, **more: Any) -> subprocess.CompletedProcess[bytes]:
    """Run the other environment's Python, which sees nothing of this one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run([str(python), "-I", *given], env=kept | own, check=False, **more)
