"""Do both of vLLM's model runners give the same tokens under policies that read text? Exits with 0 if they do.

    python3 benchmarks/gpu/vllm/runners.py [--policy SPEC ...]

The bundled model decodes real text, requests of many lengths that come and go. Runner V2 schedules asynchronously and
keeps the tokens on the device; V1 does neither. Their kernels are the same, so that every token must be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

POLICIES = (
    "lychee_cluster:budget=96",
    "lychee_cluster:budget=256,replant=16",
    "composed:scorer=page_bounds,budget=96,chunking=text",
)
LENGTHS = (700, 130, 391, 64, 1033, 257, 900, 512, 2100, 300, 1500, 97)
NEW = 160
ROWS = 5
"""Requests that decode at once: fewer than there are, so that they take each other's places."""


def decode(policy: str, runner: str) -> list[list[int]]:
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
    outputs = llm.generate(prompts, greedy(NEW), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def apart(policy: str, runner: str) -> list[list[int]]:
    """`decode` in another process, whose words go to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        command = [sys.executable, __file__, "--policy", policy, "--runner", runner, "--answer", str(answer)]
        environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2"))}
        code = subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode
        if not answer.is_file():
            sys.exit(f"runners: {runner} under {policy} failed with {code}; its log is above")
        found: list[list[int]] = json.loads(answer.read_text())
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
    differ = 0
    for policy in given.policy or POLICIES:
        one, other = apart(policy, "V2"), apart(policy, "V1")
        same = sum(a == b for a, b in zip(one, other, strict=True))
        differ += len(one) - same
        print(f"{policy}: {same} of {len(one)} requests of {NEW} tokens alike", flush=True)
    print("runners: differ" if differ else "runners: ok")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
