"""Where and with what a comparison ran: enough to repeat it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from ..adapters.hf.support import shape_of
from ..kernels._native.library import description
from ..machine import processor
from ..versions import versions
from .context import Context


def environment(
    model: Any, *, name: str, document: str, contexts: Sequence[Context], threads: int, seed: int
) -> dict[str, Any]:
    """Versions, machine, model and texts of a comparison.

    Args:
        model: the loaded model; its dtype and device are read from its weights.
        name: what the user called it.
        document: what was read.
        contexts: the texts with their facts.
        threads: CPU threads of decoding.
        seed: where facts and their places come from.
    """
    weight = next(model.parameters())
    shape = shape_of(model.config)
    return {
        "timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions("numpy"),
        "machine": platform.platform(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "kernels": description() if weight.device.type == "cpu" else "torch",
        "threads": threads,
        "prefill_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(weight.device) if weight.is_cuda else str(weight.device),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "model": name,
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
