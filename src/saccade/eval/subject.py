"""The model of an experiment: looked at from the outside before any work, loaded once everything else is checked."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch

from ..adapters.hf.support import refuse_unsupported
from ..checkpoints.load import ModelSource, pick_device, pick_dtype
from ..machine import device_name, kernels_on, processor, versions
from ..types import ModelShape
from .context import Context


@dataclass(frozen=True, slots=True)
class Subject:
    """A model as the user has named it, and where and in which precision it will run.

    Attributes:
        shape: sizes, from the configuration alone.
        positions: the longest row that the model takes.
    """

    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any
    shape: ModelShape
    positions: int

    @classmethod
    def check(cls, model: str | None, device: str, dtype: str) -> Subject:
        """Resolve what the command line gives, or raise a SaccadeError: no such model, device or dtype."""
        source = ModelSource.locate(model)
        picked = pick_device(device)
        return cls(source, picked, pick_dtype(dtype, source, picked), source.tokenizer(), *source.shape())

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def load(self) -> Any:
        """The model, on its device; or a ModelFolderError or an UnsupportedModelError, if it cannot decode sparsely."""
        model = self.source.weights(self.device, self.dtype)
        refuse_unsupported(model)
        return model

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
            "seed": seed,
            "document": document,
            "context_tokens": [len(context.tokens) for context in contexts],
            "questions": sum(len(context.questions) for context in contexts),
        }
