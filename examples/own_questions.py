"""Questions of your own under several policies; a line of the file is a text, a question and its answer.

The columns are those of kvpress' evaluation: context, question, answer_prefix, answer, max_new_tokens.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import saccade
from saccade.checkpoints.bundled import model_path

MODEL = model_path()  # or any folder or hub id; the layer below is the one that retrieves in this model
POLICIES = ["dense", "streaming:budget=64", "quest:budget=64", "tidal:reselect=7,budget=64"]
FILE = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".jsonl")

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(MODEL)
lines = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines() if line.strip()]


def ids(text: str, special: bool = False) -> torch.Tensor:
    return tokenizer(text, add_special_tokens=special, return_tensors="pt")["input_ids"]


@torch.inference_mode()
def read(text: str) -> DynamicCache:
    """A text, read once and densely, as prompts are; every policy then decodes on the same cache."""
    cache = DynamicCache(config=model.config)
    model(ids(text, special=True), past_key_values=cache)
    return cache


@torch.inference_mode()
def answer(line: dict[str, Any], cache: DynamicCache) -> str:
    """What the model says; then the cache is again as it was."""
    before, told = cache.get_seq_length(), list[int]()
    logits = model(ids(line["question"] + line["answer_prefix"]), past_key_values=cache).logits
    while len(told) < line["max_new_tokens"] and (token := int(logits[0, -1].argmax())) != tokenizer.eos_token_id:
        told.append(token)
        logits = model(torch.tensor([[token]]), past_key_values=cache).logits
    cache.crop(before - cache.get_seq_length())
    return tokenizer.decode(told)


caches = {text: read(text) for text in {line["context"] for line in lines}}
for policy in POLICIES:
    # Inside of `decoding` every token is sparse, also those of the question, which come in one call.
    with saccade.sparsify(model, policy) as run, run.decoding():
        right = sum(line["answer"] in answer(line, caches[line["context"]]) for line in lines)
    print(f"{policy}: {right} of {len(lines)} right, {run.stats().share_attended:.0%} of the cache attended")
