"""Does vLLM run on this device, alone and with saccade's plugin? Exits with 0 if both do; 2 to 3 minutes.

    python3 benchmarks/gpu/vllm/smoke.py [--policy SPEC]

Two small engines of random weights, one after the other. Every request must get its tokens, all of the vocabulary;
sparse requests must leave cached tokens out, those that opt out must not. How many tokens equal stock's is printed
only: logits of random weights are nearly tied, and stock's kernel splits rows otherwise in CUDA graphs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

VOCABULARY, NEW = 32000, 32
LENGTHS = (600, 1500, 2500)
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
METRICS = "PROMETHEUS_MULTIPROC_DIR"


def skipped() -> float:
    """Cached tokens left out so far, summed over the engine's processes, which look a second after their last step."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    time.sleep(3)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=os.environ[METRICS])
    samples = [sample for family in registry.collect() for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == "saccade_tokens_skipped_total")


def decode(policy: str | None) -> dict[str, Any]:
    """What one engine answers; in a process of its own, so that the device is empty for the next."""
    from engines import engine, greedy, prompt

    llm = engine(SHAPE, policy, max_model_len=4096, max_num_seqs=8, gpu_memory_utilization=0.3)
    numbers = random.Random(0)
    prompts = [prompt(length, VOCABULARY, numbers) for length in LENGTHS]

    def answers(**extra: Any) -> list[list[int]]:
        outputs = llm.generate(prompts, greedy(NEW, **extra), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    found: dict[str, Any] = {"tokens": answers()}
    if policy:
        found["skipped"] = skipped()
        found["off"] = answers(extra_args={"saccade": "off"})
        found["skipped while off"] = skipped() - found["skipped"]
    return found


def apart(policy: str | None) -> dict[str, Any]:
    """`decode` in another process, whose words go to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        command = [sys.executable, __file__, "--answer", str(answer), "--policy", policy or ""]
        code = subprocess.run(command, env={**os.environ, METRICS: folder}, stdout=sys.stderr, check=False).returncode
        if not answer.is_file():
            sys.exit(f"smoke: the engine under {policy or 'no policy'} failed with {code}; its log is above")
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="less_is_more:budget=256,reselect=2")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        given.answer.write_text(json.dumps(decode(given.policy or None)))
        return
    stock, ours = apart(None), apart(given.policy)
    faults = []
    for name, rows in (("stock", stock["tokens"]), ("plugin", ours["tokens"]), ("plugin, off", ours["off"])):
        if [len(row) for row in rows] != [NEW] * len(LENGTHS) or not {*chain(*rows)} <= {*range(VOCABULARY)}:
            faults.append(f"{name}: not {NEW} tokens of the vocabulary for each of {len(LENGTHS)} requests")
        same = sum(a == b for a, b in zip(chain(*rows), chain(*stock["tokens"]), strict=False))
        print(f"{name}: {sum(map(len, rows))} tokens, {same} of them as stock's")
    print(f"left out under {given.policy}: {ours['skipped']:.0f} tokens; while off: {ours['skipped while off']:.0f}")
    if ours["skipped"] <= 0:
        faults.append("the plugin decoded nothing sparsely")
    if ours["skipped while off"]:
        faults.append("requests that opted out were decoded sparsely")
    for fault in faults:
        print(f"FAULT {fault}")
    print("smoke: failed" if faults else "smoke: ok")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
