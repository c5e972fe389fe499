"""Problems asked densely first; those that are answered rightly and at length again under every policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from saccade.adapters.vllm.options import KEY, ServeOptions
from saccade.bench.synthetic import prepare_process
from saccade.bench.variants import STOCK
from saccade.errors import DocumentError, SaccadeError
from saccade.eval.output import whole_numbers
from saccade.methods.policy import Policy
from saccade.recipes.machine import environment

from ..judging.study import Study
from .problems import Problem, problems_of

AGAIN = f"{STOCK}, sampled again"
"""What dense attention says to the same problems anew: how much choosing them by its answers tells by itself."""
SHORTEST, LONGEST, RIGHT = 400, 2000, 0.5
"""Tokens of the dense answers to a problem that qualifies, on the mean; and the share of them that is right."""
WARM, ROWS, PHRASE = 0.7, 256, 8
"""Temperature of all answers but the first, which is greedy; rows together; tokens of a phrase that may come again."""


@dataclass(frozen=True, slots=True)
class ReasoningSettings:
    """What the user can choose; see `python -m claims reasoning --help`."""

    model: str
    policies: tuple[str, ...]
    budgets: str
    each: int
    most: int
    longest: int
    samples: int
    seed: int


@dataclass(frozen=True)
class Reasoning:
    """Settings that passed every check."""

    settings: ReasoningSettings
    study: Study
    policies: Mapping[str, Policy]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def check(cls, settings: ReasoningSettings) -> Reasoning:
        """Resolve settings, or raise a SaccadeError about the first that is not valid."""
        study = Study(settings.model, Path())
        budgets = whole_numbers("budget", settings.budgets, at_least=1)
        specs = [f"{one}{',' if ':' in one else ':'}budget={size}" for one in settings.policies for size in budgets]
        policies = {str(policy): policy for policy in study.policies(specs).values()}
        for policy in policies.values():
            if policy.rectify is not None and policy.rectify.mode == "verify":
                raise SaccadeError(f"policy {policy} is not valid: its answers are dense attention's")
        problems = problems_of(settings.each, settings.seed)
        needed = settings.longest + max(len(_tokens(study, one)) for one in problems)
        if needed > study.subject.positions:
            raise DocumentError(
                f"{needed} tokens, problem and answer: the model has {study.subject.positions} positions"
            )
        return cls(settings, study, policies, tuple(problems))

    @property
    def units(self) -> int:
        """Engines."""
        return 1 + len(self.policies)

    def run(self, on_unit: Callable[[str, dict[str, Any]], None]) -> dict[str, Any]:
        """Ask one engine after the other.

        Raises:
            SaccadeError: no problem qualifies.
        """
        prepare_process(served=True)
        own, subject, rows = self.settings, self.study.subject, list[dict[str, Any]]()
        about = environment(threads=1, dtype=subject.dtype, device=subject.device) | {"model": subject.source.name}
        results = {"rows": rows, "settings": asdict(own), "environment": about, "asked": len(self.problems)}
        turns = range(own.samples + 1)
        with self._engine(None) as llm:
            dense = self._ask(llm, self.problems, turns)
            kept = [place for place, row in enumerate(dense) if qualifies(row)]
            results["qualified"] = len(kept)
            if not kept:
                raise SaccadeError(f"none of {len(self.problems)} problems is answered rightly and at length")
            kept = kept[:: max(len(kept) // own.most, 1)][: own.most]
            problems = [self.problems[place] for place in kept]
            again = self._ask(llm, problems, range(own.samples + 1, 2 * own.samples + 2))
        rows += [row | {"arm": STOCK} for row in (dense[place] for place in kept)]
        rows += [row | {"arm": AGAIN} for row in again]
        on_unit(STOCK, results)
        for name, policy in self.policies.items():
            with self._engine(policy) as llm:
                rows += [row | {"arm": name} for row in self._ask(llm, problems, turns)]
            on_unit(name, results)
        return results

    def _ask(self, llm: Any, problems: Sequence[Problem], turns: Sequence[int]) -> list[dict[str, Any]]:
        """A row per problem; turn 0 is greedy, every other one is drawn by a seed of its own."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        own = self.settings
        params = [
            SamplingParams(temperature=WARM if turn else 0.0, seed=own.seed + turn, max_tokens=own.longest)
            for turn in turns
        ]
        prompts = [TokensPrompt(prompt_token_ids=_tokens(self.study, problem)) for problem in problems]
        asked = llm.generate([prompt for prompt in prompts for _ in params], [*params] * len(prompts), use_tqdm=False)
        outputs = [answer.outputs[0] for answer in asked]
        rows = []
        for place, problem in enumerate(problems):
            said = outputs[place * len(params) : (place + 1) * len(params)]
            row: dict[str, Any] = {"problem": problem.name, "tokens": [len(one.token_ids) for one in said]}
            row["ended"] = [one.finish_reason == "stop" for one in said]
            row["right"] = [problem.right(one.text) for one in said]
            rows.append(row | {"repeated": [round(repeated(one.token_ids), 4) for one in said]})
        return rows

    @contextmanager
    def _engine(self, policy: Policy | None) -> Iterator[Any]:
        import vllm

        own, subject, ours = self.settings, self.study.subject, dict[str, Any]()
        if policy is not None:
            options = ServeOptions(policy)
            ours = {"additional_config": {KEY: options.to_dict()}, "attention_backend": "CUSTOM"}
        llm = vllm.LLM(
            model=own.model, dtype=subject.dtype_name, seed=own.seed, max_num_seqs=ROWS,
            max_model_len=own.longest + max(len(_tokens(self.study, one)) for one in self.problems), **ours,
        )  # fmt: skip
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def qualifies(row: Mapping[str, Any]) -> bool:
    """Whether dense answers to a problem are long, end, and are right often enough."""
    return SHORTEST <= fmean(row["tokens"]) <= LONGEST and all(row["ended"]) and fmean(row["right"]) >= RIGHT


def repeated(tokens: Sequence[int]) -> float:
    """Share of an answer's phrases that came before."""
    phrases = [tuple(tokens[at : at + PHRASE]) for at in range(len(tokens) - PHRASE + 1)]
    return 1 - len({*phrases}) / len(phrases) if phrases else 0.0


def _tokens(study: Study, problem: Problem) -> list[int]:
    """A problem as a user's turn, if the model has a template for it."""
    tokenizer = study.subject.tokenizer
    if tokenizer.chat_template is None:
        return [*tokenizer(f"{problem.question}\n")["input_ids"]]
    turn = [{"role": "user", "content": problem.question}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return [*tokenizer(text, add_special_tokens=False)["input_ids"]]
