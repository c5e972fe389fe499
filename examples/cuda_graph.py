"""A decoding step as one CUDA graph. Without a CUDA device: one line, and exit status 3."""

import sys
from pydoc_data.topics import topics  # the language reference, which comes with every Python

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache

import saccade
from saccade.adapters.hf.graph import GraphedStep
from saccade.checkpoints.bundled import model_path

MODEL = model_path()  # or any folder or hub id; the layer below is the one that retrieves in this model
POLICY, NEW, NO_DEVICE = "tidal:reselect=7,budget=256", 32, 3

if not torch.cuda.is_available():
    print("no CUDA device: torch finds none on this machine, so no step was captured")
    sys.exit(NO_DEVICE)

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").cuda()
tokenizer = AutoTokenizer.from_pretrained(MODEL)
pages = "\n\n".join(topics.values())[:8_000]
prompt = (
    f"{pages[:4_000]}\nThe code of the amber falcon is 4821.\n{pages[4_000:]}\n\n"
    "Question: What is the code of the amber falcon?\nAnswer: The code of the amber falcon is"
)
ids = tokenizer(prompt, return_tensors="pt")["input_ids"].cuda()


@torch.inference_mode()
def decode(run: saccade.Run, graphed: bool) -> list[int]:
    # A step costs the same at every length: shapes follow from the capacity, so give no more than the text needs.
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + NEW)
    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
    step = GraphedStep(run, cache) if graphed else None
    told = [token]
    for _ in range(NEW - 1):
        if step is None:
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        else:
            token = step.step(token).argmax(-1, keepdim=True)
        told.append(token)  # stays on the device: nothing in the loop waits for it
    return [int(one) for one in told]


with saccade.sparsify(model, POLICY) as run:
    graphed, called = decode(run, graphed=True), decode(run, graphed=False)
    print("graph:", repr(tokenizer.decode(graphed)))
    print(f"calls give the same {NEW} tokens: {graphed == called}")
    print(f"attended: {run.stats().share_attended:.0%} of the cache")
