"""What people do to a model before or while it is attached: the policy runs, or one line says why and what to do."""

import ast
import functools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers import AttentionInterface, DynamicCache, pipeline
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.llama.modeling_llama import LlamaAttention

import saccade
from saccade.checkpoints.load import ModelSource
from saccade.kernels._native import library

from . import tiny
from .rectified import specs
from .tiny import fresh, padded, prompt, said

VERIFIED = "exact_topk:budget=8,rectify=3:verify"
FACTORIES = "empty|empty_strided|zeros|ones|full|arange|tensor|rand|randn|randint|randperm|eye|linspace|normal|range"
FACTORIES += "|logspace|tril_indices|triu_indices|hann_window|scalar_tensor|Tensor|(Float|Int|Long|Bool)Tensor"


def around_by_a_wrapper(model: Any, ids: Any, **inputs: Any) -> None:
    """As accelerate's `unwrap_model` leaves it, and as any wrapper of what was there before does."""
    kept = vars(model)["forward"]
    model.forward = functools.partial(type(model).forward, model)
    try:
        model(ids, **inputs)
    finally:
        model.forward = kept


@pytest.mark.parametrize("policy", ["quest", "lychee_cluster"])
@torch.no_grad()
def test_no_decoding_call_goes_around_verification(policy: str) -> None:
    """Prompts may: they are dense. The cache is as it was, and goes on."""
    model = tiny.llama()
    with saccade.sparsify(model, specs(3, "verify")[policy]):
        cache = DynamicCache()
        model.model(prompt(), past_key_values=cache)
        by_class = functools.partial(type(model).forward, model)
        by_wrapper = functools.partial(around_by_a_wrapper, model)
        for around in (by_class, model.model, by_wrapper) * 2:
            with pytest.raises(saccade.UnsupportedModelError, match="nobody would verify it"):
                around(prompt(1), past_key_values=cache)
        assert cache.get_seq_length() == 30
        logits = model(prompt(1), past_key_values=cache).logits[0, -1]
    expected = model(torch.cat((prompt(), prompt(1)), dim=1)).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def other_name(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Registered with transformers, whatever it computes."""
    name = "sharper_than_sdpa"
    AttentionInterface.register(name, lambda *given, **named: pytest.fail("not to be called"))
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)
    return "its attention is 'sharper_than_sdpa'"


def same_name(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", lambda *given, **named: None)
    return "'sdpa' was registered anew"


def in_the_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """As Unsloth and SelfExtend do."""

    monkeypatch.setattr(LlamaAttention, "forward", lambda *given, **named: pytest.fail("not to be called"))
    return "the forward of its LlamaAttention was replaced"


def in_one_layer(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    module = model.model.layers[2].self_attn
    module.forward = functools.partial(LlamaAttention.forward, module)
    return "the forward of its LlamaAttention was replaced"


def behind_a_hook(model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """What accelerate's hooks wrap is looked at too."""
    told = in_one_layer(model, monkeypatch)
    add_hook_to_module(model.model.layers[2].self_attn, ModelHook())
    return told


@pytest.mark.parametrize("own", [other_name, same_name, in_the_class, in_one_layer, behind_a_hook])
def test_attention_of_another_kind_is_refused_ahead(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh()
    told = own(model, monkeypatch)
    before = dict(vars(model))
    for policy in ("dense", "quest:page=4,budget=8", VERIFIED):
        with pytest.raises(saccade.UnsupportedModelError, match=told):
            saccade.sparsify(model, policy)
    assert vars(model) == before


class Own(LlamaAttention):
    """A model's own code, which calls what transformers has."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_hooks_and_classes_of_their_own_are_no_other_attention() -> None:
    model = fresh()
    add_hook_to_module(model.model.layers[1].self_attn, ModelHook())
    model.model.layers[2].self_attn.__class__ = Own
    with saccade.sparsify(model, "quest:page=4,budget=8") as run:
        said(model)
        assert run.stats().steps == 5


@pytest.mark.parametrize("configured", [False, True], ids=["given", "configured"])
def test_drafts_of_the_first_layers_are_refused_ahead(configured: bool) -> None:
    """transformers would cut the model for them, and leave it cut."""
    model, given = fresh(), {"assistant_early_exit": 2}
    expected = said(model)
    model.generation_config.update(**given if configured else {})
    with (
        saccade.sparsify(model, VERIFIED),
        pytest.raises(saccade.UnsupportedModelError, match="assistant_early_exit"),
    ):
        said(model, **{} if configured else given)
    model.generation_config.assistant_early_exit = None
    assert model.config.num_hidden_layers == 4 and said(model) == expected


def test_whoever_makes_a_tensor_says_where() -> None:
    """Under `torch.set_default_device("cuda")` a model on the CPU decodes as ever."""
    silent = []
    for file in sorted(Path(saccade.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called = isinstance(node, ast.Call) and re.fullmatch(rf"torch\.({FACTORIES})", ast.unparse(node.func))
            if called and not {keyword.arg for keyword in node.keywords} & {"device", "out", None}:
                silent.append(f"{file.name}:{node.lineno}")
    assert not silent


@pytest.mark.parametrize("form", [True, False], ids=["dictionary", "tuple"])
@torch.no_grad()
def test_a_dense_pass_shows_its_caller_no_more_than_the_call(form: bool) -> None:
    """Hidden states and a router's logits, of a decoder in either form, for a batch."""
    model = fresh("mixtral", num_local_experts=4, num_experts_per_tok=2)
    asked = {"output_hidden_states": True, "output_router_logits": True, "return_dict": form}
    shapes = set()
    with saccade.sparsify(model, "exact_topk:budget=8,rectify=3") as run:
        cache = DynamicCache()
        model(prompt(40, rows=2), past_key_values=cache)
        for token in prompt(9)[0]:
            output = model.model(token.expand(2, 1), past_key_values=cache, **asked)
            parts = [part for part in (output.values() if form else output) if not isinstance(part, DynamicCache)]
            shapes.add(
                tuple(tuple(one.shape) for part in parts for one in ((part,) if torch.is_tensor(part) else part))
            )
        assert run.stats().dense_passes == 2
    (seen,) = shapes
    assert {shape for shape in seen if len(shape) == 3} == {(2, 1, 32)}
    assert {shape for shape in seen if len(shape) == 2} <= {(2, 4)}


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
