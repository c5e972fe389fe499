"""The model of an experiment: looked at from the outside before any work, loaded once everything else is checked."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from ..adapters.hf.support import refuse_unsupported
from ..checkpoints.load import ModelSource, pick_device, pick_dtype, skeleton_of
from ..errors import SaccadeError
from ..recipes.machine import device_name, free_memory, kernels_on, processor, versions
from ..types import ModelShape

if TYPE_CHECKING:
    from .context import Context  # which needs the extra [eval]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model as the user has named it, and where and in which precision it will run.

    Attributes:
        shape: sizes, from the configuration alone.
        positions: the longest row that the model takes.
        parameters: how many numbers its weights are.
    """

    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any
    shape: ModelShape
    positions: int
    parameters: int

    @classmethod
    def check(cls, model: str | None, device: str, dtype: str) -> Subject:
        """Resolve what the command line gives, or raise a SaccadeError: no such model, device or dtype.

        Also an UnsupportedModelError, if the model cannot decode sparsely: no weights are read to know that.
        """
        source = ModelSource.locate(model)
        picked = pick_device(device)
        kind, (shape, positions) = pick_dtype(dtype, source, picked), source.shape()
        skeleton = skeleton_of(source.config(), source.name)
        refuse_unsupported(skeleton)
        return cls(source, picked, kind, source.tokenizer(), shape, positions, skeleton.num_parameters())

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def load(self) -> Any:
        """The model, on its device; or a ModelFolderError."""
        return self.source.weights(self.device, self.dtype)

    def refuse_too_large(self, tokens: int) -> None:
        """Raise a SaccadeError unless there is memory for a row of so many tokens; see `refuse_too_large`."""
        refuse_too_large(self.shape, self.parameters, self.device, self.dtype, tokens=tokens)

    def conditions(
        self, model: Any, *, document: str, contexts: Sequence[Context], threads: int, seed: int
    ) -> dict[str, Any]:
        """Enough to repeat an experiment with the loaded model and these texts; `threads` are those of decoding."""
        sizes = {name: getattr(self.shape, name) for name in ("layers", "query_heads", "kv_heads", "head_dim")}
        return {
            "timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": versions("numpy"),
            "machine": platform.platform(),
            "cpu": processor(),
            "cores": os.cpu_count(),
            "kernels": kernels_on(self.device),
            "threads": threads,
            "prefill_threads": torch.get_num_threads(),
            "device": device_name(self.device),
            "dtype": self.dtype_name,
            "model": self.source.name,
            "model_class": type(model).__name__,
            **sizes,
            "full_layers": [*self.shape.full_layers],
            "seed": seed,
            "document": document,
            "context_tokens": [len(context.tokens) for context in contexts],
            "questions": sum(len(context.questions) for context in contexts),
        }


def refuse_too_large(
    shape: ModelShape, parameters: int, device: torch.device, dtype: torch.dtype, *, tokens: int, rows: int = 1
) -> None:
    """Raise a SaccadeError with what would fit unless weights and the cache of so many tokens a row fit free memory.

    That is the least: activations, and what a policy keeps beside the cache, come on top.
    """
    free = free_memory(device)
    weights = parameters * dtype.itemsize
    token = rows * shape.token_bytes(dtype.itemsize)
    if free is None or weights + tokens * token <= free:
        return
    room = (free - weights) // token
    advice = f"at most {room} tokens fit" if room > 0 else "take a smaller model or dtype, or another device"
    need, own, cache, left = (size / 2**30 for size in (weights + tokens * token, weights, tokens * token, free))
    what = f"{tokens} tokens" + (f" in each of {rows} rows" if rows > 1 else "")
    raise SaccadeError(
        f"{what} need {need:.1f} GiB on {device} ({own:.1f} for weights in {str(dtype).removeprefix('torch.')}, "
        f"{cache:.1f} for the cache), and {left:.1f} GiB are free: {advice}"
    )
