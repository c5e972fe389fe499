"""A picture of what each policy's sets catch of dense attention, layer by layer: recall.png."""

from pathlib import Path
from pydoc_data.topics import topics  # the language reference, which comes with every Python

import matplotlib
from transformers import AutoModelForCausalLM, AutoTokenizer

import saccade
from saccade.checkpoints.bundled import model_path

matplotlib.use("agg")
import matplotlib.pyplot as plt

MODEL = model_path()  # or any folder or hub id; the layer below is the one that retrieves in this model
POLICIES = ["streaming", "quest", "tidal:reselect=7", "less_is_more:reselect=7", "exact_topk"]
BUDGET, PICTURE = 128, Path("recall.png")

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(MODEL)
pages = "\n\n".join(topics.values())[:6_000]
inputs = tokenizer(f"{pages}\n\nThe code of the amber falcon is", return_tensors="pt")

maps: list[list[float]] = []
for policy in POLICIES:
    chosen = saccade.Policy.from_spec(policy).with_budget(BUDGET)
    with saccade.sparsify(model, chosen, recall=True) as run:
        model.generate(**inputs, max_new_tokens=16, min_new_tokens=16, do_sample=False)
        stats = run.stats()
    # None where a layer's heads all attend to everything: there is no set that could miss anything.
    maps.append([float("nan") if layer.recall is None else layer.recall for layer in stats.layers])
    print(f"{chosen}: recall {stats.recall:.2f}, {stats.share_attended:.0%} of the cache attended")

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
image = axes.imshow(maps, vmin=0, vmax=1, cmap="viridis", aspect="auto")
axes.set_yticks(range(len(POLICIES)), POLICIES)
axes.set_xticks(range(len(maps[0])))
axes.set_xlabel("layer; white: all heads attend to everything")
axes.set_title(f"attention recall at a budget of {BUDGET} of {inputs['input_ids'].shape[1]} tokens")
figure.colorbar(image)
figure.savefig(PICTURE, dpi=150)
print(f"picture: {PICTURE}")
