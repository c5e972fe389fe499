"""Token ids of the requests in the slots of an index, read where vLLM keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from ....text.feed import ABSENT, UNKNOWN, TokenFeed
from .requests import RequestRow

_GROWTH = 256


class RequestFeed(TokenFeed):
    """What a worker's requests were fed, each told with its place in vLLM's batch.

    `ids` gives those of all places where model runner V2 keeps them, None under V1; asked when the first is here.
    """

    def __init__(
        self, levels: Sequence[int] | None, ids: Callable[[], Tensor | None], device: torch.device | None = None
    ) -> None:
        super().__init__(levels)
        self._ask, self._device = ids, device
        self._kept: HostIds | DeviceIds | None = None

    def hold(self, row: int, source: tuple[RequestRow, int], stop: int) -> None:
        if self._kept is None:
            ids = self._ask()
            self._kept = HostIds(self._device) if ids is None else DeviceIds(ids)
        self._kept.hold(row, *source, stop)

    def read(self, rows: Tensor, slots: Tensor) -> Tensor:
        assert self._kept is not None, "only what is held is read"
        return self._kept.read(rows, slots)


class HostIds:
    """Copied from the host's lists, as model runner V1 keeps them."""

    def __init__(self, device: torch.device | None) -> None:
        self._ids = torch.empty((0, 0), dtype=torch.int32, device=device)
        self._held: dict[int, tuple[RequestRow, int]] = {}

    def hold(self, slot: int, request: RequestRow, place: int, stop: int) -> None:
        held, known = self._held.get(slot, (None, 0))
        first = known if held is request else 0
        if stop <= first:
            return
        rows, width = max(slot + 1, self._ids.shape[0]), max(stop, self._ids.shape[1])
        if (rows, width) != self._ids.shape:
            width += max(width // 8, _GROWTH) if width > self._ids.shape[1] else 0
            wider = self._ids.new_full((rows, width), ABSENT)
            wider[: self._ids.shape[0], : self._ids.shape[1]] = self._ids
            self._ids = wider
        self._ids[slot, first:stop] = async_tensor_h2d(_tokens(request, first, stop), self._ids.device, torch.int32)
        self._held[slot] = request, stop

    def read(self, slots: Tensor, positions: Tensor) -> Tensor:
        return self._ids[slots[:, None], positions.clamp(max=self._ids.shape[1] - 1)].long()


class DeviceIds:
    """Read where model runner V2 keeps them, int32 `[requests, positions]`; the host never sees them."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids
        self._places = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
        self._known = [-1] * ids.shape[0]

    def hold(self, slot: int, request: RequestRow, place: int, stop: int) -> None:
        if self._known[slot] != place:
            self._known[slot] = place
            self._places[slot].fill_(place)

    def read(self, slots: Tensor, positions: Tensor) -> Tensor:
        return self._ids[self._places[slots][:, None], positions.clamp(max=self._ids.shape[1] - 1)].long()


def _tokens(request: RequestRow, start: int, stop: int) -> list[int]:
    """Token ids `start..stop` of a request; -1 (unknown) where the prompt came as embeddings."""
    if request.prompt is None:
        return [UNKNOWN] * (stop - start)
    first, last = (max(place - len(request.prompt), 0) for place in (start, stop))
    known = [*request.prompt[start:stop], *request.output[first:last]]
    return known + [UNKNOWN] * (stop - start - len(known))
