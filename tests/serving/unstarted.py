"""Servers that are checked and not started, and models without weights, which nothing that is refused needs."""

from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from saccade.adapters.vllm.server.serve import RefusedError, Server, prepare
from saccade.checkpoints.bundled import model_path

SMALL: dict[str, Any] = {
    **{"vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}


def model(folder: Path, config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model_path() / name).read_bytes())
    return folder


def made(*rest: str, **ours: Any) -> Server:
    """A server that was checked, at whatever port is free."""
    return prepare(["--port", "0", *rest], **ours)


def reasons(*rest: str, **ours: Any) -> tuple[str, ...]:
    with pytest.raises(RefusedError) as refused:
        made(*rest, **ours)
    assert all("\n" not in reason for reason in refused.value.reasons)
    return refused.value.reasons
