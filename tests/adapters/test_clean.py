"""What is clean in a rectified cache, whatever is done to it: one plain loop that only sees a run from outside."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import saccade

from . import tiny
from .rectified import twin
from .test_put_back import in_layer
from .tiny import CLUSTERS, LETTERS

EVERY = 3
POLICIES = {"quest:page=4,dense_layers=1": 28, CLUSTERS.replace(",budget=16", ""): 24}
"""Bounds of keys and an index of text, with budgets that rows grow over in the course of a test."""
WAYS = {"token": 9, "several": 3, "turn": 2, "taken back": 2, "interrupted": 2, "by others": 1}


class Unclean:
    """Sees that an index has not taken in what is not clean, from slot `clean` on: every set holds all of it."""

    clean = sets = 0

    def observe(self, layer: int, span: Any, q: Any, kv: Any, selection: Any, scale: float) -> None:
        if selection is not None and self.clean:
            unclean = torch.arange(self.clean, int(kv.rows.seq_lens[0]))
            assert all(torch.isin(unclean, ids).all() for ids in selection.ids[0])
            self.sets += 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_whatever_is_done_the_rule_is_the_same(policy: str, seed: int) -> None:
    """Which calls run tokens again and how many; what is clean is what dense attention leaves there."""
    numbers, model, cache, budget = random.Random(seed), tiny.llama(), DynamicCache(), POLICIES[policy]
    ids, fed, passes, rewritten, exact = tiny.prompt(20, seed=seed), list[int](), 0, 0, True
    watching, text = Unclean(), "lychee" in policy
    hook = model.get_decoder().layers[0].register_forward_pre_hook(lambda module, args: fed.append(args[0].shape[1]))
    spec = f"{policy},budget={budget},rectify={EVERY}"
    with saccade.sparsify(model, spec, tokenizer=LETTERS, observers=(watching,)) as run:
        model(ids, past_key_values=cache)
        clean = seen = 20
        for number in range(40):
            past, way = ids.shape[1], numbers.choices([*WAYS], [*WAYS.values()])[0]
            new = tiny.prompt({"several": numbers.randint(2, 3), "turn": 4, "by others": 2}.get(way, 1), seed=number)
            if way == "taken back":
                cache.crop(-2)
                ids, clean, seen = ids[:, :-2], min(clean, past - 2), min(seen, past - 2)
                continue
            if way == "by others":
                twin()(new, past_key_values=cache)
                ids, exact = torch.cat((ids, new), dim=1), exact and clean == past
                continue
            if seen < past:
                # What others have fed cannot be fed again: it counts as clean, with all below it.
                clean = past
            watching.clean = clean * text
            if way == "interrupted":
                in_layer(2, "mlp")(model, cache)
                continue
            with run.decoding() if way == "several" else nullcontext():
                logits = model(new, past_key_values=cache).logits
            ids = torch.cat((ids, new), dim=1)
            dense = way == "turn" or past - clean + new.shape[1] > EVERY
            again = past - clean if dense and past > budget else 0
            passes, rewritten = passes + (again > 0), rewritten + again
            clean, seen = ids.shape[1] if dense else clean, ids.shape[1]
            assert fed[-1] == new.shape[1] + again
            assert (run.stats().dense_passes, run.stats().rectifications) == (passes, rewritten)
            stock = twin()(ids)
            if exact and dense:
                torch.testing.assert_close(logits, stock.logits[:, past:], rtol=0, atol=1e-4)
            for layer, other in zip(cache.layers, stock.past_key_values.layers, strict=True) if exact else ():
                torch.testing.assert_close(layer.keys[:, :, :clean], other.keys[:, :, :clean], rtol=0, atol=1e-5)
        assert passes > 3 and watching.sets >= 20 * text
        watching.clean = 0
        ids = torch.cat((ids, tiny.prompt(5, seed=9)), dim=1)
        settings = {"do_sample": False, "max_new_tokens": 12, "attention_mask": torch.ones_like(ids)}
        second = model.generate(ids, past_key_values=cache, **settings)
        assert not exact or second.tolist() == model.generate(ids, **settings).tolist()
    hook.remove()
