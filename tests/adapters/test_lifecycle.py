"""Attaching and restoring, several models and caches at once, and what a cache goes through between calls."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import peft
import pytest
import torch
from transformers import CompileConfig, DynamicCache, PreTrainedModel, StaticCache

import saccade

from . import tiny
from .checking import OracleObserver
from .test_layer_kinds import hybrid
from .tiny import answered
from .ways import VERSION

BUDGET = 9
VERIFIED = "quest:page=4,budget=4,rectify=4:verify"


def traces(model: PreTrainedModel) -> list[tuple[str, list[str], int]]:
    """Every attribute and hook of every module."""
    return [
        (name, sorted(vars(module)), len(module._forward_pre_hooks) + len(module._forward_hooks))
        for name, module in model.named_modules()
    ]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    cache = model(tiny.prompt(), use_cache=True).past_key_values
    return model(tiny.prompt(1), past_key_values=cache).logits


@pytest.mark.parametrize(
    ("spec", "make", "attention"),
    [
        ("dense", tiny.fresh, "sdpa"),
        (tiny.spec("quest", BUDGET), tiny.fresh, "eager"),
        (VERIFIED, tiny.fresh, "sdpa"),
        ("streaming:budget=9", partial(hybrid, "llama4_text"), "eager"),
    ],
)
def test_restore_gives_back_the_stock_model(spec: str, make: Callable[..., PreTrainedModel], attention: str) -> None:
    model = make(attention=attention)
    before, configuration, expected = traces(model), model.config.to_dict(), logits(model)
    generate_function = model.generate.__func__
    with saccade.sparsify(model, spec):
        answered(model)
    assert traces(model) == before
    assert model.config.to_dict() == configuration
    assert model.config._attn_implementation == attention
    assert model.generate.__func__ is generate_function
    assert torch.equal(logits(model), expected)


def test_restore_gives_back_what_stood_on_the_instance() -> None:
    model = tiny.fresh()
    model.generate = stood = partial(model.generate)
    with saccade.sparsify(model, "dense"):
        assert model.generate is not stood
    assert model.generate is stood


def test_failed_attachment_leaves_nothing() -> None:
    model = tiny.fresh()
    before = traces(model)

    def refuse(name: str) -> None:
        raise RuntimeError("no")

    model.model.set_attn_implementation = refuse
    with pytest.raises(RuntimeError):
        saccade.sparsify(model, "dense")
    del model.model.set_attn_implementation
    assert traces(model) == before


def test_restore_twice_is_once() -> None:
    model = tiny.fresh()
    run = saccade.sparsify(model, "dense")
    run.restore()
    run.restore()
    other = saccade.sparsify(model, "dense")
    run.restore()  # the first run's: not the second's to undo
    assert model.config._attn_implementation == "saccade"
    other.restore()


def test_a_restored_run_is_over() -> None:
    run = saccade.sparsify(tiny.llama(), "dense")
    run.restore()
    with pytest.raises(saccade.AttachmentError, match="restored"), run:
        pass
    with pytest.raises(saccade.AttachmentError, match="restored"), run.decoding():
        pass
    assert "restored" in repr(run) and run.stats().steps == 0


@torch.no_grad()
def test_a_copied_cache_continues_on_its_own() -> None:
    """`copy.deepcopy` of a cache under a run: both copies decode, with an index of their own."""
    model, spec = tiny.llama(), tiny.spec("quest", BUDGET)
    checker, observer = OracleObserver(spec), Mock()
    with saccade.sparsify(model, spec, observers=(checker, observer)) as run:
        cache = model(tiny.prompt(), use_cache=True).past_key_values
        model(torch.tensor([[3]]), past_key_values=cache)
        twin = copy.deepcopy(cache)
        assert twin.layers[0].keys.data_ptr() != cache.layers[0].keys.data_ptr()
        results = []
        # The first token is the same for both; in the others, which fill a page of each, they differ.
        for number in range(6):
            fed = (torch.tensor([[5]]), cache), (torch.tensor([[5 + number]]), twin)
            results.append([model(ids, past_key_values=one).logits for ids, one in fed])
        assert torch.equal(*results[0]) and not torch.equal(*results[1])
        assert run.stats().steps == 13, "copies count for the same run"
    assert observer.observe.call_count == 13 * 4, "and are seen by the same observers"


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_a_reset_cache_starts_again(kind: str) -> None:
    model, spec = tiny.llama(), tiny.spec("quest", BUDGET)
    cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=50)
    with saccade.sparsify(model, spec, observers=(OracleObserver(spec),)):
        for seed in (0, 1, 2):
            tiny.by_hand(model, tiny.prompt(20 - seed, seed=seed), 5, cache)
            cache.reset()


@torch.no_grad()
def test_a_static_cache_may_be_rewound() -> None:
    """`StaticLayer` has no `crop`: callers set its length, or on transformers 4 the slot, and no hook tells us."""
    model, spec = tiny.llama(), tiny.spec("quest", BUDGET)
    cache = StaticCache(config=model.config, max_cache_len=50)
    with saccade.sparsify(model, spec, observers=(OracleObserver(spec),)):
        model(tiny.prompt(20), past_key_values=cache)
        slot = 20
        for first, steps in ((2, 9), (30, 15)):
            for token in range(first, first + steps):
                at = {"cache_position": torch.tensor([slot])} if VERSION < (5,) else {}
                model(torch.tensor([[token]]), past_key_values=cache, **at)
                slot += 1
            slot -= 9
            for layer in cache.layers if VERSION >= (5,) else ():
                layer.cumulative_length -= 9


@torch.no_grad()
def test_rows_may_leave_and_multiply() -> None:
    model, spec = tiny.llama(), tiny.spec("quest", BUDGET)
    with saccade.sparsify(model, spec, observers=(OracleObserver(spec),)):
        cache = model(tiny.prompt(20, rows=3), use_cache=True).past_key_values
        model(tiny.prompt(1, rows=3), past_key_values=cache)
        cache.batch_select_indices(torch.tensor([2, 0]))
        model(tiny.prompt(1, rows=2), past_key_values=cache)
        cache.batch_repeat_interleave(2)
        model(tiny.prompt(1, rows=4), past_key_values=cache)
        cache.batch_select_indices(torch.tensor([True, False, False, True]))
        model(tiny.prompt(1, rows=2), past_key_values=cache)
        assert cache.layers[0].keys.shape == (2, 2, 24, 8)


def test_a_cache_may_cross_inference_mode() -> None:
    """Buffers made inside `inference_mode` are written outside of it, and the other way round; an index's too."""
    model, spec = tiny.llama(), tiny.spec("quest", BUDGET)
    modes = [torch.inference_mode(), torch.no_grad(), torch.enable_grad()]
    for order in (modes, modes[::-1]):
        with saccade.sparsify(model, spec, recall=True) as run:
            cache, tokens = DynamicCache(), tiny.prompt(40, rows=2)
            expected = tiny.by_hand(model, tokens, 6)
            for mode in (*order, *order):
                with mode:
                    # Cloned, since autograd does not even embed token ids that are inference tensors.
                    tokens = tiny.by_hand.__wrapped__(model, tokens.clone(), 1, cache)
                    cache.reorder_cache(torch.tensor([0, 1]))
            assert tokens.tolist() == expected.tolist()
            assert run.stats().steps == 2 * (6 - 1)


def test_generate_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a static cache on an accelerator, transformers compiles on its own; it would recompile at every step."""
    config = CompileConfig()
    config._compile_all_devices = True  # transformers' own switch for tests on CPU

    def compiled(self: Any, compile_config: Any) -> Any:
        raise AssertionError("compiles")

    monkeypatch.setattr(type(tiny.llama()), "get_compiled_call", compiled)
    with saccade.sparsify(tiny.llama(), tiny.spec("quest", BUDGET)):
        answered(tiny.llama(), cache_implementation="static", compile_config=config)
    with pytest.raises(AssertionError, match="compiles"):
        answered(tiny.llama(), cache_implementation="static", compile_config=config)


def lora(model: PreTrainedModel) -> peft.PeftModel:
    torch.manual_seed(5)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).eval()


def test_peft_lora() -> None:
    """Attached through the wrapper; its adapters stay in force."""
    plain = answered(tiny.fresh())
    model = lora(tiny.fresh())
    stock = answered(model)
    assert stock != plain
    with saccade.sparsify(model, tiny.spec("less_is_more")) as run:
        assert answered(model) == stock
        assert run.stats().steps == 7
        with pytest.raises(saccade.AttachmentError):
            saccade.sparsify(model.get_base_model(), "dense")
    spec = tiny.spec("tidal", BUDGET)
    with saccade.sparsify(model, spec, observers=(OracleObserver(spec),)):
        answered(model)
    assert answered(model) == stock


def test_peft_prompt_learning_is_refused() -> None:
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny.fresh(), config).eval()
    with pytest.raises(saccade.UnsupportedModelError, match="PROMPT_TUNING adds virtual tokens"):
        saccade.sparsify(model, "dense")


@torch.no_grad()
def test_a_mask_that_is_not_causal_is_refused_while_decoding() -> None:
    model = tiny.fresh()
    with saccade.sparsify(model, "dense") as run:
        cache = model(tiny.prompt(), use_cache=True).past_key_values
        past = int(cache.get_seq_length())
        mask = torch.ones((1, 1, 2, past + 2), dtype=torch.bool).tril(past)
        mask[0, 0, 0, 1] = False
        with run.decoding(), pytest.raises(saccade.UnsupportedModelError, match="not causal"):
            model(tiny.prompt()[:, :2], past_key_values=cache, attention_mask=mask)


def test_the_attention_name_without_a_run_is_an_error() -> None:
    saccade.sparsify(tiny.llama(), "dense").restore()
    model = tiny.fresh()
    model.set_attn_implementation("saccade")
    with pytest.raises(saccade.AttachmentError, match="not attached"):
        model(tiny.prompt())
