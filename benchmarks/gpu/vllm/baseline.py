"""Milliseconds per decoding step of vLLM, stock or with saccade's plugin, on random weights of a real model's shape.

    python3 benchmarks/gpu/vllm/baseline.py --shape llama8b --points 32768x1,131072x4 [--policy SPEC] [--out FILE.json]

A point is CONTEXTxBATCH: requests of so many cached tokens that decode greedily in one batch; 16xBATCH is the floor of
that batch, without attention to speak of. vLLM's DecodeBenchConnector fills stock's cache; the plugin refuses
connectors and prefills, as --prefill makes stock do. The engine runs as served: its own process, asynchronous
scheduling, CUDA graphs, no prefix cache. A step is the time between two rounds of outputs in which every request has
got a token; --warm of them do not count, the next --steps do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for the figures

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
}
TINY = {
    **LLAMA,
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SHAPES: dict[str, dict[str, Any]] = {"llama8b": LLAMA, "qwen30b": QWEN, "tiny": TINY}
FILLED = {
    "kv_connector": "DecodeBenchConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 1.0, "startup_fill": True},
}


def measure(llm: Any, context: int, batch: int, vocabulary: int, warm: int, steps: int, **more: Any) -> dict[str, Any]:
    """One batch, from its arrival to the last step that counts; times in ms.

    Raises:
        RuntimeError: the cache has no room for all requests at once.
    """
    from engines import greedy, prompt

    numbers = random.Random(batch * 7919 + context)
    core, rounds = llm.llm_engine, warm + steps + 2
    # Those that are prefilled first decode while the others are prefilled, and need more tokens.
    sampling = greedy(min(rounds + 64 * batch, 1000), **more)
    arrived = time.perf_counter()
    for row in range(batch):
        core.add_request(f"{context}x{batch}-{row}-{time.time_ns()}", prompt(context, vocabulary, numbers), sampling)
    held: dict[str, int] = {}
    ends: list[float] = []
    first = None
    while len(ends) < rounds:
        outputs = core.step()
        now = time.perf_counter()
        if not core.has_unfinished_requests():
            raise RuntimeError("requests ended before the measurement: the cache has no room for all at once")
        before = dict(held)
        held |= {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
        if len(held) < batch or not all(held.values()):
            continue
        if first is None:
            first = now - arrived
        elif all(count > before.get(name, 0) for name, count in held.items()):
            ends.append(now)
    longest = max(held.values())
    core.abort_request(list(held))
    while core.has_unfinished_requests():
        core.step()
    gaps = [1e3 * (end - begin) for begin, end in pairwise(ends[warm - 1 :])][:steps]
    ordered = sorted(gaps)
    return {
        "context": context,
        "batch": batch,
        "steps": len(gaps),
        "ms": statistics.fmean(gaps),
        "median": statistics.median(gaps),
        "p10": ordered[len(gaps) // 10],
        "p90": ordered[len(gaps) * 9 // 10],
        "max": ordered[-1],
        "seconds to first round": first,
        "longest answer": longest,
        "gaps": [round(gap, 3) for gap in gaps],
    }


def start(given: argparse.Namespace, points: list[tuple[int, int]]) -> Any:
    from engines import engine

    settings: dict[str, Any] = {
        "max_model_len": max(context for context, _ in points) + 1024,
        "max_num_seqs": max(batch for _, batch in points),
        "max_num_batched_tokens": given.chunk,
        "gpu_memory_utilization": given.memory,
    }
    if not given.policy and given.backend != "auto":
        settings["attention_backend"] = given.backend
    if not given.policy and not given.prefill:
        settings["kv_transfer_config"] = FILLED
    return engine(SHAPES[given.shape], given.policy, **{**settings, **json.loads(given.engine)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--points", default="16x1,32768x1", help="CONTEXTxBATCH, by commas; measured in this order")
    parser.add_argument("--policy", help="decode with saccade's plugin under this policy; without: stock vLLM")
    parser.add_argument("--prefill", action="store_true", help="prefill for stock, too")
    parser.add_argument("--warm", type=int, default=8, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=1, help="times that every point is measured")
    parser.add_argument("--memory", type=float, default=0.95, help="share of the device's memory for the engine")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of one prefill step")
    parser.add_argument("--backend", default="FLASH_ATTN", help="stock's attention backend; auto: vLLM's choice")
    parser.add_argument("--engine", default="{}", help="further arguments of vLLM's LLM, as JSON")
    parser.add_argument("--request", default="{}", help="further arguments of SamplingParams, as JSON")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    points = [(int(context), int(batch)) for context, batch in (one.split("x") for one in given.points.split(","))]
    began = time.perf_counter()
    llm = start(given, points)
    seconds = time.perf_counter() - began
    import vllm

    head = {
        "shape": given.shape,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "policy": given.policy or "stock",
        "cache": "prefilled" if given.policy or given.prefill else "filled",
        "start": seconds,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    shape, rows, more = SHAPES[given.shape], [], json.loads(given.request)
    # Keys and values of one token in all layers, 16-bit.
    token_bytes = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    for context, batch in points * given.repeat:
        name = f"{given.shape} {head['policy']} {context}x{batch}"
        try:
            row = measure(llm, context, batch, shape["vocab_size"], given.warm, given.steps, **more)
        except RuntimeError as error:
            print(f"{name}: not measured: {error}", flush=True)
            continue
        row["GB of cache read"] = token_bytes * (context + given.warm + given.steps / 2) * batch / 1e9
        rows.append(row)
        print(
            f"{name}: {row['ms']:.3f} ms a step (median {row['median']:.3f}, p10 {row['p10']:.3f}, "
            f"p90 {row['p90']:.3f}, max {row['max']:.1f}, {row['steps']} steps); cache {row['GB of cache read']:.3f} "
            f"GB; first round after {row['seconds to first round']:.1f} s",
            flush=True,
        )
        if given.out:
            given.out.write_text(json.dumps({**head, "points": rows}, indent=1))


if __name__ == "__main__":
    main()
