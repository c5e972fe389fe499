"""Model shapes to time with random weights, so that no download is needed; and model folders, whose shape is read."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..errors import ModelFolderError
from .load import ModelSource
from .preset_sizes import PRESETS, SHAPES


def random_model(shape: str, *, positions: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of a shape that `read_config` knows, with random weights and at least so many positions, in eval mode.

    Raises:
        ModelFolderError: as `read_config`.
    """
    config = read_config(shape)
    config.max_position_embeddings = max(positions, config.max_position_embeddings)
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    return model


def is_preset(shape: str) -> bool:
    """Whether a name is that of a preset, or of its first layers."""
    return shape.partition(":")[0] in SHAPES


def read_config(shape: str) -> PretrainedConfig:
    """The configuration of a preset, of its first layers, or of a folder with a `config.json`.

    Args:
        shape: `NAME`, `NAME:LAYERS`, `NAME:LAYERS:EXPERTS` to have so many experts in a layer, or a folder.

    Raises:
        ModelFolderError: if `shape` is none of these, naming the presets, or if the folder's configuration cannot be
            read.
    """
    if is_preset(shape):
        return _slice(shape)
    if not (Path(shape) / "config.json").is_file():
        raise ModelFolderError(f"shape {shape!r} is neither a preset ({PRESETS}) nor a folder with a config.json")
    config: PretrainedConfig = ModelSource(shape, shape).config()
    return config


def _slice(shape: str) -> PretrainedConfig:
    """A preset with the layers and experts that its name asks for."""
    name, *asked = shape.split(":")
    sizes = SHAPES[name]
    experts = [key for key in ("num_experts", "num_local_experts") if key in sizes]
    least = dict.fromkeys(["num_hidden_layers", *experts], 1)
    least.update((key, sizes["num_experts_per_tok"]) for key in experts)
    pairs = list(zip(asked, least, strict=False))
    if len(pairs) < len(asked) or not all(
        text.isdecimal() and least[key] <= int(text) <= sizes[key] for text, key in pairs
    ):
        form = f"{name}:LAYERS:EXPERTS" if experts else f"{name}:LAYERS"
        valid = " and ".join(f"{low} to {sizes[key]} {key.rpartition('_')[2]}" for key, low in least.items())
        raise ModelFolderError(f"shape {shape!r} is not valid: {form}, {valid}")
    config: PretrainedConfig = AutoConfig.for_model(**{**sizes, **{key: int(text) for text, key in pairs}})
    return config
