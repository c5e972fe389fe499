"""Token ids of the requests in the slots of an index, read where vLLM keeps them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....text.feed import UNKNOWN, TokenFeed
from .requests import RequestRow


class RequestFeed(TokenFeed):
    """What a worker's requests were fed; unknown where a prompt came as embeddings.

    `ids` gives those of all places of vLLM's batch, int32 `[places, positions]`, where model runner V2 keeps them; None
    under V1, whose rows have them as lists.

    Attributes:
        here: by slot of the index, the request in it and its place in the batch.
    """

    def __init__(self, levels: Sequence[int] | None, ids: Callable[[], Tensor | None]) -> None:
        super().__init__(levels)
        self._ids = ids
        self.here: dict[int, tuple[RequestRow, int]] = {}

    def read(self, row: int, start: int, stop: int) -> Tensor:
        (request, place), ids = self.here[row], self._ids()
        if ids is not None:
            return ids[place, start:stop]
        known = list[int]()
        if request.prompt is not None:
            first, last = (max(place - len(request.prompt), 0) for place in (start, stop))
            known = [*request.prompt[start:stop], *request.output[first:last]]
        known += [UNKNOWN] * (stop - start - len(known))
        return torch.tensor(known, dtype=torch.int32, device="cpu")
