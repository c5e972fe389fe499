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


def attached(use: Callable[[Any], object]) -> Callable[[], object]:
    """What somebody does with a model while a policy is attached."""

    def attach() -> object:
        model = fresh()
        with saccade.sparsify(model, SPEC):
            return use(model)

    return attach


def generate(model: Any, given: Any = None) -> object:
    return model.generate(**{"input_ids": prompt()} if given is None else given, max_new_tokens=4)


def other_attention(model: Any) -> object:
    model.set_attn_implementation("eager")
    return generate(model)


def right_padding(model: Any) -> object:
    return generate(model, {name: given.flip(1) for name, given in padded([30, 20]).items()})


def a_tuple_of_tensors(model: Any) -> object:
    held = model(prompt()).past_key_values
    return model(prompt(1), past_key_values=tuple((layer.keys, layer.values) for layer in held.layers))


def gradients(model: Any) -> object:
    return model(prompt(1), past_key_values=model(prompt()).past_key_values).logits.sum().backward()


def changed(how: Callable[[Any], object]) -> Callable[[], object]:
    """A policy is attached to a model that somebody has changed."""

    def attach() -> object:
        how(model := fresh())
        return decode(model)

    return attach


def a_compiled_forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


COMPILED = ("torch.compile", "attach to the plain model")
MISTAKES: dict[type[Exception], dict[str, tuple[Any, ...]]] = {
    saccade.PolicyError: {
        "no policy": (lambda: saccade.sparsify(fresh(), None), "policy=None", "'tidal:budget=64'"),  # type: ignore[arg-type]
        "a typo": (lambda: saccade.sparsify(fresh(), "tidl"), "'tidl'", "did you mean tidal?"),
        "no such layer": (lambda: saccade.sparsify(fresh(), "tidal:reselect=99"), "reselect=99", "layers are 2 to 3"),
        "a recipe of another model": (
            lambda: saccade.sparsify(fresh(), "recipe:qwen3-8b"),
            *("recipe:qwen3-8b belongs to another model", "layers=36", "layers=4"),
        ),
        "no recipe": (lambda: saccade.sparsify(fresh(), "auto"), "'auto'", "saccade calibrate layers"),
    },
    saccade.AttachmentError: {
        "twice": (attached(lambda model: saccade.sparsify(model, "quest")), f"attached with {SPEC}", "restore()"),
        "another attention while attached": (attached(other_attention), "'eager'", "restore()"),
    },
    saccade.UnsupportedModelError: {
        "a name for a model": (lambda: saccade.sparsify("org/name", SPEC), "'org/name'", "LM.from_pretrained"),
        "no model": (lambda: saccade.sparsify(None, SPEC), "None", "AutoModelForCausalLM"),
        "a pipeline": (a_pipeline, "TextGenerationPipeline", "pass its .model"),
        "training mode": (lambda: decode(fresh().train()), "training mode", "model.eval()"),
        "training later": (attached(lambda model: generate(model.train())), "training mode", "model.eval()"),
        "gradients of decoded tokens": (attached(gradients), "gradient", "torch.no_grad()"),
        "use_cache=False": (asking(use_cache=False), "use_cache=False", "leave it out"),
        "a quantised cache": (asking(cache_implementation="quantized"), "n='quantized'", "leave it out"),
        "an offloaded cache": (asking(cache_implementation="offloaded"), "n='offloaded'", "leave it out"),
        "a cache of tensors": (attached(a_tuple_of_tensors), "type tuple", "pass a DynamicCache"),
        "weights of attention": (asking(output_attentions=True), "output_attentions=True", "leave it out"),
        "right padding": (attached(right_padding), "attention mask", "padding_side='left'"),
        "torch.compile": (lambda: decode(torch.compile(fresh())), *COMPILED),
        "model.compile()": (changed(lambda model: model.compile()), *COMPILED),
        "compiled layers": (changed(lambda model: [layer.compile() for layer in model.model.layers]), *COMPILED),
        "a compiled forward": (changed(a_compiled_forward), *COMPILED),
        "compiled later": (attached(lambda model: torch.compile(model, backend="eager")(prompt())), *COMPILED),
    },
}


@pytest.mark.parametrize(("kind", "mistake"), [(kind, one) for kind, those in MISTAKES.items() for one in those])
def test_a_mistake_is_answered_in_one_line(kind: type[Exception], mistake: str) -> None:
    make, *words = MISTAKES[kind][mistake]
    with pytest.raises(kind) as error:
        make()
    message = str(error.value)
    assert isinstance(error.value, saccade.SaccadeError)
    assert "\n" not in message and len(message) < 600
    assert all(word in message for word in words), message


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_any_attention_that_a_model_came_with_is_replaced(attention: str) -> None:
    model = fresh(attention=attention)
    assert torch.equal(decode(model), decode(fresh()))
    assert model.config._attn_implementation == attention


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
