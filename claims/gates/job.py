"""The trial as the user asked for it, checked before any work; its processes, and what its results file holds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from saccade.calibrate.heads import THRESHOLD, refuse_count
from saccade.calibrate.target import TRAINING, Target
from saccade.calibrate.training import LOG, TRACED
from saccade.errors import SaccadeError
from saccade.recipes.machine import device_name, kernels_on, processor, versions

from .together import Part, TrialSettings, train, train_alone
from .variants import GREY, VARIANTS

RESULTS = "gates.json"
_EACH = 3  # processes a device: one that makes texts or waits leaves it to the others
_LOOK = 0.2  # seconds between two looks at processes
_KEEP = 15.0  # seconds between two files of results


@dataclass(frozen=True)
class Trial:
    """Settings that passed every check.

    Attributes:
        target: gates that may be open, without those heads of the first layer, which have none.
        others: runs of variants that an earlier command has trained and this one does not.
    """

    settings: TrialSettings
    subject: Target
    variants: tuple[str, ...]
    target: int
    others: tuple[dict[str, Any], ...] = ()

    @classmethod
    def check(cls, settings: TrialSettings) -> Trial:
        """Resolve settings, or raise a SaccadeError about the first that is not valid."""
        variants = tuple(dict.fromkeys(name.strip() for name in settings.variants.split(",")))
        for name in variants:
            if name not in VARIANTS:
                raise SaccadeError(f"--variants {name!r} is not valid: {', '.join(VARIANTS)}")
        for name, value in {"kept": settings.kept, "rate": settings.rate}.items():
            if not 0 < value <= 1:
                raise SaccadeError(f"--{name} {value:g} is not valid: above 0 and at most 1")
        if settings.minutes is not None and not settings.minutes > 0:
            raise SaccadeError(f"--minutes {settings.minutes:g} is not valid: above 0")
        subject = Target.check(settings.common)
        shape = subject.subject.shape
        count = settings.target_heads or min(4, len(shape.full_layers)) * shape.kv_heads
        settings = replace(settings, target_heads=count)
        refuse_count(count, shape)
        if settings.drop_known:
            subject.refuse_made()
        for seed in range(settings.seeds):
            subject.draw(TRAINING + seed, settings.asked, settings.lengths, settings.steps, together=True)
        trial = cls(settings, subject, variants, count - shape.kv_heads)
        return replace(trial, others=tuple(_others(settings.common.output_dir / RESULTS, variants, trial.about())))

    def parts(self) -> list[Part]:
        """What processes train, in the order in which they are begun."""
        own, size = self.settings, self.settings.together
        until = None if own.minutes is None else time.time() + 60 * own.minutes
        chunks = [self.variants[begin : begin + size] for begin in range(0, len(self.variants), size)]
        return [Part(own, seed, chunk, self.target, until) for chunk in chunks for seed in range(own.seeds)]

    def run(self, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Train all that is not finished; `keep` is given the results so far, again and again.

        Raises:
            SaccadeError: a process that has failed, when all others have ended.
        """
        parts, workers = self.parts(), self.workers
        if workers == 1:
            for part in parts:
                train(part, _sometimes(lambda: keep(self.results())))
        else:
            self._share_out(parts, workers, _sometimes(lambda: keep(self.results())))
        results = self.results()
        keep(results)
        return results

    @property
    def workers(self) -> int:
        """Processes at a time."""
        return self.settings.workers or (_EACH * torch.cuda.device_count() if self._on_cuda else 1)

    @property
    def _on_cuda(self) -> bool:
        return self.subject.subject.device.type == "cuda"

    def _share_out(self, parts: list[Part], workers: int, after_look: Callable[[], None]) -> None:
        """A process for each part, so many at a time, on all CUDA devices in turns."""
        context, waiting, failed = get_context("spawn"), [*enumerate(parts)], 0
        running: list[BaseProcess] = []
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    number, part = waiting.pop(0)
                    process: BaseProcess = context.Process(target=train_alone, args=(self._placed(part, number),))
                    process.start()
                    running.append(process)
                time.sleep(_LOOK)
                failed += sum(process.exitcode not in (None, 0) for process in running)
                running = [process for process in running if process.exitcode is None]
                after_look()
        finally:
            for process in running:
                process.terminate()
        if failed:
            raise SaccadeError(f"{failed} of {len(parts)} processes have failed; the same command goes on")

    def _placed(self, part: Part, number: int) -> Part:
        """A part on its device."""
        if not self._on_cuda or self.settings.common.device not in ("auto", "cuda"):
            return part
        device = f"cuda:{number % torch.cuda.device_count()}"
        common = replace(part.settings.common, device=device)
        return replace(part, settings=replace(part.settings, common=common))

    def about(self) -> dict[str, Any]:
        """What every run of a file has in common."""
        own = self.settings
        names = ("target_heads", "seeds", "steps", "rate", "kept", "asked", "every")
        return {
            **{name: value for name, value in self.subject.about().items() if name not in ("context", "questions")},
            **{name: value for name, value in asdict(own).items() if name in names},
            "drop_known": own.drop_known or None,  # of which earlier files say nothing
            "lengths": list(own.lengths),
            "target": self.target,
        }

    def results(self) -> dict[str, Any]:
        """What the JSON file holds, from the trainings' logs."""
        own, about = self.settings, self.about()
        runs = [*self.others, *(run for part in self.parts() for run in self._runs(part))]
        names = {*self.variants, *(run["variant"] for run in self.others)}
        device, shape = self.subject.subject.device, self.subject.subject.shape
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return {
            "complete": len(runs) == len(names) * own.seeds and all(run["step"] == own.steps for run in runs),
            **about,
            "layers": [*shape.full_layers[1:]],
            "kv_heads": shape.kv_heads,
            "runs": sorted(runs, key=lambda run: ([*VARIANTS].index(run["variant"]), run["seed"])),
            "environment": {
                # Runs that are older than a claim's criteria stay so when later ones join them.
                "date": min([now, *(run["environment"]["date"] for run in self.others)]),
                "model": about["model"],
                "device": device_name(device),
                "processor": processor(),
                "kernels": kernels_on(device),
                "threads": own.common.threads,
                "dtype": about["dtype"],
                "versions": versions(),
            },
        }

    def _runs(self, part: Part) -> Iterator[dict[str, Any]]:
        """Every training of a part that has begun."""
        for name in part.variants:
            path = part.folder(name) / LOG
            records = _whole_lines(path)[1:] if path.is_file() else []
            if records:
                last = records[-1]
                flat = [value for layer in last["mean"] for value in layer]
                yield {
                    "variant": name,
                    "kind": VARIANTS[name].kind,
                    "scale": VARIANTS[name].scale,
                    "seed": part.seed,
                    "step": last["step"],
                    "start": records[1]["loss"] if last["step"] else None,
                    "expected_l0": last["expected_l0"],
                    "open": sum(value > THRESHOLD for value in flat),
                    "grey": sum(GREY[0] < value < GREY[1] for value in flat) / len(flat),
                    "values": last["mean"],
                    "trace": {field: [_short(record[field]) for record in records] for field in TRACED},
                }


def _others(file: Path, variants: tuple[str, ...], about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs of other variants that the results file holds, with the environment that they were trained in.

    Raises:
        SaccadeError: they were trained otherwise.
    """
    held = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"runs": []}
    for run in held["runs"]:
        if run["variant"] in variants:
            continue
        for name, value in about.items():
            if held.get(name) != value:
                told = f"{str(file)!r} holds gates trained with {name} {held.get(name)!r}, not {value!r}"
                raise SaccadeError(f"{told}; take another --output-dir")
        yield {"environment": held["environment"], **run}


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a file that another process writes: the last line may have no end yet."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _short(value: float | None) -> float | None:
    """Six digits, as many as a picture shows."""
    return None if value is None else float(f"{value:.6g}")


def _sometimes(work: Callable[[], None]) -> Callable[[], None]:
    """Work that is left out if it was done a moment ago."""
    last = time.monotonic()

    def do() -> None:
        nonlocal last
        if time.monotonic() - last >= _KEEP:
            work()
            last = time.monotonic()

    return do
