"""Requests that come and go while others decode, and what each of them was answered."""

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from engines import core, tokens_of_text
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        place, length: its prompt's in the text.
        tokens: the most that it is answered.
        when: it comes when the first request has so many tokens, or when another one has ended.
        turn: whether its prompt stands behind the other's prompt and answer.
        aborted: after how many tokens it is given up; 0: it is not.
        settings: of vLLM's `SamplingParams`.
    """

    place: int
    length: int
    tokens: int
    when: int | str = 0
    turn: bool = False
    aborted: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Heard:
    """What it was answered: token ids, of each the ids and log-probabilities asked for, why it ended, what it found."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)
    cached: int = 0


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
LOADS: dict[str, dict[str, Ask]] = {
    "whole": {
        "first": Ask(0, 200, 36),
        "short": Ask(3000, 40, 20),
        "one": Ask(3100, 90, 1),
        "late": Ask(4000, 260, 12, when=6),
        "likely": Ask(5000, 70, 8, when=8, settings={"logprobs": 3, "prompt_logprobs": 1}),
        "penal": Ask(5200, 60, 12, when=9, settings=PENALTIES),
        "gone": Ask(5400, 60, 30, when=12, aborted=6),
        "words": Ask(5600, 70, 12, when=14, settings={"bad_words": ["the", "of"], "min_tokens": 10}),
        "same": Ask(0, 200, 8, when=18),
        "sibling": Ask(0, 170, 8, when=21),
        "turn": Ask(6000, 20, 8, when="first", turn=True),
        "edge": Ask(7000, 500, 200, when=24),
        "ended": Ask(8000, 150, 200, when=27, settings={"ignore_eos": False, "stop": ["."]}),
    },
    "small": {
        "first": Ask(9000, 200, 16),
        "second": Ask(9700, 40, 12),
        "third": Ask(9900, 130, 10, when=6),
    },
}
_numbers = count()


def hear(engine: LLM, name: str) -> dict[str, Heard]:
    """Ask a load; nothing is found in the prefix cache but what it has left there itself."""
    asks, inner, salt = LOADS[name], engine.llm_engine, f"load {next(_numbers)}"
    heard, waiting, running = {one: Heard() for one in asks}, dict(asks), set[str]()
    first, text = heard["first"], tokens_of_text()
    while waiting or running:
        for one, ask in list(waiting.items()):
            due = heard[ask.when].ended if isinstance(ask.when, str) else len(first.tokens) >= ask.when or first.ended
            if not due:
                continue
            prompt = text[ask.place :][: ask.length]
            if ask.turn:
                before = asks[str(ask.when)]
                prompt = text[before.place :][: before.length] + heard[str(ask.when)].tokens + prompt
            settings = {"temperature": 0, "ignore_eos": True, "max_tokens": ask.tokens, **ask.settings}
            inner.add_request(one, TokensPrompt(prompt_token_ids=prompt, cache_salt=salt), SamplingParams(**settings))
            running.add(one)
            del waiting[one]
        for output in inner.step():
            one = output.request_id.partition("-")[0]
            answer, known = output.outputs[0], heard[one]
            if known.ended:
                continue
            known.tokens = list(answer.token_ids)
            known.logprobs = [
                sorted((i, chance.logprob) for i, chance in step.items()) for step in answer.logprobs or ()
            ]
            if output.finished:
                known.ended, known.cached = [answer.finish_reason, answer.stop_reason], output.num_cached_tokens
                running.discard(one)
            elif 0 < asks[one].aborted <= len(known.tokens):
                inner.abort_request([output.request_id])
                known.ended = ["abort", None]
                running.discard(one)
    # Steps that were scheduled ahead for whoever has ended.
    while inner.has_unfinished_requests():
        inner.step()
    return heard


def turns(engine: LLM) -> dict[str, Heard]:
    """A prompt, the same again, and one behind its answer, none in the prefix cache: what is found is elsewhere."""
    heard, prompt, scheduler = dict[str, Heard](), tokens_of_text()[12000:12184], core(engine).scheduler
    settings = SamplingParams(temperature=0, ignore_eos=True, max_tokens=10, logprobs=0)
    for name in ("first", "same", "turn"):
        given = TokensPrompt(prompt_token_ids=prompt, cache_salt="turns")
        (output,) = engine.generate([given], settings, use_tqdm=False)
        answer = output.outputs[0]
        chances = [[(token, one.logprob) for token, one in step.items()] for step in answer.logprobs]
        ended = [answer.finish_reason, answer.stop_reason]
        heard[name] = Heard(list(answer.token_ids), chances, ended, output.num_cached_tokens)
        while scheduler.has_requests():  # what is stored behind the answer
            engine.llm_engine.step()
        assert engine.reset_prefix_cache()
        prompt = prompt + heard["first"].tokens + tokens_of_text()[14000:14020] if name == "same" else prompt
    return heard
