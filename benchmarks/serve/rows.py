"""What one engine did under a load, and what that means beside the other engines under the same load."""

import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from saccade.bench.variants import STOCK, STOCK_AGAIN

from .load import Served

LOAD_DRIFT = 0.05
"""Most that stock may differ from itself before a point is void: a fifth of the smallest gain worth having."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow(ABC):
    """One engine at one point.

    Attributes:
        policy: spec, or `stock`.
        over_stock: `pace` over the mean of stock's; so are others of `paces`.
        drift: of stock's pace between the first engine and the last, as a share; None: it ran once.
        void: the drift is more than `LOAD_DRIFT`, and nothing can be compared.
    """

    policy: str
    over_stock: float | None = None
    drift: float | None = None
    void: bool = False

    @property
    @abstractmethod
    def point(self) -> int:
        """What tells rows of one engine apart."""

    @property
    @abstractmethod
    def pace(self) -> float:
        """What engines are compared by, and what drifts."""

    @property
    def paces(self) -> Mapping[str, float]:
        """All that is compared, by the field that says what it is over stock's."""
        return {"over_stock": self.pace}


AnyRow = TypeVar("AnyRow", bound=EngineRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow(EngineRow):
    """One engine under a load that does not let up; times in milliseconds.

    Attributes:
        clients: each with one request at a time.
        requests, seconds: answered in the time that counts, and that time.
        requests_per_second, tokens_per_second: answered, and generated.
        prompt_tokens, cached_share: mean of these requests' prompts, and what the prefix cache held of all of them.
        first_ms, first_ms_p99: from asking to the first token, median and 99th percentile of `firsts` requests.
        next_ms, next_ms_p99: between two steps that brought a request tokens, of `gaps` of them.
        row_tokens_per_second: of a request behind its first token, also while others' prompts are read.
        stream: prompts a second that came beside clients whose answers went on.
    """

    clients: int
    requests: int
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    prompt_tokens: float
    cached_share: float
    first_ms: float
    first_ms_p99: float
    firsts: int
    next_ms: float
    next_ms_p99: float
    gaps: int
    row_tokens_per_second: float | None = None
    stream: float | None = None

    @property
    def point(self) -> int:
        return self.clients

    @property
    def pace(self) -> float:
        """Requests per second, or of clients beside a stream, whose rate is given, tokens per second of a row."""
        return self.row_tokens_per_second or 0.0 if self.stream else self.requests_per_second


def row_of_load(policy: str, clients: int, served: Served, stream: float | None = None) -> LoadRow:
    """Rates and percentiles of what was seen."""
    (first, first_p99), (later, later_p99) = percentiles(served.firsts), percentiles(served.gaps)
    decoded = (served.tokens - len(served.firsts)) / sum(served.gaps) if served.gaps else None
    return LoadRow(
        policy=policy, clients=clients, requests=served.requests, seconds=served.seconds,
        requests_per_second=served.requests / served.seconds, tokens_per_second=served.tokens / served.seconds,
        prompt_tokens=served.prompt_tokens / served.requests, cached_share=served.cached_tokens / served.prompt_tokens,
        first_ms=first, first_ms_p99=first_p99, firsts=len(served.firsts),
        next_ms=later, next_ms_p99=later_p99, gaps=len(served.gaps),
        row_tokens_per_second=decoded, stream=stream,
    )  # fmt: skip


def percentiles(seconds: Sequence[float], high: int = 99) -> tuple[float, float]:
    """Median and a high percentile in milliseconds; of one time twice that, of none zeros."""
    if len(seconds) < 2:
        return (1e3 * sum(seconds),) * 2
    return 1e3 * statistics.median(seconds), 1e3 * statistics.quantiles(seconds, n=100, method="inclusive")[high - 1]


def beside_stock(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Rows by point, with what compares them; stock's paces are the means of its rows."""
    completed = []
    for point in dict.fromkeys(row.point for row in rows):
        held = [row for row in rows if row.point == point]
        stock = [row for row in held if row.policy in (STOCK, STOCK_AGAIN)]
        drift = stock[-1].pace / stock[0].pace - 1 if len(stock) > 1 else None
        void = drift is not None and abs(drift) > LOAD_DRIFT
        means = {name: statistics.fmean(one.paces[name] for one in stock) for name in held[0].paces if stock}
        for row in held:
            over: dict[str, Any] = {name: row.paces[name] / mean if mean else None for name, mean in means.items()}
            completed.append(replace(row, drift=drift, void=void, **over))
    return completed
