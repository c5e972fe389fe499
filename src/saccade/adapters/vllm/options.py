"""What an engine and a request are told, and the model's shape as vLLM knows it; validated once per process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from ...checkpoints.shape import stored_hash, widths, window_of
from ...checkpoints.unsupported import mixed_kinds, reasons_in_sizes, sizes_in
from ...errors import ModelFolderError, ServingError, UnsupportedModelError, meant
from ...methods.policy import Policy
from ...plans.rectify import Rectify
from ...recipes.kept import already_found, lacks_layer
from ...recipes.resolve import Shape, resolve
from ...types import ModelShape

KEY = "saccade"
"""Under which the options travel in vLLM's `additional_config`."""

_DRAFTS = "saccade_drafts"

CAPTURED = 512
"""Tokens of the largest step that vLLM captures by itself."""

CYCLES = 3
"""Of so many cycles drafts lie behind what stands for sure: of the one at hand, and of two that may be rejected."""

OFF = "off"
"""What a request gives under the same key to decode densely."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How an engine decodes.

    Attributes:
        policy: what every request decodes with unless it opts out.
        recall: share 0..1 of decoding steps in which attention recall is measured; costs a pass over the keys.
        rectify_together: when it is one request's turn, all that decode run their unclean tokens again, so that few
            steps are mixed; a request's tokens then depend on who decodes beside it.
        notes: what the user should know of where the policy comes from; said once, not passed on.
        found: whether it lacked its layer, which a recipe has.
    """

    policy: Policy
    recall: float = 0.0
    rectify_together: bool = False
    notes: tuple[str, ...] = ()
    found: bool = False

    @property
    def rewrites(self) -> Rectify | None:
        """Rectification by dense passes that overwrite what sparse steps wrote; None: there is none."""
        return None if self.drafts else self.policy.rectify

    @property
    def drafts(self) -> int:
        """Tokens that the policy drafts before a dense pass verifies them: the engine is lossless; 0: it is not."""
        rectify = self.policy.rectify
        return rectify.every if rectify is not None and rectify.mode == "verify" else 0

    @classmethod
    def of(cls, vllm_config: Any) -> ServeOptions | None:
        """Those of an engine, read once, as `read` finds and refuses them; None if it was started without."""
        if not given_to(vllm_config):
            return None
        given, config = vllm_config.additional_config[KEY], vllm_config.model_config
        read: dict[Any, ServeOptions] = held_by(vllm_config).setdefault("_saccade_options", {})
        # The shape depends on the longest row, which vLLM may yet change; and one engine's builders may be told apart.
        key = repr(given), str(config.model), config.max_model_len
        if key not in read:
            read[key] = cls.read(given, str(config.model), lambda: shape_of(vllm_config))
        return read[key]

    @classmethod
    def read(cls, given: Any, model: str, shape: Shape) -> ServeOptions:
        """Inverse of `to_dict`; the policy is what `recipes.resolve` takes for this model, and may stand alone.

        A layer that it lacks is that of the recipe beside the model, or else of the one that is kept.

        Raises:
            ServingError: an unknown key or a value out of range.
            PolicyError: an unknown policy or option, or no recipe for this model.
        """
        where, names = f'additional_config["{KEY}"]', ("policy", "recall", "rectify_together")
        given = {"policy": given} if isinstance(given, str) else given
        if not isinstance(given, Mapping) or "policy" not in given:
            raise ServingError(f'{where}={given!r} needs a policy: {{"policy": "quest:budget=2048"}}')
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ServingError(
                f"{where} has no option {unknown[0]!r}; its options: {', '.join(names)}{meant(unknown[0], names)}"
            )
        policy, recall = given["policy"], given.get("recall", 0.0)
        if isinstance(recall, bool) or not isinstance(recall, (int, float)) or not 0 <= recall <= 1:
            raise ServingError(f"recall={recall!r} is not valid: the share of steps it is measured in, from 0 to 1")
        together = given.get("rectify_together", False)
        if not isinstance(together, bool):
            raise ServingError(f"rectify_together={together!r} is not valid: true or false")
        chosen = resolve(policy, model, shape)
        options = cls(chosen.policy, float(recall), together, chosen.notes)
        if together and options.rewrites is None:
            told = f"{options.policy} has no dense passes that overwrite"
            raise ServingError(f"rectify_together: {told}; give it rectify=32, or leave out")
        if recall and options.drafts:
            raise ServingError(
                f"recall={recall}: drafts of {options.policy} are verified, which says more; leave it out"
            )
        if not lacks_layer(chosen.policy):
            return options
        with suppress(ModelFolderError, ServingError, UnsupportedModelError):  # whoever looks at the model says it
            if (known := already_found(chosen.policy, model, shape())) is not None:
                return replace(options, policy=known[0], notes=(*chosen.notes, known[1]), found=True)
        return options

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"policy": self.policy.to_spec(), "recall": self.recall, "rectify_together": self.rectify_together}


def held_by(vllm_config: Any) -> dict[str, Any]:
    """Where what belongs to an engine is kept: vLLM copies the configuration for the decoder of a model that reads
    images, and all copies have the one object in which layers are registered."""
    held: dict[str, Any] = vars(vllm_config.compilation_config)
    return held


def given_to(vllm_config: Any) -> bool:
    """Whether an engine was started with our options, whatever they are."""
    given = getattr(vllm_config, "additional_config", None)
    return isinstance(given, Mapping) and KEY in given


def drafting(vllm_config: Any) -> Any:
    """A copy of an engine's configuration, which tells the builders that get it that their steps are drafts."""
    told = copy(vllm_config)
    told.additional_config = {**vllm_config.additional_config, _DRAFTS: True}
    return told


def drafts_with(vllm_config: Any) -> bool:
    """Whether a configuration is one of `drafting`."""
    return _DRAFTS in vllm_config.additional_config


def opted_out(params: Any) -> bool:
    """Whether a request asked to decode densely: `"vllm_xargs": {"saccade": "off"}`."""
    return (getattr(params, "extra_args", None) or {}).get(KEY) == OFF


def shape_of(vllm_config: Any) -> ModelShape:
    """Sizes of the whole decoder, over all ranks, or a ServingError; and its weights' hash where files are here."""
    config = vllm_config.model_config
    text = config.hf_text_config
    reasons = reasons_in_sizes(text)
    if reasons:
        raise ServingError("; ".join(reasons))
    known = {"num_key_value_heads": config.get_total_num_kv_heads(), "head_dim": config.get_head_size()}
    # vLLM has one number for all layers, whatever a configuration says of each.
    for name in {*known}.intersection(getattr(text, "per_layer_attributes", None) or ()):
        (known[name],) = sizes_in(text)[name]
    heads = (text.num_attention_heads, known["num_key_value_heads"], known["head_dim"])
    kinds = mixed_kinds(text, config.max_model_len)
    weights, window = stored_hash(str(config.model)), window_of(text) if kinds else None
    return ModelShape(text.num_hidden_layers, *heads, text.model_type, weights, *widths(text), kinds, window)
