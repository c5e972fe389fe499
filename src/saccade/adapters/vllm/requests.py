"""What a worker knows of each request of the batch: vLLM tells its logits processors, and for that alone we are one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as BatchProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as SlotProcessor

from .options import KEY, ServeOptions

OFF = "off"


def opted_out(params: Any) -> bool:
    """Whether a request asked to decode densely: `"vllm_xargs": {"saccade": "off"}`."""
    return (getattr(params, "extra_args", None) or {}).get(KEY) == OFF


@dataclass(slots=True, eq=False)
class RequestRow:
    """One request in the batch; a request that comes back after a preemption is another one.

    Attributes:
        sparse: whether it decodes under the policy; false if it opted out.
        prompt: token ids of the prompt; None if it came as embeddings.
        output: token ids generated so far; vLLM's own list, which grows.
        resumed: whether it had generated tokens when it came.
        memory: what the engine keeps for it between steps, such as its index.
    """

    sparse: bool = True
    prompt: Sequence[int] | None = None
    output: Sequence[int] = ()
    resumed: bool = False
    memory: Any = None


class RequestRows(BatchProcessor, SlotProcessor):  # type: ignore[misc]
    """The requests in vLLM's batch rows (model runner V1) or request slots (V2); leaves all logits alone.

    vLLM loads it by the entry point `vllm.logits_processors` and makes one per worker.
    """

    def __init__(self, vllm_config: Any, *rest: Any) -> None:
        self.rows: dict[int, RequestRow] = {}
        self.arrived: list[RequestRow] = []
        if ServeOptions.of(vllm_config) is not None:
            publish(vllm_config, self)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request whose option is misspelt, before any work.

        Raises:
            VLLMValidationError: which the server answers with status 400.
        """
        given = (getattr(sampling_params, "extra_args", None) or {}).get(KEY)
        if given not in (None, OFF, "on"):
            raise VLLMValidationError(
                f'vllm_xargs: {KEY}={given!r} is not valid; "off" decodes densely, "on" as the server'
            )

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch of model runner V1."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._enter(index, RequestRow(not opted_out(params), prompt, output, resumed=len(output) > 0))
        for source, target, direction in batch_update.moved:
            moved, replaced = self.rows.pop(source, None), self.rows.pop(target, None)
            if moved is not None:
                self.rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self.rows[source] = replaced

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Follow the slots of model runner V2, which are filled anew by every request."""
        self._enter(req_idx, RequestRow(not opted_out(sampling_params)))
        return False

    def of(self, slots: Sequence[int]) -> list[RequestRow]:
        """The requests in some rows or slots; a row that nobody announced (a warm-up) counts as sparse."""
        return [self.rows.get(slot) or RequestRow() for slot in slots]

    def arrivals(self) -> Iterator[RequestRow]:
        """Requests that came since the last call."""
        came, self.arrived = self.arrived, []
        return iter(came)

    def _enter(self, index: int, row: RequestRow) -> None:
        self.rows[index] = row
        self.arrived.append(row)


_ATTRIBUTE = "_saccade_requests"


def publish(vllm_config: Any, rows: RequestRows) -> None:
    """Let the attention of the same worker find the rows: the configuration is all that both are given."""
    vars(vllm_config)[_ATTRIBUTE] = rows


def requests_of(vllm_config: Any) -> RequestRows | None:
    """The rows of this worker; None before vLLM has made them."""
    rows: RequestRows | None = vars(vllm_config).get(_ATTRIBUTE)
    return rows
