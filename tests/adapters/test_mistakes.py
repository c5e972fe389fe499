"""What a newcomer gets wrong in transformers: one line that names it and says what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import pipeline

import saccade
from saccade.checkpoints.load import ModelSource
from saccade.kernels._native import library

from .tiny import fresh, padded, prompt

SPEC = "tidal:budget=8,reselect=3"


def decode(model: Any, **settings: Any) -> Any:
    with saccade.sparsify(model, SPEC):
        return model.generate(prompt(), max_new_tokens=4, do_sample=False, **settings)


def asking(**settings: Any) -> Callable[[], object]:
    return lambda: decode(fresh(), **settings)


def a_pipeline() -> object:
    tokenizer = ModelSource.locate(None).tokenizer()
    return saccade.sparsify(pipeline("text-generation", model=fresh(), tokenizer=tokenizer), SPEC)


def training() -> object:
    return decode(fresh().train())


def training_later() -> object:
    model = fresh()
    with saccade.sparsify(model, SPEC):
        model.train()
        return model.generate(prompt(), max_new_tokens=4)


def twice() -> object:
    model = fresh()
    with saccade.sparsify(model, SPEC):
        return saccade.sparsify(model, "quest")


def other_attention() -> object:
    model = fresh()
    with saccade.sparsify(model, SPEC):
        model.set_attn_implementation("eager")
        return model.generate(prompt(), max_new_tokens=4)


def right_padding() -> object:
    rows, model = padded([30, 20]), fresh()
    with saccade.sparsify(model, SPEC):
        return model.generate(**{name: given.flip(1) for name, given in rows.items()}, max_new_tokens=4)


def a_tuple_of_tensors() -> object:
    model = fresh()
    with saccade.sparsify(model, SPEC):
        cache = model(prompt()).past_key_values
        return model(prompt()[:, -1:], past_key_values=tuple((layer.keys, layer.values) for layer in cache.layers))


def gradients() -> object:
    model = fresh()
    with saccade.sparsify(model, SPEC):
        cache = model(prompt()).past_key_values
        return model(prompt()[:, -1:], past_key_values=cache).logits.sum().backward()


def compiled(how: Callable[[Any], Any]) -> Callable[[], object]:
    """The model as `how` gives it, or changes it where it gives None."""

    def attach() -> object:
        model = fresh()
        changed = how(model)
        return decode(model if changed is None else changed)

    return attach


def a_compiled_forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def compiled_later() -> object:
    model = fresh()
    with saccade.sparsify(model, SPEC):
        return torch.compile(model, backend="eager")(prompt())


UNSUPPORTED, ATTACHED, POLICY = saccade.UnsupportedModelError, saccade.AttachmentError, saccade.PolicyError
PLAIN = "attach to the plain model"

MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = {
    "a name for a model": (
        lambda: saccade.sparsify("org/name", SPEC),
        UNSUPPORTED,
        ("'org/name'", "AutoModelForCausalLM.from_pretrained"),
    ),
    "no model": (lambda: saccade.sparsify(None, SPEC), UNSUPPORTED, ("None", "AutoModelForCausalLM")),
    "a pipeline": (a_pipeline, UNSUPPORTED, ("TextGenerationPipeline", "pass its .model")),
    "no policy": (lambda: saccade.sparsify(fresh(), None), POLICY, ("policy=None", "'tidal:budget=64'")),  # type: ignore[arg-type]
    "a typo": (lambda: saccade.sparsify(fresh(), "tidl"), POLICY, ("'tidl'", "did you mean tidal?")),
    "a layer that is not there": (
        lambda: saccade.sparsify(fresh(), "tidal:reselect=99"),
        POLICY,
        ("reselect=99", "valid layers are 2 to 3"),
    ),
    "a recipe of another model": (
        lambda: saccade.sparsify(fresh(), "recipe:qwen3-8b"),
        POLICY,
        ("recipe:qwen3-8b belongs to another model", "layers=36", "layers=4"),
    ),
    "no recipe": (lambda: saccade.sparsify(fresh(), "auto"), POLICY, ("'auto'", "saccade calibrate layers")),
    "attached twice": (twice, ATTACHED, (f"attached with {SPEC}", "restore()")),
    "another attention while attached": (other_attention, ATTACHED, ("'eager'", "restore()")),
    "training mode": (training, UNSUPPORTED, ("training mode", "model.eval()")),
    "training mode while attached": (training_later, UNSUPPORTED, ("training mode", "model.eval()")),
    "gradients of decoded tokens": (gradients, UNSUPPORTED, ("gradient", "torch.no_grad()")),
    "use_cache=False": (asking(use_cache=False), UNSUPPORTED, ("use_cache=False", "leave it out")),
    "a quantised cache": (
        asking(cache_implementation="quantized"),
        UNSUPPORTED,
        ("cache_implementation='quantized'", "leave it out"),
    ),
    "an offloaded cache": (
        asking(cache_implementation="offloaded"),
        UNSUPPORTED,
        ("cache_implementation='offloaded'", "leave it out"),
    ),
    "a cache of tensors": (a_tuple_of_tensors, UNSUPPORTED, ("type tuple", "pass a DynamicCache")),
    "weights of attention": (
        asking(output_attentions=True, return_dict_in_generate=True),
        UNSUPPORTED,
        ("output_attentions=True", "leave it out"),
    ),
    "right padding": (right_padding, UNSUPPORTED, ("attention mask", "padding_side='left'")),
    "torch.compile": (compiled(torch.compile), UNSUPPORTED, ("torch.compile", PLAIN)),
    "model.compile()": (compiled(lambda model: model.compile()), UNSUPPORTED, ("torch.compile", PLAIN)),
    "compiled layers": (
        compiled(lambda model: [layer.compile() for layer in model.model.layers] and None),
        UNSUPPORTED,
        ("torch.compile", PLAIN),
    ),
    "a compiled forward": (compiled(a_compiled_forward), UNSUPPORTED, ("torch.compile", PLAIN)),
    "torch.compile while attached": (compiled_later, UNSUPPORTED, ("torch.compile", PLAIN)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_in_one_line(mistake: str) -> None:
    make, kind, words = MISTAKES[mistake]
    with pytest.raises(kind) as error:
        make()
    message = str(error.value)
    assert isinstance(error.value, saccade.SaccadeError)
    assert "\n" not in message and len(message) < 600
    assert all(word in message for word in words), message


# --- what is done instead of refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_any_attention_that_a_model_came_with_is_replaced(attention: str) -> None:
    model = fresh(attention=attention)
    assert torch.equal(decode(model), decode(fresh()))
    assert model.config._attn_implementation == attention


# --- what is said and not refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "dtype", "words"),
    [
        (False, torch.float32, ("torch's kernels", "C compiler", "saccade doctor")),
        (True, torch.float16, ("torch's kernels", "float16", "bfloat16")),
        (True, torch.float32, ()),
        (True, torch.bfloat16, ()),
    ],
)
def test_slow_kernels_are_told_of(
    built: bool,
    dtype: torch.dtype,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = object() if built else None
    monkeypatch.setattr(library, "library", lambda: found)
    with caplog.at_level(logging.WARNING, "saccade"), saccade.sparsify(fresh().to(dtype), SPEC) as run:
        notes = [note for note in run.notes if "kernels" in note]
    assert len(notes) == bool(words)
    assert all(word in notes[0] for word in words)
    assert [note for note in caplog.messages if "kernels" in note] == notes
