"""Problems asked densely first; those that are answered rightly and at length again under every policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from saccade.adapters.vllm.engine_settings import engine_settings
from saccade.adapters.vllm.options import ServeOptions
from saccade.adapters.vllm.server.serve import INSTALL
from saccade.bench.synthetic import prepare_process
from saccade.bench.variants import STOCK
from saccade.errors import DocumentError, SaccadeError
from saccade.eval.output import whole_numbers
from saccade.methods.policy import Policy
from saccade.recipes.machine import environment
from saccade.report.table import new_table

from ..judging.study import Study
from .problems import ASKED, FAMILIES, Problem, problems_of

SHORTEST, LONGEST, RIGHT = 400, 2000, 0.5
"""Tokens of the dense answers to a problem that qualifies, on the mean; and the share of them that is right."""
CHOOSING, JUDGED = (1, 2, 3), (0, 4, 5)
"""Turns by whose dense answers problems are chosen, and others that are judged: else dense ones were the luckiest."""
EACH, MOST, ROOM = 32, 150, 4096
"""Problems of a family; those that qualify, at most; tokens of an answer."""
WARM, ROWS = 0.7, 256
"""Temperature of answers that are drawn; rows together."""
RULES = (SHORTEST, LONGEST, RIGHT, CHOOSING, JUDGED, EACH, MOST, ROOM, WARM, FAMILIES, ASKED)
"""What decides which problems are judged; stands in the file beside policies, budgets and seed."""

MEANS = {"tokens": "{:,.0f}", "ended": "{:.3f}", "right": "{:.3f}"}
Asked = tuple[Problem, list[int]]


@dataclass(frozen=True)
class Reasoning:
    """Settings that passed every check, and problems with their tokens."""

    study: Study
    policies: Mapping[str, Policy]
    problems: tuple[Asked, ...]
    seed: int
    rules: tuple[Any, ...]
    memory: float
    notes: tuple[str, ...] = ()

    @classmethod
    def check(cls, model: str, named: Sequence[str], budgets: str, seed: int, memory: float) -> Reasoning:
        """Resolve settings, or raise a SaccadeError about the first that is not valid."""
        if find_spec("vllm") is None:
            raise SaccadeError(INSTALL)
        if not 0 < memory < 1:
            raise SaccadeError(f"memory={memory} is not valid: a share of the device's, such as 0.9")
        study, sizes = Study(model, Path()), whole_numbers("budget", budgets, at_least=1)
        specs = [f"{one}{',' if ':' in one else ':'}budget={size}" for one in named for size in sizes]
        policies = {str(policy): policy for policy in study.policies(specs).values()}
        if rectified := [name for name, policy in policies.items() if policy.rectify is not None]:
            raise SaccadeError(f"policy {rectified[0]} is not valid here: what rectifies is not asked")
        problems = tuple((one, _tokens(study, one)) for one in problems_of(EACH, seed))
        made = cls(study, policies, problems, seed, (*RULES, tuple(named), budgets, seed), memory)
        if made.longest > study.subject.positions:
            told = f"{made.longest} tokens, problem and answer"
            raise DocumentError(f"{told}: the model has {study.subject.positions} positions")
        return made

    @property
    def longest(self) -> int:  # tokens of a problem and its answer
        return ROOM + max(len(tokens) for _, tokens in self.problems)

    @property
    def units(self) -> int:
        return 1 + len(self.policies)

    def run(self, on_unit: Callable[[str, dict[str, Any]], None]) -> dict[str, Any]:
        """Ask one engine after the other.

        Raises:
            SaccadeError: no problem qualifies.
        """
        prepare_process(served=True)
        subject, rows = self.study.subject, list[dict[str, Any]]()
        about = environment(threads=1, dtype=subject.dtype, device=subject.device) | {"model": subject.source.name}
        results = {"rows": rows, "environment": about, "rules": self.rules, "asked": len(self.problems)}
        with self._engine(None) as llm:
            dense = self._ask(llm, self.problems, CHOOSING)
            able = [problem for problem, row in zip(self.problems, dense, strict=True) if qualifies(row)]
            results["qualified"] = len(able)
            if not able:
                raise SaccadeError(f"none of {len(self.problems)} problems is answered rightly and at length")
            count = min(len(able), MOST)
            problems = [able[place * len(able) // count] for place in range(count)]
            rows += [row | {"arm": STOCK} for row in self._ask(llm, problems, JUDGED)]
        on_unit(STOCK, results)
        for name, policy in self.policies.items():
            with self._engine(policy) as llm:
                rows += [row | {"arm": name} for row in self._ask(llm, problems, JUDGED)]
            on_unit(name, results)
        return results

    def _ask(self, llm: Any, problems: Sequence[Asked], turns: Sequence[int]) -> list[dict[str, Any]]:
        """A row per problem; turn 0 is greedy, every other one is drawn by a seed of its own."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        warm = [(turn, WARM if turn else 0.0) for turn in turns]
        params = [SamplingParams(temperature=one, seed=self.seed + turn, max_tokens=ROOM) for turn, one in warm]
        prompts = [TokensPrompt(prompt_token_ids=tokens) for _, tokens in problems for _ in params]
        outputs = [answer.outputs[0] for answer in llm.generate(prompts, params * len(problems), use_tqdm=False)]
        rows = []
        for place, (problem, _) in enumerate(problems):
            said = outputs[place * len(params) : (place + 1) * len(params)]
            row = {"tokens": [len(one.token_ids) for one in said], "right": [problem.right(one.text) for one in said]}
            row |= {"ended": [one.finish_reason == "stop" for one in said]}
            rows.append({"problem": problem.name, **row})
        return rows

    @contextmanager
    def _engine(self, policy: Policy | None) -> Iterator[Any]:
        import vllm

        told: dict[str, Any] = {"model": self.study.model, "dtype": self.study.subject.dtype_name, "seed": self.seed}
        if policy is not None:
            told |= engine_settings(ServeOptions(policy), told["model"])
        sizes = {"max_num_seqs": ROWS, "max_model_len": self.longest, "gpu_memory_utilization": self.memory}
        llm = vllm.LLM(**sizes, **told)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def qualifies(row: Mapping[str, Any]) -> bool:
    """Whether dense answers to a problem are long, end, and are right often enough."""
    return SHORTEST <= fmean(row["tokens"]) <= LONGEST and all(row["ended"]) and fmean(row["right"]) >= RIGHT


def _tokens(study: Study, problem: Problem) -> list[int]:
    """A problem as a user's turn, if the model has a template for it."""
    tokenizer, text = study.subject.tokenizer, f"{problem.question}\n"
    if tokenizer.chat_template is not None:
        turn = [{"role": "user", "content": problem.question}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return [*tokenizer(text, add_special_tokens=tokenizer.chat_template is None)["input_ids"]]


def reasoning_table(results: Mapping[str, Any]) -> Table:
    """Means over the problems that dense attention answers rightly and at length."""
    told = f"{results['qualified']} of {results['asked']} problems qualify; {results['environment']['model']}"
    table, rows = new_table(told, ("policy", "problems", *MEANS), words=("policy",)), results["rows"]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        means = (form.format(fmean(fmean(one[name]) for one in own)) for name, form in MEANS.items())
        table.add_row(arm, str(len(own)), *means)
    return table
