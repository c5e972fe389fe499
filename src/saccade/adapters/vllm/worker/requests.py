"""What a worker knows of each request of the batch: vLLM tells its logits processors, and for that alone we are one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

from torch import Tensor

from ....errors import ServingError
from ..checks import refuse_detached
from ..options import KEY, OFF, ServeOptions, given_to, held_by, opted_out
from ..vllm_api import borrowed, problem

_ATTRIBUTE = "_saccade_requests"

# Every vLLM that finds this package loads this module, also one that it was not written for and that does not use it.
_INTERFACE = "vllm.v1.sample.logits_processor.interface"
BatchProcessor = borrowed(_INTERFACE, "LogitsProcessor", object)
SlotProcessor = borrowed("vllm.v1.worker.gpu.sample.logits_processor.interface", "LogitsProcessor", object)
MoveDirectionality = borrowed(_INTERFACE, "MoveDirectionality", None)
VLLMValidationError = borrowed("vllm.exceptions", "VLLMValidationError", ValueError)

SERVING = "_saccade_serving"  # what a worker's attention layers share, beside what vLLM registers of them
_OURS = 2
"""References to the output tokens of a request that vLLM has forgotten: the row's, and the question's own."""


@dataclass(slots=True, eq=False)
class RequestRow:
    """One request, from its first step to its last; under model runner V2 until it is sent anew.

    Attributes:
        sparse: whether it decodes under the policy; false if it opted out.
        prompt: token ids of the prompt; None if it came as embeddings.
        output: token ids generated so far; vLLM's own list, which grows.
        resumed: whether it had been in the batch before.
        certain: tokens that it came with, under model runner V2: none of them is a draft.
        memory: what the engine keeps for it between steps, such as its index.
    """

    sparse: bool = True
    prompt: Sequence[int] | None = None
    output: Sequence[int] = ()
    resumed: bool = False
    certain: int = 0
    memory: Any = None

    def decodes(self, queries: int, prefilling: bool) -> bool:
        """Whether a step with `queries` new tokens decodes one: alone, or in a dense pass over those before it.

        `prefilling` is what vLLM says of the row. Model runner V2 says it of a request that was sent anew, too.
        """
        return queries > 0 and (not prefilling or (queries > 1 and self.resumed and self.prompt is None))


class RequestRows(BatchProcessor, SlotProcessor):  # type: ignore[misc,valid-type]
    """The requests in vLLM's batch rows (model runner V1) or request slots (V2); leaves all logits alone.

    vLLM loads it by the entry point `vllm.logits_processors` and makes one per worker.
    """

    def __init__(self, vllm_config: Any, *rest: Any) -> None:
        self.rows: dict[int, RequestRow] = {}
        self.arrived: Callable[[RequestRow], None] | None = None
        """Called with every request that has not been in the batch before."""
        self.emptied: Callable[[], None] | None = None
        """Called when the last request has left the batch of model runner V1; V2 does not say when requests leave."""
        self._slots = rest[0] if rest else None
        self._away: dict[int, RequestRow] = {}
        self._follows, self._config, self._lossless = given_to(vllm_config), vllm_config, False
        if self._follows:
            refuse_detached(vllm_config)
            options = ServeOptions.of(vllm_config)
            self._lossless = options is not None and options.drafts > 0
            held_by(vllm_config)[_ATTRIBUTE] = self  # for the attention of the same worker

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise a VLLMValidationError, which the server answers with status 400, if our option is misspelt."""
        given = (getattr(sampling_params, "extra_args", None) or {}).get(KEY)
        if given not in (None, OFF, "on"):
            valid = '"off" decodes densely, "on" as the server'
            raise VLLMValidationError(f"vllm_xargs: {KEY}={given!r} is not valid; {valid}")

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        return logits

    def update_state(self, batch_update: Any) -> None:
        """Follow the batch of model runner V1."""
        if batch_update is None or not self._follows:
            return
        for index in (*batch_update.removed, *(index for index, *_ in batch_update.added)):
            self._leave(index)
        for index, params, prompt, output in batch_update.added:
            # A row that a step has no room for leaves the batch, and comes back with the same list of output tokens.
            row = self._away.pop(id(output), None)
            resumed = row is not None or len(output) > 0
            if row is None or row.prompt is not prompt:
                # Also the next input of a streaming session: its prompt is another one, and nothing known of it holds.
                row = RequestRow(not opted_out(params), prompt, output)
            row.resumed = resumed
            self._enter(index, row)
        for source, target, direction in batch_update.moved:
            moved, replaced = self.rows.pop(source, None), self.rows.pop(target, None)
            if moved is not None:
                self.rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self.rows[source] = replaced
        if not self.rows and self.emptied is not None:
            self.emptied()

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Follow the slots of model runner V2, which are filled anew by every request."""
        if self._follows:
            state = self._slots
            certain = 0 if state is None else int(state.prefill_len.np[req_idx])
            resumed = state is not None and certain > int(state.prompt_len.np[req_idx])
            # Where every answer is dense, there is nothing to opt out of.
            sparse = self._lossless or not opted_out(sampling_params)
            self._enter(req_idx, RequestRow(sparse, resumed=resumed, certain=certain))
        return False

    def of(self, slots: Sequence[int]) -> list[RequestRow]:
        """The requests in some rows or slots; a row that nobody announced (a warm-up) counts as sparse."""
        return [self.rows.get(slot) or RequestRow() for slot in slots]

    @property
    def ids_on_device(self) -> Tensor | None:
        """Token ids of all slots int32 `[slots, positions]`, where model runner V2 keeps them; None: the host does."""
        held = getattr(self._slots, "all_token_ids", None)
        return None if held is None else held.gpu

    def _enter(self, index: int, row: RequestRow) -> None:
        if SERVING not in held_by(self._config):
            raise ServingError("vLLM has made no attention layer of saccade's: every answer would be dense")
        before = self.rows.get(index)
        if before is not None and before is not row and before.memory is not None:
            before.memory.leave()
        self.rows[index] = row
        if not row.resumed and self.arrived is not None:
            self.arrived(row)

    def _leave(self, index: int) -> None:
        row = self.rows.pop(index, None)
        if row is not None and row.memory is not None:
            row.memory.leave()
        if row is not None:
            self._away[id(row.output)] = row
        for identity, waiting in list(self._away.items()):
            if getrefcount(waiting.output) <= _OURS:
                del self._away[identity]


if problem("every process") is not None:
    # It does nothing in a vLLM that it was not written for, whatever that asks of a logits processor.
    RequestRows.__abstractmethods__ = frozenset()


def requests_of(vllm_config: Any) -> RequestRows | None:
    """The rows of this worker; None before vLLM has made them."""
    rows: RequestRows | None = held_by(vllm_config).get(_ATTRIBUTE)
    return rows
