"""A closed loop of clients against one engine: each asks again as soon as it was answered."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from saccade.adapters.vllm.options import ServeOptions
from saccade.bench.synthetic import Engine, request_for
from saccade.errors import SaccadeError


@dataclass(frozen=True, slots=True)
class Load:
    """What clients ask: prompts of random tokens, the same for every engine.

    Attributes:
        clients: each with one request at a time.
        lengths: of prompts in tokens, in turn.
        shared: how much of each prompt all have in common, as a share.
        new_tokens: generated per request.
        requests: to be answered in the time that counts.
        vocabulary: of the model.
        stream: prompts a second beside clients whose answers go on; they count, and are answered by one token.
    """

    clients: int
    lengths: tuple[int, ...]
    shared: float
    new_tokens: int
    requests: int
    vocabulary: int
    stream: float | None = None

    def prompts(self) -> Iterator[list[int]]:
        """Prompts without end, no two alike behind what they share."""
        # No load finds in the prefix cache what one before it has left there.
        seed = 1_000_003 * self.clients
        common = random_tokens(seed, max(self.lengths), self.vocabulary)
        for number in count():
            length = self.lengths[number % len(self.lengths)]
            kept = int(self.shared * length)
            yield common[:kept] + random_tokens(seed + 1 + number, length - kept, self.vocabulary)


def random_tokens(seed: int, length: int, vocabulary: int) -> list[int]:
    """The same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(vocabulary, (length,), generator=generator, device="cpu").tolist()
    return tokens


@dataclass(frozen=True, slots=True)
class Heard:
    """What a step brought a request: vLLM's output, `gained` tokens behind those `before`, seconds after the last."""

    output: Any
    gap: float
    before: int
    gained: int


@dataclass(slots=True)
class Answers:
    """What was heard of answers; times in seconds.

    Attributes:
        tokens: of all of them.
        firsts: from asking to the first token.
        gaps: between two steps that brought a request tokens.
    """

    tokens: int = 0
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def hear(self, one: Heard) -> None:
        """Note what a step brought a request, if anything."""
        if one.gained:
            (self.gaps if one.before else self.firsts).append(one.gap)
            self.tokens += one.gained


@dataclass(slots=True)
class Served(Answers):
    """What was seen while it counted.

    Attributes:
        seconds: that it counted.
        requests: answered.
        prompt_tokens, cached_tokens: of those requests' prompts, and what the prefix cache held of them.
    """

    seconds: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class LoadedEngine(Engine):
    """An engine with its prefix cache, as served.

    Attributes:
        running: requests under way: when each was asked or had its last token, and how many it has.
    """

    def __init__(self, options: ServeOptions | None, **settings: Any) -> None:
        super().__init__(options, enable_prefix_caching=True, **settings)
        self.running: dict[str, tuple[float, int]] = {}
        self._asked = count()

    def ask(self, prompt: list[int], tokens: int) -> str:
        """Ask for so many tokens behind a prompt; the request's name."""
        name, request = str(next(self._asked)), request_for(prompt, tokens)
        self.running[name] = time.perf_counter(), 0
        self.llm.llm_engine.add_request(name, *request)
        return name

    def step(self) -> tuple[float, list[Heard]]:
        """Go on until there is something to hear: when that was, by `time.perf_counter`, and of which requests."""
        outputs, now, heard = self.llm.llm_engine.step(), time.perf_counter(), []
        for output in outputs:
            name = output.request_id
            if name not in self.running:
                # Steps that were under way when a load was dropped may still tell of it.
                continue
            (since, before), tokens = self.running[name], len(output.outputs[0].token_ids)
            heard.append(Heard(output, now - since, before, tokens - before))
            if output.finished:
                del self.running[name]
            elif tokens > before:
                self.running[name] = now, tokens
        return now, heard

    def serve(self, load: Load) -> Served:
        """Keep clients busy, and count from their first answers on; requests under way at the end are dropped.

        First requests differ in what they generate, so that clients do not go on in step. Before it counts a prompt of
        every length was answered, so that the prefix cache holds what is shared. Beside a stream it counts as soon as
        all clients have their first tokens.

        Raises:
            SaccadeError: if a client's answer ended beside a stream.
        """
        prompts, served = load.prompts(), Served()
        for client in range(load.clients):
            self.ask(
                next(prompts), load.new_tokens if load.stream else -(-load.new_tokens * (client + 1) // load.clients)
            )
        answered, opened, warm = 0, None, load.clients if load.stream else max(load.clients, len(load.lengths))
        clients, streamed = set(self.running) if load.stream else set(), 0
        while served.requests < load.requests:
            (now, heard), done = self.step(), 0
            for one in heard:
                if opened is not None:
                    served.hear(one)
                if one.gained and not one.before:
                    answered += one.output.request_id in clients
                if one.output.finished:
                    if one.output.request_id in clients:
                        raise SaccadeError(f"new-tokens={load.new_tokens} is too few: a client's answer ended")
                    done += 1
                    if opened is not None:
                        served.requests += 1
                        served.prompt_tokens += len(one.output.prompt_token_ids)
                        served.cached_tokens += one.output.num_cached_tokens
            answered += 0 if load.stream else done
            if opened is None and answered >= warm:
                opened = now
            served.seconds = 0.0 if opened is None else now - opened
            if load.stream:
                done = int(served.seconds * load.stream) - streamed
                streamed += done
            for _ in range(done):
                self.ask(next(prompts), 1 if load.stream else load.new_tokens)
        self.drop(self.running)
        self.running.clear()
        return served
