"""Hours of a default `saccade tune`, extrapolated from one text: what reading it and asking every candidate takes here.

Random weights answer nothing, so no run of `tune` itself can be timed with them; their arithmetic is that of others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from saccade.calibrate.asking import Reading
from saccade.calibrate.candidates import families, ladder, rungs
from saccade.calibrate.problems import Ask, Problem
from saccade.calibrate.promise import FINALISTS, MARGIN, RUNGS, texts_needed, texts_to_screen
from saccade.checkpoints.presets import random_model
from saccade.checkpoints.shape import shape_of
from saccade.eval.reader import Reader, rows_that_fit
from saccade.methods.policy import Policy
from saccade.recipes.machine import free_memory
from saccade.recipes.recipe import Recipe
from saccade.types import ModelShape

from .decode import smoke_folder
from .environment import environment
from .timing import Deadline, reason, write

QUESTION, ANSWER = 24, 3
"""Tokens; those of task `kv` have 22 and 2 in the bundled tokenizer."""

RESELECT = 13
"""Any layer: what is timed does not depend on which one the search would find."""

QUALITY, SEARCHED, DENSE_LAYERS = 0.99, 8, 2
"""What a default run wants to show, texts of its search for a layer, and layers below the first it may find."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--texts", type=int, help="that judge in the run extrapolated to; not given: a default run's")
    parser.add_argument("--asked", type=int, default=12, help="questions about each")
    given = parser.parse_args()
    if given.smoke:
        given.shape, given.context = smoke_folder(given.file.parent), min(given.context, 512)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if given.smoke else torch.bfloat16
    model = random_model(given.shape, positions=given.context + 256, dtype=dtype, device=device)
    results: dict[str, Any] = {
        "environment": environment(given.smoke),
        **{name: getattr(given, name) for name in ("shape", "context", "asked")},
        "dtype": str(dtype).removeprefix("torch."),
        "question_tokens": QUESTION,
        "answer_tokens": ANSWER,
        "left_out": [],
    }
    results["texts_that_screen"] = texts_to_screen(QUALITY, given.asked)
    results["texts_that_judge"] = given.texts or texts_needed(QUALITY, given.asked, FINALISTS, margin=MARGIN)
    Slice(model, given, results, Deadline(given.seconds)).measure()


class Slice:
    """One text of a run, measured part by part; every part is written as soon as it is there."""

    def __init__(self, model: Any, given: argparse.Namespace, results: dict[str, Any], deadline: Deadline) -> None:
        self.model, self.given, self.results, self.deadline = model, given, results, deadline
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.config.vocab_size

        def words(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(2, vocabulary, (count,), generator=generator).tolist())

        asks = tuple(Ask(words(QUESTION), words(ANSWER), (10, 10 + ANSWER)) for _ in range(given.asked))
        self.problem = Problem(words(given.context), asks)

    def measure(self) -> None:
        results, shape = self.results, shape_of(self.model.config)
        budgets = ladder(self.given.context)
        results["free_bytes"] = free_memory(self.model.device)
        results["rows"] = rows = rows_that_fit(self.model, self.given.context, self.given.asked)
        batches = -(-self.given.asked // rows)
        results["tokens_decoded_one_after_the_other"] = batches * (QUESTION + ANSWER - 1)
        results["prefill"] = self.timed(lambda: Reader(self.model, self.problem.tokens), times=3)
        results["reading"] = self.timed(lambda: Reading(self.model, self.problem, rows), times=3)
        reading = Reading(self.model, self.problem, rows)
        results["dense"] = self.asked(reading, "dense", recall=False)
        results["families"] = made = {}
        for family in candidates(shape):
            specs = [policy.to_spec() for policy in rungs(family, budgets, self.given.context)]
            made[str(family)] = [self.asked(reading, spec, recall=False) for spec in specs]
            self.write(shape, len(budgets))
        tidal = [f"tidal:budget={budget},reselect={RESELECT}" for budget in budgets]
        results["search"] = {
            "dense": self.asked(reading, "dense", recall=True),
            "tidal": [self.asked(reading, spec, recall=True) for spec in tidal],
        }
        self.write(shape, len(budgets))

    def asked(self, reading: Reading, spec: str, *, recall: bool) -> dict[str, Any]:
        """All questions of the text under one policy."""
        taken = self.timed(lambda: reading.ask(Policy.from_spec(spec), recall=recall))
        if "seconds" in taken:
            taken["seconds_per_token"] = taken["seconds"] / self.results["tokens_decoded_one_after_the_other"]
        return {"spec": spec, **taken}

    def timed(self, work: Callable[[], Any], times: int = 2) -> dict[str, Any]:
        """Seconds of the last of a few times, of the first, in which kernels are compiled, and the most memory."""
        device, seconds = self.model.device, []
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            for _ in range(times):
                if self.deadline.left < 0:
                    raise TimeoutError("no time")
                start = time.perf_counter()
                work()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
        except Exception as error:  # a candidate that cannot run here leaves the others their figures
            return {"left_out": reason(error)}
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        return {"seconds": seconds[-1], "first_seconds": seconds[0], "peak_bytes": peak}

    def write(self, shape: ModelShape, budgets: int) -> None:
        self.results["extrapolated"] = extrapolated(self.results, shape.layers, budgets)
        write(self.given.file, self.results)


def candidates(shape: ModelShape) -> tuple[Policy, ...]:
    """The families of a default run, once its search has found a layer."""
    known = Recipe(shape, Policy.from_spec("dense"), reselect=(RESELECT,))
    return families(known, ())


def extrapolated(results: dict[str, Any], layers: int, budgets: int) -> dict[str, Any]:
    """Hours of the whole run on this machine, and the parts that they are products and sums of; nothing of it is timed.

    `most`: the dearest rungs of the dearest families are judged to the end. `least`: the screen lets nothing through.
    What could not be measured is counted as nothing, and named.
    """
    unmeasured: list[str] = []

    def seconds(row: dict[str, Any]) -> float:
        if "seconds" not in row:
            unmeasured.append(row.get("spec", "a part without a policy"))
        return float(row.get("seconds", 0.0))

    reading, dense = seconds(results["reading"]), seconds(results["dense"])
    rows = [[seconds(row) for row in family] for family in results["families"].values()]
    everything = sum(map(sum, rows))
    dearest = [max(sum(family[place : place + RUNGS]) for place in range(len(family))) for family in rows]
    finalists = sum(sorted(dearest)[-FINALISTS:])
    screening, judging = results["texts_that_screen"], results["texts_that_judge"]
    parts = {
        "texts_that_screen": screening,
        "texts_that_judge": judging,
        "reading_a_text": reading,
        "dense_per_text": dense,
        "all_candidates_per_text": everything,
        "dearest_finalists_per_text": finalists,
    }
    screen = screening * (reading + dense + everything)
    walk = {"most": screen + judging * (reading + dense + finalists), "least": screen}
    found: dict[str, Any] = {
        "how": "least = texts that screen * (reading + dense + all candidates); most = least + texts that judge * "
        "(reading + dense + dearest finalists: of each of the two dearest families the two dearest rungs in a row); "
        "search = its texts * (reading + dense + layers tried * tidal at all budgets)",
        "not_counted": "loading weights, making texts (0.3 s each on a CPU), compiling kernels",
        "parts_in_seconds": parts,
        "hours_of_the_screen": screen / 3600,
        "hours_of_the_walk": {name: value / 3600 for name, value in walk.items()},
    }
    if "search" in results:
        search = results["search"]
        tried = layers - DENSE_LAYERS
        tidal = sum(map(seconds, search["tidal"]))
        answers = seconds(search["dense"])
        total = SEARCHED * (reading + answers + tried * tidal)
        parts |= {"texts_of_the_search": SEARCHED, "layers_tried": tried, "tidal_at_all_budgets": tidal}
        parts |= {"dense_with_recall": answers, "budgets": budgets}
        found["hours_of_the_search"] = total / 3600
        found["hours"] = {name: (value + total) / 3600 for name, value in walk.items()}
    found["unmeasured"] = unmeasured
    return found


if __name__ == "__main__":
    main()
