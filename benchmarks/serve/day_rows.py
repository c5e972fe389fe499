"""How one engine got through an agent's day, and what that means beside the other engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .day import Day, Replayed
from .rows import EngineRow, percentiles


@dataclass(frozen=True, slots=True, kw_only=True)
class DayRow(EngineRow):
    """One engine's day; times in milliseconds, but for the day's and what is said to be seconds.

    Attributes:
        conversations: at once.
        seconds: of the whole day.
        answers, tokens: answers, and their tokens.
        tokens_per_second: while at least one row decodes, in `decode_seconds`: tokens behind the first of an answer.
        alone_tokens_per_second: of it while no prompt waits for its first token, in `alone_seconds`.
        first_ms, first_ms_p90: from asking to the first token, median and 90th percentile.
        next_ms, next_ms_p99: between two steps that brought a request tokens, of `gaps` of them.
        prompt_tokens, cached_tokens: of a prompt by turn, and what the prefix cache held of it, means.
        cached_share: of all prompts together.
        right: as `Replayed.right`.
        alone_over_stock, day_over_stock: as `over_stock`, of the pace alone and of days per second.
    """

    conversations: int
    seconds: float
    answers: int
    tokens: int
    tokens_per_second: float
    decode_seconds: float
    alone_tokens_per_second: float
    alone_seconds: float
    first_ms: float
    first_ms_p90: float
    next_ms: float
    next_ms_p99: float
    gaps: int
    prompt_tokens: Sequence[float]
    cached_tokens: Sequence[float]
    cached_share: float
    right: Sequence[Sequence[bool]] = ()
    alone_over_stock: float | None = None
    day_over_stock: float | None = None

    @property
    def point(self) -> int:
        return self.conversations

    @property
    def pace(self) -> float:
        return self.tokens_per_second

    @property
    def paces(self) -> Mapping[str, float]:
        alone, days = self.alone_tokens_per_second, 1 / self.seconds
        return {"over_stock": self.pace, "alone_over_stock": alone, "day_over_stock": days}


def row_of_day(policy: str, day: Day, seen: Replayed) -> DayRow:
    """Rates and percentiles of what was seen."""
    (first, first_p90), (later, later_p99) = percentiles(seen.firsts, 90), percentiles(seen.gaps)
    return DayRow(
        policy=policy, conversations=day.conversations, seconds=seen.seconds, answers=len(seen.firsts),
        tokens=seen.tokens, tokens_per_second=seen.decode_tokens / seen.decode_seconds,
        decode_seconds=seen.decode_seconds, alone_seconds=seen.alone_seconds,
        alone_tokens_per_second=seen.alone_tokens / seen.alone_seconds if seen.alone_seconds else 0.0,
        first_ms=first, first_ms_p90=first_p90, next_ms=later, next_ms_p99=later_p99, gaps=len(seen.gaps),
        prompt_tokens=[tokens / day.conversations for tokens in seen.prompts],
        cached_tokens=[tokens / day.conversations for tokens in seen.cached],
        cached_share=sum(seen.cached) / sum(seen.prompts), right=seen.right,
    )  # fmt: skip
