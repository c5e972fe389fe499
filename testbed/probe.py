"""How well a model retrieves under dense attention: `python -m testbed.probe [--model DIR]`.

Contexts are held-out text, keys are held-out combinations, prompts are those of the evaluation. Seeds begin
at 1000: the demo's contexts are others.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from saccade.eval.document import language_reference
from saccade.eval.facts import Fact, hide, is_right, make_facts, question
from saccade.eval.interval import wilson

from . import model_path

FIRST_SEED = 1000


@dataclass(frozen=True)
class Context:
    """A text with facts in it, and what it is asked."""

    text: str
    prompts: tuple[str, ...]
    facts: tuple[Fact, ...]
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Answer:
    """What the model said, whether it is right and then stops, and where its attention lay."""

    text: str
    right: bool
    attention: Tensor | None


def reference_passage(tokenizer: PreTrainedTokenizerBase, tokens: int, rng: numpy.random.Generator) -> str:
    """A passage of the held-out reference text that has about `tokens` tokens."""
    text = language_reference(held_out=True)
    characters = int(tokens * 3.1)
    if characters > len(text):
        raise ValueError(f"the held-out text has fewer than {tokens} tokens")
    begin = int(rng.integers(0, len(text) - characters + 1))
    kept = tokenizer(text[begin : begin + characters], return_offsets_mapping=True)["offset_mapping"][:tokens]
    return text[begin : begin + kept[-1][1]]


def fact_context(tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int, hidden: int, asked: int) -> Context:
    """`hidden` facts in a passage, `tokens` tokens in all; `asked` of them are asked for."""
    rng = numpy.random.default_rng(seed)
    facts = make_facts(hidden, rng, "eval")
    text, spans = hide(reference_passage(tokenizer, tokens - 10 * hidden, rng), facts, rng)
    return Context(text, tuple(map(question, facts[:asked])), tuple(facts[:asked]), tuple(spans[:asked]))


def alias_context(tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int, chains: int, asked: int) -> Context:
    """Like `fact_context`, but a key is another key's alias, and that one has the value."""
    rng = numpy.random.default_rng(seed)
    facts = make_facts(2 * chains, rng, "eval")
    aliases = [Fact(f.key, f"the code of the {t.key}") for f, t in zip(facts[chains:], facts[:chains], strict=True)]
    text, spans = hide(reference_passage(tokenizer, tokens - 22 * chains, rng), [*facts[:chains], *aliases], rng)
    names = [Fact(a.key, t.value) for a, t in zip(aliases, facts[:chains], strict=True)][:asked]
    return Context(text, tuple(map(question, names)), tuple(names), tuple(spans[:asked]))


@torch.inference_mode()
def ask(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: Context, attention: bool) -> list[Answer]:
    """Prefill the context once, then answer each of its questions greedily.

    `attention` asks for the attention [layers, heads] that lies on the sentence with the answer.
    """
    encoded = tokenizer(context.text, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    cache = DynamicCache()
    model(torch.tensor([encoded["input_ids"]]), past_key_values=cache, logits_to_keep=1)
    length = len(encoded["input_ids"])
    answers = []
    for prompt, fact, (begin, end) in zip(context.prompts, context.facts, context.spans, strict=True):
        model.set_attn_implementation("eager" if attention else "sdpa")
        step = model(torch.tensor([tokenizer(prompt)["input_ids"]]), past_key_values=cache, output_attentions=attention)
        mass = None
        if attention:
            gold = torch.tensor([begin <= b and e <= end for b, e in offsets])
            mass = torch.stack([layer[0, :, -1, :length][:, gold].sum(-1) for layer in step.attentions])
        said: list[int] = []
        while len(said) < 5:
            said.append(int(step.logits[0, -1].argmax()))
            step = model(torch.tensor([[said[-1]]]), past_key_values=cache)
        cache.crop(length - cache.get_seq_length())
        model.set_attn_implementation("sdpa")
        text = str(tokenizer.decode(said))
        stops = re.match(r"\s*\d{4}(?!\d)\s*(\.|\n|$)", text) is not None
        answers.append(Answer(text, is_right(text, fact) and stops, mass))
    return answers


def probe(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], contexts: int, hidden: int = 40
) -> dict[str, dict[str, object]]:
    """Accuracy by task and length, with its interval and one wrong answer."""
    results: dict[str, dict[str, object]] = {}
    for task, make, size in (("facts", fact_context, hidden), ("alias", alias_context, 12)):
        for length in lengths:
            pairs = []
            for seed in range(FIRST_SEED, FIRST_SEED + contexts):
                context = make(tokenizer, length, seed, size, 12)
                pairs += list(zip(context.facts, ask(model, tokenizer, context, attention=False), strict=True))
            right = sum(answer.right for _, answer in pairs)
            wrong = next(((fact.value, answer.text) for fact, answer in pairs if not answer.right), None)
            results[f"{task} {length}"] = {
                "right": right, "of": len(pairs), "share": round(right / len(pairs), 3),
                "interval": wilson(right, len(pairs)), "wrong": wrong,
            }  # fmt: skip
    return results


def attention_mass(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int, contexts: int) -> Tensor:
    """Mean attention mass [layers, heads] on the sentence with the answer, at the last token of the question."""
    masses = []
    for seed in range(FIRST_SEED, FIRST_SEED + contexts):
        answers = ask(model, tokenizer, fact_context(tokenizer, length, seed, 40, 12), attention=True)
        masses += [answer.attention for answer in answers if answer.attention is not None]
    return torch.stack(masses).mean(0)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--attention", action="store_true", help="also print the attention mass on the answers")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    for name, result in probe(model, tokenizer, arguments.lengths, arguments.contexts).items():
        print(json.dumps({name: result}), flush=True)
    if arguments.attention:
        for layer, heads in enumerate(attention_mass(model, tokenizer, arguments.lengths[-1], 2).tolist()):
            print(f"layer {layer:2}: " + " ".join(f"{mass:.2f}" for mass in heads))


if __name__ == "__main__":
    main()
