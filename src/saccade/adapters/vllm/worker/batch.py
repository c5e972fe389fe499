"""One step's rows as the host knows them, and which of them decode under the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from ....types import Rows
from .requests import RequestRow, RequestRows


@dataclass(frozen=True)
class Batch:
    """A step's rows.

    Attributes:
        lengths: tokens of each row, those of this step included.
        queries: how many of them are new.
        prefilling: whether some of the prompt was still missing before this step.
        places: where the row is among the worker's requests.
        requests: what is known of each.
        announced: whether the batch is of requests; else it is a warm-up, or metadata for a capture.
    """

    lengths: list[int]
    queries: list[int]
    prefilling: list[bool]
    places: list[int]
    requests: Sequence[RequestRow]
    announced: bool

    @cached_property
    def decoding(self) -> list[bool]:
        """Which rows decode under the policy, whatever their length: one token behind the prompt, not opted out."""
        rows = zip(self.queries, self.prefilling, self.requests, strict=True)
        return [queries == 1 and not prefilling and request.sparse for queries, prefilling, request in rows]

    @classmethod
    def of(cls, common: Any, known: RequestRows | None) -> Batch:
        """From vLLM's `CommonAttentionMetadata`, of all of which asked for here it keeps a copy on the host."""
        count, lengths = common.num_reqs, common.seq_lens_cpu_upper_bound
        queries = [stop - start for start, stop in pairwise(common.query_start_loc_cpu.tolist())][:count]
        # vLLM's bound counts drafts that may yet be rejected; kernels on the host take a row at its word.
        lengths = (common.seq_lens if lengths is None or common.seq_lens.is_cpu else lengths)[:count].tolist()
        places = list(range(count)) if common.req_idx is None else common.req_idx.tolist()
        prefilling = common.is_prefilling[:count].tolist()
        # Rows that pad a captured batch are nobody's; model runner V2 says nothing of them.
        lengths, prefilling, places = (
            [*told, *[absent] * (count - len(told))]
            for told, absent in ((lengths, 0), (prefilling, False), (places, -1))
        )
        requests = [RequestRow() for _ in places] if known is None else known.of(places)
        # Model runner V2 places dummy rows in slots that requests have had, but a row that decodes has a prompt.
        announced = (
            known is not None
            and (known.ids_on_device is None or common.req_idx is not None)
            and all(
                place in known.rows and (prefilled or length != new)
                for place, new, prefilled, length in zip(places, queries, prefilling, lengths, strict=True)
                if new
            )
        )
        return cls(lengths, queries, prefilling, places, requests, announced)

    def rows(self, chosen: list[int], table: Tensor, lengths: Tensor, *, longest: int | None = None) -> Rows:
        """Some rows, whose blocks and lengths are given.

        `longest`: a bound on any row's length, where kernels are compiled for it; None: what the host knows of each.
        """
        if longest is not None:
            # None is whole, which is said as decoding steps say it: they are the same kernels then.
            whole = torch.zeros_like(lengths, dtype=torch.bool)
            return Rows(table, torch.zeros_like(lengths), lengths, longest, whole=whole)
        known = [self.lengths[row] for row in chosen]
        return Rows(table, torch.zeros_like(lengths), lengths, max(known), tuple((0, length) for length in known))

    def picked(self, chosen: list[int], table: Tensor, lengths: Tensor) -> Rows:
        """Some rows of a step, whose blocks and lengths of all rows are given; the host knows their lengths."""
        return self.rows(chosen, *selected(chosen, table, lengths))


def selected(rows: list[int], *tensors: Tensor) -> list[Tensor]:
    """Some rows of tensors that share a device; of the first ones, in order, nothing is copied."""
    if rows == [*range(len(rows))]:
        return [tensor[: len(rows)] for tensor in tensors]
    where = async_tensor_h2d(rows, tensors[0].device, torch.int64)
    return [tensor.index_select(0, where) for tensor in tensors]
