"""Whether two checkouts decode alike: tokens and counters of every policy on the bundled model, compared bit by bit.

    python tests/acceptance/same_tokens.py OUT.json             in each checkout's environment
    python tests/acceptance/same_tokens.py OUT.json EARLIER.json    and compares

It uses public names only, so that it also runs in a checkout from before a change (with PYTHONPATH=CHECKOUT/src).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import saccade

SPECS = (
    "dense",
    "streaming:budget=64",
    "quest:budget=64",
    "quest:budget=128,heads=query,page=8",
    "tidal:budget=64,reselect=5",
    "tidal:rule=top_p,top_p=0.9,budget=256,heads=query",
    "less_is_more:budget=64,reselect=5",
    "less_is_more:budget=96,rectify=8",
    "lychee_decode:roles=every:4,budget=64",
    "lychee_decode:roles=heads:0+2.1+5,page=4,rule=ratio,ratio=0.05",
    "lychee_cluster:budget=256",
    "lychee_cluster:budget=320,rectify=16,buffer=64",
    "resa:min_pages=4,ratio=0.05",
    "resa:min_pages=4,ratio=0.05,rectify=8:verify",
    "exact_topk:budget=64",
    "composed:scorer=page_bounds,rule=ratio,ratio=0.05,roles=layers:2+5,rectify=12",
    "composed:scorer=cluster,chunking=fixed,budget=256",
    "composed:rule=rank_union,budget=64,roles=every:3",
)
"""Every method, with the options that take another way through the code."""

NEW = 40


def prompts(tokenizer: Any) -> list[list[int]]:
    """Two rows of real text, one shorter, so that it is padded on the left."""
    text = "\n\n".join(topics[name] for name in sorted(topics)[:40])
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [ids[:1100], ids[2000:2930]]


def measured(model: Any, tokenizer: Any, spec: str) -> dict[str, Any]:
    rows = prompts(tokenizer)
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    with torch.inference_mode(), saccade.sparsify(model, spec, tokenizer=tokenizer) as run:
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        # A second turn on the same cache, as in a conversation.
        first = model(ids[1:, -200:], use_cache=True)
        with run.decoding():
            logits = model(ids[:1, :5], past_key_values=first.past_key_values, use_cache=True).logits
        stats = run.stats().to_dict()
    stats.pop("build_seconds")
    return {"tokens": made[:, width:].tolist(), "logits": logits.double().sum().item(), "stats": stats}


def main() -> None:
    torch.set_num_threads(1)
    folder = next(path.parent for path in Path(saccade.__file__).parent.rglob("model.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    results = {spec: measured(model, tokenizer, spec) for spec in SPECS}
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1))
    if len(sys.argv) > 2:
        earlier = json.loads(Path(sys.argv[2]).read_text())
        differ = [spec for spec in SPECS if json.loads(json.dumps(results[spec])) != earlier[spec]]
        sys.stdout.write(
            f"{len(SPECS) - len(differ)} of {len(SPECS)} policies alike{': ' * bool(differ)}{differ or ''}\n"
        )
        sys.exit(bool(differ))


if __name__ == "__main__":
    main()
