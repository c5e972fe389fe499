"""A chat of several turns over one text: the cache is kept, so that a turn reads only what is new."""

from pydoc_data.topics import topics  # the language reference, which comes with every Python

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import saccade
from saccade.checkpoints.bundled import model_path

MODEL = model_path()  # or any folder or hub id; the layer below is the one that retrieves in this model
# What sparse steps wrote stays in the cache of a chat; `rectify` makes it good.
POLICY = "tidal:reselect=7,budget=256,rectify=32"

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(MODEL)

codes = {"amber falcon": 4821, "quiet harbor": 1573, "silver lantern": 6308}
pages = "\n\n".join(topics.values())
text = ""
for place, (name, code) in enumerate(codes.items()):
    text += f"{pages[2_500 * place :][:2_500]}\nThe code of the {name} is {code}.\n"


def turn(said: torch.Tensor, cache: DynamicCache, words: str) -> torch.Tensor:
    """All that was said so far, with these words and the answer to them behind it."""
    new = tokenizer(words, return_tensors="pt")["input_ids"]
    said = torch.cat([said, new], dim=1)
    kept, length = cache.get_seq_length(), said.shape[1]
    # generate feeds what the cache does not hold yet: the new words, densely, then its own tokens, sparsely.
    said = model.generate(
        said, past_key_values=cache, max_new_tokens=8, do_sample=False, stop_strings=".", tokenizer=tokenizer
    )
    print(f"{kept} tokens kept, {length - kept} read:{tokenizer.decode(said[0, length:], skip_special_tokens=True)}")
    return said


with saccade.sparsify(model, POLICY) as run:
    said, cache = torch.empty((1, 0), dtype=torch.int64), DynamicCache(config=model.config)
    for name in codes:
        question = f"\n\nQuestion: What is the code of the {name}?\nAnswer: The code of the {name} is"
        said = turn(said, cache, question if cache.get_seq_length() else text + question)
    print(f"attended: {run.stats().share_attended:.0%} of the cache")
