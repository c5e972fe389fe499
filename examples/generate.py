"""One line makes a loaded model sparse; `generate` is called as before."""

from pydoc_data.topics import topics  # the language reference, which comes with every Python

from transformers import AutoModelForCausalLM, AutoTokenizer

import saccade
from saccade.checkpoints.bundled import model_path

MODEL = model_path()  # or any folder or hub id; the layer below is the one that retrieves in this model
POLICY = "less_is_more:reselect=7,budget={}"

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(MODEL)

pages = "\n\n".join(topics.values())[:8_000]
prompt = (
    f"{pages[:4_000]}\nThe code of the amber falcon is 4821.\n{pages[4_000:]}\n\n"
    "Question: What is the code of the amber falcon?\nAnswer: The code of the amber falcon is"
)
inputs = tokenizer(prompt, return_tensors="pt")
length = inputs["input_ids"].shape[1]


def answer() -> str:
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(tokens[0, length:], skip_special_tokens=True)


print(f"prompt: {length} tokens")
dense = answer()
print("dense:", repr(dense))

with saccade.sparsify(model, POLICY.format(256)) as run:
    print("sparse:", repr(answer()))
    print(f"attended: {run.stats().share_attended:.0%} of the cache")

with saccade.sparsify(model, POLICY.format(4_096)):
    same = answer() == dense
print(f"with a budget above the context the text is the same: {same}")
