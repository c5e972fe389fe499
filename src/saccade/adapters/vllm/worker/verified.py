"""Requests of a lossless engine in the slots of an index, which drafts enter once they are verified for sure."""

from dataclasses import dataclass
from typing import Any

from ....plans.rectify import Clean
from ..options import CYCLES
from .batch import Batch
from .slots import RequestSlots, SlotMemory


@dataclass(slots=True, eq=False)
class VerifiedMemory(SlotMemory):
    """What is kept for a request whose drafts may be rejected, as the host learns a step later.

    Attributes:
        verified: tokens that stand whatever is rejected, and are in the cache behind the latest step of the target.
        doubtful: those of that step that may be rejected.
    """

    verified: int = 0
    doubtful: int = 0

    def verifies(self, start: int, count: int, certain: int) -> int:
        """Note a step of the target with `count` tokens behind at most `start`; how many stand that it finds.

        When vLLM schedules it ahead, it counts all of the step before as standing, and of those before that what does.
        """
        found = max(self.verified, start - self.doubtful)
        # The first is what the step before has sampled.
        stand = max(min(count, certain - start), 1)
        self.verified, self.doubtful = found + stand, count - stand
        return found


class VerifiedSlots(RequestSlots):
    """The index of all requests of a worker, which two builders share: the target's feeds it, and that of drafts finds
    what the target's latest step has left, as the end of a prompt.

    What is in a slot follows from the tokens that stand for sure and their number alone.
    """

    def _noted(self, batch: Batch, row: int, drafts: bool) -> tuple[int, int]:
        request, count = batch.requests[row], batch.queries[row]
        start = batch.lengths[row] - count
        if request.memory is None:
            request.memory = VerifiedMemory(self, Clean(self._phase), verified=start)
        memory: Any = request.memory
        found = memory.verified if drafts else memory.verifies(start, count, request.certain)
        return found + CYCLES * (self._phase.every or 0), found
