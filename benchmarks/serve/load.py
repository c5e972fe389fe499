"""A closed loop of clients against one engine: each asks again as soon as it was answered."""

from __future__ import annotations

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
        common = self._tokens(0, max(self.lengths))
        for number in count():
            length = self.lengths[number % len(self.lengths)]
            kept = int(self.shared * length)
            yield common[:kept] + self._tokens(1 + number, length - kept)

    def _tokens(self, number: int, length: int) -> list[int]:
        # No load finds in the prefix cache what one before it has left there.
        generator = torch.Generator().manual_seed(1_000_003 * self.clients + number)
        tokens: list[int] = torch.randint(self.vocabulary, (length,), generator=generator, device="cpu").tolist()
        return tokens


@dataclass(slots=True)
class Served:
    """What was seen while it counted; times in seconds.

    Attributes:
        seconds: that it counted.
        requests, tokens: answered, and generated.
        prompt_tokens, cached_tokens: of those requests' prompts, and what the prefix cache held of them.
        firsts: from asking to the first token.
        gaps: between two steps that brought a request tokens.
    """

    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


Running = dict[str, tuple[float, int]]
"""Requests under way: when each was asked or had its last token, and how many it has."""


class LoadedEngine(Engine):
    """An engine with its prefix cache, as served."""

    def __init__(self, options: ServeOptions | None, **settings: Any) -> None:
        super().__init__(options, enable_prefix_caching=True, **settings)
        self._asked = count()

    def serve(self, load: Load) -> Served:
        """Keep clients busy, and count from their first answers on; requests under way at the end are dropped.

        First requests differ in what they generate, so that clients do not go on in step. Before it counts a prompt of
        every length was answered, so that the prefix cache holds what is shared. Beside a stream it counts as soon as
        all clients have their first tokens.

        Raises:
            SaccadeError: if a client's answer ended beside a stream.
        """
        inner, prompts, served = self.llm.llm_engine, load.prompts(), Served()
        running: Running = {}
        for client in range(load.clients):
            tokens = load.new_tokens if load.stream else -(-load.new_tokens * (client + 1) // load.clients)
            self._ask(next(prompts), tokens, running)
        answered, opened, warm = 0, None, load.clients if load.stream else max(load.clients, len(load.lengths))
        clients, streamed = set(running) if load.stream else set(), 0
        while served.requests < load.requests:
            outputs, now, done = inner.step(), time.perf_counter(), 0
            for output in outputs:
                name = output.request_id
                if name not in running:
                    # Steps that were under way when a load was dropped may still tell of it.
                    continue
                (since, before), tokens = running[name], len(output.outputs[0].token_ids)
                if opened is not None and tokens > before:
                    (served.gaps if before else served.firsts).append(now - since)
                    served.tokens += tokens - before
                if tokens > before:
                    running[name] = now, tokens
                    answered += name in clients and not before
                if output.finished:
                    if name in clients:
                        raise SaccadeError(f"new-tokens={load.new_tokens} is too few: a client's answer ended")
                    del running[name]
                    done += 1
                    if opened is not None:
                        served.requests += 1
                        served.prompt_tokens += len(output.prompt_token_ids)
                        served.cached_tokens += output.num_cached_tokens
            answered += 0 if load.stream else done
            if opened is None and answered >= warm:
                opened = now
            served.seconds = 0.0 if opened is None else now - opened
            if load.stream:
                done = int(served.seconds * load.stream) - streamed
                streamed += done
            for _ in range(done):
                self._ask(next(prompts), 1 if load.stream else load.new_tokens, running)
        self.drop(running)
        return served

    def _ask(self, prompt: list[int], tokens: int, running: Running) -> None:
        name, request = str(next(self._asked)), request_for(prompt, tokens)
        running[name] = time.perf_counter(), 0
        self.llm.llm_engine.add_request(name, *request)
