"""What both of vLLM's model runners answer under policies that read text; exits with 1 if an engine fails.

    python3 benchmarks/gpu/vllm/runners.py [--policy SPEC ...]

The bundled model decodes real text in bfloat16: requests of many lengths one by one, then together, so that they come
and go. Runner V2 schedules asynchronously and keeps the tokens on the device; V1 does neither. The runners round
differently, so not all tokens are alike: compare with a policy that reads no text.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

POLICIES = ("lychee_cluster:budget=96", "quest:budget=96")
LENGTHS = (700, 130, 391, 64, 1033, 257, 900, 512, 2100, 300, 1500, 97)
NEW = 160
ROWS = 5
"""Requests that decode at once: fewer than there are, so that they take each other's places."""


Answers = dict[str, list[list[int]]]
"""Tokens of all requests, by how they were asked."""


def decode(policy: str, runner: str) -> Answers:
    """What one engine answers."""
    from engines import greedy
    from vllm import LLM

    from saccade.checkpoints.bundled import model_path
    from saccade.eval.document import language_reference

    settings = {} if runner == "V2" else {"async_scheduling": False}
    llm = LLM(
        model=str(model_path()),
        dtype="bfloat16",
        seed=0,
        attention_backend="CUSTOM",
        additional_config={"saccade": {"policy": policy}},
        max_model_len=4096,
        max_num_seqs=ROWS,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
        **settings,
    )
    config = llm.llm_engine.vllm_config
    assert config.use_v2_model_runner == (runner == "V2"), "vLLM chose another runner"
    assert config.scheduler_config.async_scheduling == (runner == "V2"), "vLLM schedules otherwise"
    ids = llm.get_tokenizer()(language_reference().evaluation, add_special_tokens=False)["input_ids"]
    starts = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    prompts = [{"prompt_token_ids": ids[start : start + length]} for start, length in zip(starts, LENGTHS, strict=True)]
    alone = [llm.generate([prompt], greedy(NEW), use_tqdm=False)[0] for prompt in prompts]
    together = llm.generate(prompts, greedy(NEW), use_tqdm=False)
    ways = {"one by one": alone, "together": together}
    return {way: [list(output.outputs[0].token_ids) for output in outputs] for way, outputs in ways.items()}


def apart(policy: str, runner: str) -> Answers:
    """`decode` in another process, whose words go to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        command = [sys.executable, __file__, "--policy", policy, "--runner", runner, "--answer", str(answer)]
        environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2"))}
        code = subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode
        if not answer.is_file():
            sys.exit(f"runners: {runner} under {policy} failed with {code}; its log is above")
        found: Answers = json.loads(answer.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--runner", choices=("V1", "V2"), help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        given.answer.write_text(json.dumps(decode(given.policy[0], given.runner)))
        return
    for policy in given.policy or POLICIES:
        one, other = apart(policy, "V2"), apart(policy, "V1")
        same = {way: sum(a == b for a, b in zip(one[way], other[way], strict=True)) for way in one}
        told = ", ".join(f"{count} {way}" for way, count in same.items())
        print(f"{policy}: of {len(LENGTHS)} requests of {NEW} tokens alike: {told}", flush=True)


if __name__ == "__main__":
    main()
