"""lm-evaluation-harness's own transformers model, whose answers and questions decode under a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from ..adapters.hf.run import sparsify
from ..adapters.hf.support import cached, empty_cache, refuse_unsupported
from ..checkpoints.load import ModelSource, pick_device, pick_dtype
from ..checkpoints.versions import cache_argument
from ..errors import SaccadeError, UnsupportedModelError
from ..plans.rectify import Phase
from ..recipes.resolve import resolve

QUESTION_TOKENS = 128
"""Covers RULER's longest question and beginning of an answer under the usual vocabularies, with room for a template."""

OWN = ("pretrained", "policy", "question_tokens", "device", "dtype", "batch_size")
PASSED = (
    *("max_length", "truncation", "add_bos_token"),
    *("enable_thinking", "think_end_token", "chat_template_args"),
)
"""What means the same as for the harness's `hf`."""


class SaccadeLM(HFLM):
    """The model `saccade`: all but the last `question_tokens` of a prompt are prefilled, densely; the rest decodes.

    Were the question prefilled too, the first token of an answer would come from dense attention, and short answers
    would flatter every policy. Stop strings, sampling, truncation and templates are `HFLM`'s.

    Args:
        pretrained: a model folder or hub id; safetensors only, no code of a model's is run.
        policy: whatever `sparsify` takes: a spec, `auto`, the path of a recipe, `recipe:NAME`.
        question_tokens: last tokens of a prompt that decode, one by one as far as their sets go; 0: none.
        device: auto, cpu, cuda, cuda:1, mps.
        dtype: auto, float32, bfloat16, float16.
        batch_size: prompts decoded together, padded on the left.
        options: those in `PASSED`.

    Raises:
        SaccadeError: one line about the first argument that is not valid, before weights are read.

    Attributes:
        run: the policy attached to the model; `run.stats()` counts every decoded token.
    """

    def __init__(
        self,
        pretrained: Any = None,
        policy: Any = None,
        question_tokens: Any = QUESTION_TOKENS,
        device: Any = "auto",
        dtype: Any = "auto",
        batch_size: Any = 1,
        **options: Any,
    ) -> None:
        unknown = [name for name in options if name not in PASSED]
        if unknown:
            raise SaccadeError(
                f"model_args: unknown {unknown[0]}={options[unknown[0]]!r}; valid: {', '.join((*OWN, *PASSED))}. A "
                """policy with commas goes into JSON: '{"pretrained": "DIR", "policy": "tidal:budget=64,reselect=7"}'"""
            )
        for name, value, example in (("pretrained", pretrained, "DIR_OR_HUB_ID"), ("policy", policy, "SPEC")):
            if not isinstance(value, str) or not value:
                raise SaccadeError(f"model_args: {name}={value!r} is not valid; give {name}={example}")
        self.question_tokens = _whole("question_tokens", question_tokens, 0)
        rows = _whole("batch_size", batch_size, 1)
        if options.get("enable_thinking") and options.get("think_end_token") is None:
            raise SaccadeError("model_args: enable_thinking=True needs think_end_token, behind which the answer begins")
        source = ModelSource.locate(pretrained)
        # The harness names cuda:0 where nobody has named a device, and its `hf` goes on without one.
        picked = pick_device("auto" if device == "cuda:0" and not torch.cuda.is_available() else str(device))
        kind = pick_dtype(str(dtype), source, picked)
        resolve(policy, source.location, source.decoder).policy.plan(source.decoder())
        tokenizer = source.tokenizer()
        model = source.weights(picked, kind)
        refuse_unsupported(model)
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=rows, **options)
        self.pretrained = source.name
        self.run = sparsify(model, policy, tokenizer=tokenizer)
        rectify = self.run.policy.rectify
        # Given tokens are no drafts: verification reads them densely, since its answers are dense attention's.
        self._phase = Phase(None) if rectify is not None and rectify.mode == "verify" else self.run.policy.phase

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> SaccadeLM:
        """From `--model_args`, and from what the harness adds for options of its own; the former count."""
        added = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**{**added, **arg_dict})

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> NoReturn:
        """Always a SaccadeError: nothing would decode."""
        raise against_likelihoods(sorted({request.task_name or "a request" for request in requests}))

    loglikelihood_rolling = loglikelihood

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Any:
        if not self.question_tokens:
            return super()._model_generate(context, max_length, stop, **generation_kwargs)
        for name in ("num_beams", "num_return_sequences"):
            if (generation_kwargs.get(name) or 1) != 1:
                given = f"{name}={generation_kwargs[name]}"
                raise UnsupportedModelError(
                    f"{given}: a prompt that is read in parts has one row; use question_tokens=0"
                )
        cache, kept = self._read(context, generation_kwargs["attention_mask"]), cache_argument(self.model)
        with self.run.decoding():
            return super()._model_generate(context, max_length, stop, **{kept: cache}, **generation_kwargs)

    @torch.no_grad()
    def _read(self, tokens: Tensor, mask: Tensor) -> Any:
        """A cache of left-padded prompts `[B, n]`, all but the last token, which is `generate`'s to read."""
        length, cache = tokens.shape[1], empty_cache(self.model)
        done = max(length - self.question_tokens, 0)
        # As `generate` counts them: padding has no position.
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)

        def feed(first: int, stop: int) -> Any:
            inputs = {"attention_mask": mask[:, :stop], "position_ids": positions[:, first:stop]}
            output = self.model(tokens[:, first:stop], **cached(self.model, cache), logits_to_keep=1, **inputs)
            return output[cache_argument(self.model)]

        if done:
            cache = feed(0, done)
        with self.run.decoding():
            for together in self._phase.pieces(0, length - 1 - done):
                cache = feed(done, done + together)
                done += together
        return cache


def against_likelihoods(names: Sequence[str]) -> SaccadeError:
    """Why tasks that compare likelihoods are refused."""
    return SaccadeError(
        f"{', '.join(names)}: log-likelihoods never decode; every token is read as prompt, with dense attention, so no "
        "policy could change the score; choose tasks whose output_type is generate_until"
    )


def _whole(name: str, value: Any, minimum: int) -> int:
    """A whole number, which the command line may give as text."""
    if not isinstance(value, bool) and str(value).isascii() and str(value).isdigit() and int(value) >= minimum:
        return int(value)
    raise SaccadeError(f"model_args: {name}={value!r} is not valid; whole numbers from {minimum} are")
