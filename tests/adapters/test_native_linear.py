"""The native product in a model's linear layers: what it computes, which modules take it, that it leaves nothing."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import saccade
from saccade.adapters.hf.linear import NativeForward, native_linears
from saccade.kernels._native import library as native
from saccade.kernels.decode_linear.api import DecodeLinear

from . import tiny
from .test_lifecycle import traces

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")

LINEARS = 4 * 7 + 1  # four layers and the head


@contextmanager
def native_products(model: Any) -> Iterator[list[NativeForward]]:
    taken = native_linears(model)
    try:
        yield taken
    finally:
        restore(taken)


def restore(taken: list[NativeForward]) -> None:
    for one in taken:
        one.restore()


def fresh(**changes: Any) -> PreTrainedModel:
    return tiny.fresh(attention="eager", **changes).to(torch.bfloat16)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every call that the native product takes."""
    seen: list[int] = []
    run = DecodeLinear.run

    def counting(self: DecodeLinear, x: Tensor) -> Tensor:
        seen.append(x.numel() // x.shape[-1])
        return run(self, x)

    monkeypatch.setattr(DecodeLinear, "run", counting)
    return seen


@torch.no_grad()
def decode(model: Any, rows: int = 1, new: int = 12) -> tuple[Tensor, Tensor]:
    """Greedy tokens, and the logits of every decoded position."""
    ids, cache, logits = tiny.prompt(30, rows), DynamicCache(), []
    step = ids
    for _ in range(new):
        out = model(step, past_key_values=cache, use_cache=True)
        step = out.logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat((ids, step), dim=1)
        logits.append(out.logits[:, -1])
    return ids, torch.stack(logits)


@pytest.mark.parametrize(("tied", "rows"), [(False, 1), (True, 3)])
def test_every_module_has_the_product_of_its_weights(tied: bool, rows: int, calls: list[int]) -> None:
    model = fresh(tie_word_embeddings=tied, attention_bias=True)
    checked = []

    def check(module: nn.Linear, args: tuple[Tensor], y: Tensor) -> None:
        assert torch.equal(y, DecodeLinear(module.weight, module.bias, implementation="native")(args[0]))
        checked.append(module)

    with native_products(model) as taken:
        assert len(taken) == LINEARS
        cache = DynamicCache()
        with torch.no_grad():
            model(tiny.prompt(30, rows), past_key_values=cache, use_cache=True)
            assert calls == []
            hooks = [m.register_forward_hook(check) for m in model.modules() if isinstance(m, nn.Linear)]
            model(tiny.prompt(1, rows), past_key_values=cache, use_cache=True)
            for hook in hooks:
                hook.remove()
    assert len(checked) == LINEARS and calls == [rows] * 2 * LINEARS, "each, and what it was held against"


def test_restore_leaves_nothing() -> None:
    model = fresh()
    before, (tokens, logits), prompt = traces(model), decode(model), tiny.prompt()
    forward = nn.Linear.forward
    taken = native_linears(model)
    assert traces(model) != before
    with torch.no_grad():
        stock = model(prompt).logits
    restore(taken)
    restore(taken)
    assert traces(model) == before and nn.Linear.forward is forward
    taken, other = native_linears(model), partial(forward, model.lm_head)
    model.lm_head.forward = other
    restore(taken)
    assert vars(model.lm_head).pop("forward") is other, "what somebody has set meanwhile stays"
    again, same = decode(model)
    assert torch.equal(tokens, again) and torch.equal(logits, same)
    with torch.no_grad():
        assert torch.equal(model(prompt).logits, stock)  # more than 8 rows: the modules' own


def test_calls_that_the_modules_answer_themselves(calls: list[int]) -> None:
    module = nn.Linear(16, 8).to(torch.bfloat16)
    model = nn.Sequential(module)
    x = torch.randn(8, 16).to(torch.bfloat16)
    with native_products(model) as taken, torch.no_grad():
        assert len(taken) == 1
        module(x)
        assert calls == [8]
        for other in (torch.randn(9, 16).to(torch.bfloat16), nn.Parameter(x)):
            assert torch.equal(module(other), nn.functional.linear(other, module.weight, module.bias))
        for wrong in (x.float(), x.to("meta"), x[:, :15]):
            with pytest.raises(RuntimeError):  # torch's own complaint, not ours
                module(wrong)
        with torch.autocast("cpu", torch.float16):
            assert module(x).dtype == torch.float16
        with torch.autocast("cpu", torch.bfloat16):
            module(x.float())
        module.weight = nn.Parameter(torch.zeros(8, 16, dtype=torch.bfloat16))
        assert torch.equal(module(x), module.bias.expand(8, 8))
        assert calls == [8]


def test_a_model_that_changes_its_dtype(calls: list[int]) -> None:
    model = nn.Sequential(nn.Linear(16, 8).to(torch.bfloat16))
    x = torch.randn(2, 16)
    with native_products(model), torch.no_grad():
        model.float()
        assert torch.equal(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))
        assert calls == []
        model.to(torch.bfloat16)
        got = model(x.to(torch.bfloat16))
        assert calls == [2]
        expected = DecodeLinear(model[0].weight, model[0].bias, implementation="native")(x.to(torch.bfloat16))
        assert torch.equal(got, expected)


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_untouched(training: bool, calls: list[int]) -> None:
    model = fresh().train(training)
    ids = tiny.prompt(5)
    model(ids, labels=ids).loss.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    with native_products(model):
        model(ids, labels=ids).loss.backward()
    assert calls == []
    assert all(torch.equal(wanted[name], parameter.grad) for name, parameter in model.named_parameters())


def test_a_copy_computes_with_its_own_weights(calls: list[int]) -> None:
    model = fresh()
    with native_products(model):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
        calls.clear()
        tokens, logits = decode(other)
        assert len(calls) == 11 * LINEARS
        assert not torch.equal(decode(model)[1], logits)
    plain = fresh()
    plain.load_state_dict(other.state_dict())
    with native_products(plain):
        again, same = decode(plain)
    assert torch.equal(tokens, again) and torch.equal(logits, same)


def test_modules_that_are_left_alone() -> None:
    class Other(nn.Linear):
        pass

    def linear(kind: type[nn.Linear] = nn.Linear, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
        return kind(16, 8).to(dtype)

    hooked, patched, strided = linear(), linear(), linear()
    hooked.register_forward_hook(lambda module, args, output: output)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    strided.weight = nn.Parameter(torch.randn(16, 8).to(torch.bfloat16).T)
    normed = torch.nn.utils.parametrizations.weight_norm(linear())
    model = nn.ModuleList([linear(Other), linear(dtype=torch.float32), hooked, patched, strided, normed])
    before = traces(model)
    with native_products(model) as taken:
        assert len(taken) == 0 and traces(model) == before


def test_modules_that_peft_wraps_are_left_alone(calls: list[int]) -> None:
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )
    model = peft.get_peft_model(fresh(), config).to(torch.bfloat16).eval()
    before = traces(model)
    with native_products(model) as taken:
        assert len(taken) == 4 * 5
        decode(model)
        assert len(calls) == 11 * 4 * 5
    assert traces(model) == before


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh()
    before = traces(model)
    monkeypatch.setattr(native, "library", lambda: None)
    with native_products(model) as taken:
        assert len(taken) == 0 and traces(model) == before


def test_with_a_policy() -> None:
    """Attached and restored in either order with a run."""
    model = fresh()
    before = traces(model)
    with native_products(model), saccade.sparsify(model, "quest:page=4,budget=9"):
        inner = decode(model)
    run = saccade.sparsify(model, "quest:page=4,budget=9")
    taken = native_linears(model)
    outer = decode(model)
    run.restore()
    restore(taken)
    assert torch.equal(inner[1], outer[1]) and traces(model) == before
