"""Whether two checkouts decode alike: tokens and counters of every policy on the bundled model, compared bit by bit.

    python tests/acceptance/same_tokens.py OUT.json             in each checkout's environment
    python tests/acceptance/same_tokens.py OUT.json EARLIER.json    and compares
    python tests/acceptance/same_tokens.py --vllm OUT.json [EARLIER.json]    the same of vLLM's CPU build

It uses public names only, so that it also runs in a checkout from before a change (with PYTHONPATH=CHECKOUT/src).
"""

import gc
import json
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
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
    "tidal:rule=top_p,top_p=0.9,budget=256,heads=query,reselect=6",
    "less_is_more:budget=64,reselect=5",
    "less_is_more:budget=96,rectify=8,reselect=6",
    "lychee_decode:roles=every:4,budget=64",
    "lychee_decode:roles=heads:0+2.1+5,page=4,rule=ratio,ratio=0.05",
    "lychee_cluster:budget=256",
    "lychee_cluster:budget=320,rectify=16,buffer=64",
    "resa:min_pages=4,ratio=0.05",
    "resa:min_pages=4,ratio=0.05,rectify=8:verify",
    "exact_topk:budget=64",
    "composed:scorer=page_bounds,rule=ratio,ratio=0.05,roles=layers:2+5,rectify=12",
    "lychee_cluster:form=paper,chunking=fixed,budget=256",
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


def measured_by_vllm(model: Path, tokenizer: Any, spec: str) -> dict[str, Any]:
    """The same rows in one batch, their prompts in chunks; then a second turn, which finds the first in the cache."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    gc.collect()  # an engine ends as it is collected, and takes the groups of ranks with it
    before, rows = figures(), prompts(tokenizer)
    settings: dict[str, Any] = {
        **{"dtype": "float32", "enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 2**26},
        **{"max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 4, "async_scheduling": False},
        **{"attention_backend": "CUSTOM", "additional_config": {"saccade": {"policy": spec, "recall": 1.0}}},
    }
    engine = LLM(str(model), scheduler_cls="saccade.adapters.vllm.scheduler.RectifyingScheduler", **settings)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0)
    outputs = engine.generate([TokensPrompt(prompt_token_ids=ids) for ids in rows], params, use_tqdm=False)
    turn = [*rows[0], *outputs[0].outputs[0].token_ids, *rows[1][:100]]
    outputs += engine.generate(TokensPrompt(prompt_token_ids=turn), params, use_tqdm=False)
    engine.llm_engine.engine_core.shutdown()
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [output.outputs[0].cumulative_logprob for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "figures": {name: round(now - before.get(name, 0), 4) for name, now in figures().items()},
    }


def figures() -> dict[str, float]:
    """What vLLM's `/metrics` would show of saccade: sums since this process has started."""
    from prometheus_client import CollectorRegistry, multiprocess

    families = multiprocess.MultiProcessCollector(CollectorRegistry()).collect()
    samples = [sample for family in families for sample in family.samples if not sample.labels]
    return {one.name: one.value for one in samples if one.name.startswith("saccade_") and "share" not in one.name}


def by_transformers(folder: Path, tokenizer: Any) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return {spec: measured(model, tokenizer, spec) for spec in SPECS}


def by_vllm(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Less what it refuses. One process, which has to know of the metrics' folder before vLLM is imported."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with TemporaryDirectory() as os.environ["PROMETHEUS_MULTIPROC_DIR"]:
        return {spec: measured_by_vllm(folder, tokenizer, spec) for spec in SPECS if "verify" not in spec}


def main() -> None:
    torch.set_num_threads(1)
    by, given = (by_vllm, sys.argv[2:]) if sys.argv[1] == "--vllm" else (by_transformers, sys.argv[1:])
    folder = next(path.parent for path in Path(saccade.__file__).parent.rglob("model.safetensors"))
    results = by(folder, AutoTokenizer.from_pretrained(folder))
    Path(given[0]).write_text(json.dumps(results, indent=1))
    if len(given) > 1:
        earlier = json.loads(Path(given[1]).read_text())
        differ = [spec for spec in results if json.loads(json.dumps(results[spec])) != earlier.get(spec)]
        sys.stdout.write(
            f"{len(results) - len(differ)} of {len(results)} policies alike{': ' * bool(differ)}{differ or ''}\n"
        )
        sys.exit(bool(differ))


if __name__ == "__main__":
    main()
