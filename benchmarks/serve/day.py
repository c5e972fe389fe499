"""An agent's day: conversations that come back with all that was said and something new, replayed by one engine."""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

from .load import Answers, LoadedEngine, random_tokens
from .told import Script, scripts_of

Conversation = Generator[tuple[list[int], int], list[int], None]
"""Gives prompts and how many tokens answer them, turn by turn; is sent the answers."""

WARM = 8192
"""Tokens of a prompt before what counts: more than usual sets hold, and as many as a step of vLLM reads on a GPU."""


@dataclass(frozen=True, slots=True)
class Day:
    """What agents ask: of the same lengths for every engine, whose own answers stand in later prompts.

    Attributes:
        conversations: at once, each with one request at a time.
        turns: of each conversation, two at least.
        start, end: tokens of a first prompt, and of a conversation with its last answer.
        shared: how much of the first prompts all have in common, as a share: what the system says, and its tools.
        answers: tokens of the shortest and the longest; the logarithms of lengths are spread evenly.
        vocabulary: of the model; what is said is drawn from it at random, unless there is a `model`.
        warms: whether it is the day before, of which nothing is told, and says something else.
        model: the folder of a model that is told facts, and asked for them.
    """

    conversations: int
    turns: int
    start: int
    end: int
    shared: float
    answers: tuple[int, int]
    vocabulary: int
    warms: bool = False
    model: str | None = None

    def before(self) -> Day:
        """A short day in which an engine compiles what it needs: as many conversations, two turns."""
        start, answer = min(self.start, WARM), self.answers[0]
        short, end = (answer, answer), start + 2 * answer + 1
        return replace(self, turns=2, start=start, end=end, answers=short, warms=True, model=None)

    def lengths(self, number: int) -> list[tuple[int, int]]:
        """Of one conversation: tokens of each prompt and of its answer. What comes new is alike in all later turns."""
        (shortest, longest), draw = self.answers, random.Random(self._seed(number))
        spread = (longest + 1) / shortest
        answers = [min(int(shortest * spread ** draw.random()), longest) for _ in range(self.turns)]
        new = self.end - self.start - sum(answers)
        prompts = [self.start + sum(answers[:turn]) + new * turn // (self.turns - 1) for turn in range(self.turns)]
        return list(zip(prompts, answers, strict=True))

    @property
    def scripts(self) -> Sequence[Script]:
        """What is said and asked, conversation by conversation, if a model is told facts."""
        if self.model is None:
            return ()
        lengths = tuple(tuple(self.lengths(number)) for number in range(self.conversations))
        return scripts_of(self.model, lengths, int(self.shared * self.start))

    def conversation(self, number: int) -> Conversation:
        """One of them, whose answers are told as they come."""
        kept, scripts = int(self.shared * self.start), self.scripts
        words = random_tokens(self._seed(-1), kept, self.vocabulary)
        words += random_tokens(self._seed(number), self.end - kept, self.vocabulary)
        said: list[int] = []
        for turn, (prompt, answer) in enumerate(self.lengths(number)):
            said = [*said, *(scripts[number].messages[turn] if scripts else words[len(said) : prompt])]
            said = said + (yield said, answer)

    def _seed(self, number: int) -> int:
        # No other day finds something of this one in the prefix cache.
        return 1_000_003 * (2 * self.conversations + self.warms + 1) + number


@dataclass(slots=True)
class Replayed(Answers):
    """What was seen of a day; times in seconds.

    Attributes:
        seconds: from the first prompt to the last answer.
        decode_seconds, decode_tokens: while at least one row decodes, which it does from its first token to its last;
            and what rows gained in this time behind their first tokens.
        alone_seconds, alone_tokens: of it, while no prompt waits for its first token.
        prompts, cached: tokens of all conversations' prompts by turn, and what the prefix cache held of them.
        right: of each conversation that is told facts, turn by turn, whether it was answered the code asked for.
    """

    seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    alone_seconds: float = 0.0
    alone_tokens: int = 0
    prompts: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    right: list[list[bool]] = field(default_factory=list)


def replay(engine: LoadedEngine, day: Day) -> Replayed:
    """All conversations from their first prompts to their last answers; each goes on as soon as it was answered.

    Before that the short day that nobody counts.
    """
    if not day.warms:
        replay(engine, day.before())
    seen, scripts = Replayed(prompts=[0] * day.turns, cached=[0] * day.turns), day.scripts
    seen.right, talks = [[] for _ in scripts], dict[str, tuple[Conversation, int, int]]()
    begun = last = time.perf_counter()
    for number in range(day.conversations):
        talk = day.conversation(number)
        talks[engine.ask(*next(talk))] = talk, number, 0
    while talks:
        held = [tokens for _, tokens in engine.running.values()]
        now, heard = engine.step()
        gained = sum(one.gained for one in heard if one.before)
        if any(held):
            seen.decode_seconds += now - last
            seen.decode_tokens += gained
        if all(held):
            seen.alone_seconds += now - last
            seen.alone_tokens += gained
        last, seen.seconds = now, now - begun
        for one in heard:
            seen.hear(one)
            if one.output.finished:
                talk, number, turn = talks.pop(one.output.request_id)
                answer = [*one.output.outputs[0].token_ids]
                if scripts:
                    seen.right[number].append(scripts[number].right(turn, answer))
                seen.prompts[turn] += len(one.output.prompt_token_ids)
                seen.cached[turn] += one.output.num_cached_tokens
                if turn + 1 < day.turns:
                    talks[engine.ask(*talk.send(answer))] = talk, number, turn + 1
    return seen
