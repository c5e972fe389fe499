"""Is verified greedy text that of the stock model? `python check_verify.py [TOKENS [FILE.json]]`; exits 1 if not.

Every policy at its smallest legal budget under `rectify=4:verify`, on the bundled model in float32, after 1,024 tokens
of the built-in text, greedy with a repetition penalty. Prints what drafting gained: the share of drafts that stood and
tokens per dense pass.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import saccade
from saccade.checkpoints.bundled import model_path
from saccade.eval.context import built_in_contexts
from saccade.recipes.machine import environment

EVERY = 4
SPECS = (
    "streaming:budget=5",
    "quest:budget=16",
    "tidal:reselect=7,budget=1",
    "less_is_more:reselect=7,budget=6",
    "exact_topk:budget=1",
    "lychee_decode:roles=layers:0+2+7,budget=1",
    f"lychee_cluster:budget={48 + EVERY}",
    "resa:ratio=0.001,min_pages=1",
    "token_clusters:budget=32",
)


@torch.inference_mode()
def main() -> int:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    context = next(iter(built_in_contexts(tokenizer, length=1024, limit=1, positions=32768, seed=7)))
    prompt = torch.tensor([context.tokens])
    # Plain greedy text of so small a model repeats a line for ever; the penalty keeps it moving, in both runs alike.
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "repetition_penalty": 1.1}
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(**inputs, **options)[0, prompt.shape[1] :].tolist()
    print(f"{len(expected)} tokens, {len(set(expected))} different ones")
    wrong, rows = 0, []
    for spec in SPECS:
        with saccade.sparsify(model, f"{spec},rectify={EVERY}:verify", tokenizer=tokenizer) as run:
            found = model.generate(**inputs, **options)[0, prompt.shape[1] :].tolist()
            stats = run.stats()
        same = next((at for at, pair in enumerate(zip(found, expected, strict=True)) if len(set(pair)) > 1), tokens)
        wrong += same < tokens
        rows.append({"policy": spec, "equal": same, **stats.to_dict()})
        gain = f"{stats.acceptance_rate:.3f} of drafts stood, {stats.tokens_per_dense_pass:.2f} tokens per dense pass"
        print(f"{'ok    ' if same == tokens else 'FAILED'} {spec}: {same} of {tokens} tokens equal; {gain}", flush=True)
    if len(sys.argv) > 2:
        where = environment(threads=1, dtype=torch.float32, device=torch.device("cpu"))
        found = {"tokens": tokens, "every": EVERY, "rows": rows, "environment": where}
        Path(sys.argv[2]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
