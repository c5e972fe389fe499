"""Where and with what a comparison ran: enough to repeat it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from ..machine import device_name, kernels_on, processor, versions
from .context import Context
from .subject import Subject


def conditions(
    model: Any, subject: Subject, *, document: str, contexts: Sequence[Context], threads: int, seed: int
) -> dict[str, Any]:
    """Versions, machine, the loaded model and the texts of a comparison; `threads` are those of decoding."""
    shape = subject.shape
    return {
        "timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions("numpy"),
        "machine": platform.platform(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "kernels": kernels_on(subject.device),
        "threads": threads,
        "prefill_threads": torch.get_num_threads(),
        "device": device_name(subject.device),
        "dtype": subject.dtype_name,
        "model": subject.source.name,
        "model_class": type(model).__name__,
        "layers": shape.layers,
        "query_heads": shape.query_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "seed": seed,
        "document": document,
        "context_tokens": [len(context.tokens) for context in contexts],
        "questions": sum(len(context.questions) for context in contexts),
    }
