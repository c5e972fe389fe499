"""From calibration to a recipe beside the model, which `auto` takes from then on."""

import shutil
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import saccade
from saccade.checkpoints.bundled import model_path

# A copy of the bundled model without its recipe; take your own folder instead.
MODEL = Path("model")
if not MODEL.exists():
    shutil.copytree(model_path(), MODEL, ignore=shutil.ignore_patterns("saccade.json"))

# Every layer is tried as the one that selects again. The bundled model finds facts, so it is asked for facts; without a
# task nothing is asked, and any texts do. In earnest take more and longer ones: docs/calibration.md.
settings = {
    "model": MODEL,
    "task": "kv",
    "context": 1024,
    "questions": 12,
    "budgets": 64,
    "dtype": "float32",
    "recipe": MODEL / "saccade.json",
    "output-dir": "results/layers",
}
options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
subprocess.run([sys.executable, "-m", "saccade", "calibrate", "layers", *options], check=True)

recipe = saccade.Recipe.read(MODEL / "saccade.json")
print(f"recipe: {recipe.policy}, layers that select again: {recipe.reselect}")

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(MODEL)
fact = "The code of the amber falcon is"
prompt = f"{'Snow fell on the hills. ' * 60}{fact} 4821. {'Rain fell on the sea. ' * 60}\n\n{fact}"
inputs = tokenizer(prompt, return_tensors="pt")
with saccade.sparsify(model, "auto") as run:
    tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    print(f"auto: {run.policy}, answers {tokenizer.decode(tokens)!r}")
