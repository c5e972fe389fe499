"""Load a model folder or hub id: no remote code, nothing unpickled, errors of one line before work."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..errors import ModelFolderError, UnsupportedModelError
from ..types import ModelShape
from .bundled import model_path
from .hub import HUB_ID, SHARDS, WEIGHTS
from .shape import shape_of, stored_hash

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model lies, and what the user would call it; its parts are read one by one, the cheap ones first.

    `location` is a folder or hub id; `bundled`: it is the model that comes with this package.
    """

    name: str
    location: str
    bundled: bool = False

    @classmethod
    def locate(cls, model: str | Path | None, *, weights: bool = True) -> ModelSource:
        """Find the model and check its files as far as that is cheap; `weights`: those of its weights too.

        Raises:
            ModelFolderError: a folder that is missing, incomplete or truncated, or a name that cannot be a hub id.
        """
        if model is None:
            source = cls("bundled", str(model_path()), bundled=True)
        else:
            source = cls(str(model), str(Path(model).expanduser()))
        folder = Path(source.location)
        if folder.is_dir():
            _check_folder(folder, weights=weights)
        elif folder.exists():
            raise ModelFolderError(f"model {source.name!r} is a file; give the folder that holds config.json")
        elif model is None or isinstance(model, Path) or not HUB_ID.fullmatch(source.name):
            raise ModelFolderError(f"model folder {source.name!r} does not exist; a hub id is written OWNER/NAME")
        return source

    def config(self) -> Any:
        """The model's configuration.

        Raises:
            ModelFolderError: if transformers cannot read it.
        """
        return self._read("configuration", AutoConfig)

    def shape(self) -> tuple[ModelShape, int]:
        """The decoder's sizes, the hash of its weights where their files are here, and the number of its positions.

        Raises:
            UnsupportedModelError: for a configuration that is not that of a plain decoder.
        """
        config = self.config()
        try:
            shape, positions = shape_of(config), int(config.max_position_embeddings)
        except AttributeError as error:
            missing = f"its {config.model_type} configuration has no {error.name}"
            raise UnsupportedModelError(f"model {self.name!r} is no plain decoder: {missing}") from error
        return replace(shape, weights=stored_hash(self.location)), positions

    def decoder(self) -> ModelShape:
        """What `shape` says of the decoder alone."""
        return self.shape()[0]

    def tokenizer(self) -> Any:
        """The model's tokenizer.

        Raises:
            ModelFolderError: if it is absent, empty, without an end-of-sequence token or larger than the model.
        """
        tokenizer = self._read("tokenizer", AutoTokenizer)
        # transformers makes up an empty tokenizer from the model type when its files are absent.
        if not tokenizer("saccade", add_special_tokens=False)["input_ids"]:
            raise ModelFolderError(f"model {self.name!r} has no tokenizer; add one: tokenizer.save_pretrained(folder)")
        whose = f"the tokenizer of model {self.name!r} has"
        if not tokenizer.is_fast:
            raise ModelFolderError(f"{whose} no tokenizer.json, which locates tokens in text")
        if tokenizer.eos_token_id is None:
            raise ModelFolderError(f"{whose} no end-of-sequence token (eos_token)")
        embeddings = getattr(self.config(), "vocab_size", None)
        largest = max(tokenizer.get_vocab().values())
        if embeddings is not None and largest >= embeddings:
            what = f"token ids up to {largest}, the model only {embeddings} embeddings; they do not belong together"
            raise ModelFolderError(f"{whose} {what}")
        return tokenizer

    def weights(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The model itself, in eval mode.

        Raises:
            ModelFolderError: if weights are missing, of other shapes than the configuration says, or unreadable.
        """
        # Of attention nothing is said: transformers takes sdpa where a model's code knows it.
        options = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
        model, report = self._read("weights", AutoModelForCausalLM, **options)
        missing = sorted(report["missing_keys"])
        # transformers would fill them with random numbers and only warn.
        if missing:
            raise ModelFolderError(
                f"the weights of model {self.name!r} lack {len(missing)} tensors that its configuration asks for, "
                f"such as {missing[0]}"
            )
        return model.to(device).eval()

    def _read(self, part: str, reader: Any, **options: Any) -> Any:
        try:
            return reader.from_pretrained(self.location, trust_remote_code=False, **options)
        # A broken folder can raise anything in transformers, tokenizers and the hub client.
        except Exception as error:
            said = f"its {part} cannot be loaded: {one_line(error)}"
            if not Path(self.location).is_dir():
                said = f"no folder here, and as a hub id {said} Check the name and the network, or give a folder"
            raise ModelFolderError(f"model {self.name!r}: {said}") from error


def skeleton_of(config: Any, name: str | None) -> Any:
    """The causal language model of a configuration, in eval mode and without weights: all on torch's meta device.

    Raises:
        UnsupportedModelError: if transformers makes none of it.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config).eval()
    # A configuration that is not a plain decoder's can raise anything in transformers.
    except Exception as error:
        raise UnsupportedModelError(f"model {name!r} is no plain decoder: {one_line(error)}") from error


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is an accelerator if there is one.

    Raises:
        ModelFolderError: if it does not exist here; the message lists those that do.
    """
    valid = ["cpu"]
    if torch.cuda.is_available():
        valid += ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        valid.append("mps")
    if name == "auto":
        return torch.device(valid[1] if len(valid) > 1 else "cpu")
    if name not in valid:
        raise ModelFolderError(f"unknown device {name!r}; valid here: auto, {', '.join(valid)} (see saccade doctor)")
    return torch.device(name)


def pick_dtype(name: str, source: ModelSource, device: torch.device) -> torch.dtype:
    """The dtype of that name; "auto" is what the checkpoint holds, but float32 for the bundled model on a CPU.

    That model's figures are measured in float32, so that rounding decides none of them.

    Raises:
        ModelFolderError: for an unknown name; the message lists the valid ones.
    """
    if name == "auto":
        if source.bundled and device.type == "cpu":
            return torch.float32
        stored = getattr(source.config(), "dtype", None)
        return stored if isinstance(stored, torch.dtype) else torch.float32
    if name not in DTYPES:
        raise ModelFolderError(f"unknown dtype {name!r}; valid: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def one_line(error: Exception) -> str:
    """The first line of an error's message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _check_folder(folder: Path, *, weights: bool) -> None:
    """Raise unless a folder has a configuration and, if they are wanted, whole safetensors files."""
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"model folder {str(folder)!r} has no config.json, which save_pretrained writes")
    _read_json(folder / "config.json")
    for file in _weight_files(folder) if weights else ():
        _check_weights(file)


def _check_weights(file: Path) -> None:
    """Check the header's length, and every tensor's dtype, shape and offsets against the file's size."""
    try:
        with safe_open(str(file), framework="pt") as weights:
            weights.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelFolderError(f"{str(file)!r} is truncated or not safetensors: {one_line(error)}") from error


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / SHARDS).is_file():
        raise ModelFolderError(
            f"model folder {str(folder)!r} has no {WEIGHTS}; other weight formats are not read, as they can run code"
        )
    index = _read_json(folder / SHARDS)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise ModelFolderError(f"{str(folder / SHARDS)!r} has no weight_map")
    return [folder / str(name) for name in sorted(set(shards.values()))]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{str(path)!r} cannot be read: {one_line(error)}") from error
