"""Whether models with random weights answer in vLLM under a policy what stock vLLM answers.

    python tests/acceptance/vllm_answers.py [--write] [NAME ...]

Of every model that `vllm_types.py` finds accepted two engines are started, in a process of their own: stock vLLM, and
saccade's own operations under a budget that covers every row. What stock vLLM cannot do is its own affair. `--write`
puts what became of each into docs/vllm.md at once, and leaves the others there as they are.
"""

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "serving")]
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}

import torch
import transformers
from engines import Engines, answers, core, greedy, prompts

from acceptance import model_types, vllm_types
from acceptance.model_types import ACCEPTED, NARROW, REFUSED, SIZES, WIDE
from saccade.adapters.vllm.cache_spec import SaccadeAttentionSpec
from saccade.adapters.vllm.server.serve import prepare
from saccade.adapters.vllm.worker.sparse import SparseRows
from saccade.checkpoints.bundled import model_path
from saccade.types import FULL

ONE, WRITE = "--one", "--write"
BEGIN = "<!-- begin: tests/acceptance/vllm_answers.py --write -->\n"
HEAD = "**Started on a CPU**, random weights, a budget that covers all rows, through saccade's own operations:\n\n"
SAME, CLOSE = "the same tokens", 1e-3
STEPS, LENGTHS = 16, (100, 17, 64)
LARGER: dict[str, Any] = {
    **SIZES,
    **{"vocab_size": 2048, "hidden_size": 128, "head_dim": 32, "initializer_range": 0.2, "rotary_dim": 16},
    **dict.fromkeys(model_types.WIDTHS, 128),
}
"""What vLLM's kernels on CPUs take, and the bundled tokenizer's ids."""


def told_of(name: str) -> str:
    """The comparison, in words."""
    outcome = vllm_types.outcome_of(name)
    if outcome.word != ACCEPTED:
        return str(outcome)
    config = vllm_types.config_of(name, WIDE if outcome.wide else NARROW, LARGER)
    _alternate(config.get_text_config(decoder=True))
    with tempfile.TemporaryDirectory() as folder:
        _save(config, Path(folder))
        args = prepare([*vllm_types.FLAGS, "--uds", f"{folder}/socket"], model=folder, policy=vllm_types.POLICY).args
        settings = {"model": folder, "max_model_len": WIDE, "language_model_only": True}
        return _compared(settings, {name: getattr(args, name) for name in ("attention_backend", "attention_config")})


def _alternate(text: Any) -> None:
    """Where layers with full attention are the most vLLM cuts them into several groups, as it does no published one."""
    kinds = getattr(text, "layer_types", None) or ()
    others = sorted({*kinds} - {FULL})
    apart = getattr(text, "per_layer_attributes", None)
    if others and not apart and "layer_types" in {field.name for field in dataclasses.fields(text)}:
        text.layer_types = [others[0], FULL] * (len(kinds) // 2)


def _save(config: Any, folder: Path) -> None:
    torch.manual_seed(0)
    made = getattr(transformers, config.architectures[0])
    made._from_config(config, experts_implementation="eager").save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((model_path() / file).read_bytes())


def _compared(settings: dict[str, Any], ours: dict[str, Any]) -> str:
    asked, engines = prompts(*LENGTHS), Engines()
    try:
        expected = answers(engines.stock(**settings), asked, greedy(STEPS))
        engines.close()
    except Exception as error:
        return f"stock vLLM fails, {model_types.said(error)}"
    # A row that the budget covers would go to vLLM's own kernels.
    SparseRows.covers = lambda rows, length: False  # type: ignore[method-assign]
    engine = engines.sparse(vllm_types.POLICY, **settings, **ours)
    groups = core(engine).scheduler.kv_cache_config.kv_cache_groups
    layers = sum(len(group.layer_names) for group in groups if isinstance(group.kv_cache_spec, SaccadeAttentionSpec))
    found = answers(engine, asked, greedy(STEPS))
    engines.close()
    if [one.tokens for one in found] != [one.tokens for one in expected]:
        return "other tokens than stock vLLM's"
    pairs = zip((p for one in found for p in one.logprobs), (p for one in expected for p in one.logprobs), strict=True)
    gap = max(abs(one - other) for one, other in pairs)
    return SAME if layers and gap < CLOSE else f"log-probabilities {gap:.0e} from stock vLLM's, {layers} layers ours"


def _ending(done: subprocess.CompletedProcess[str]) -> str:
    """What a process found, or the error that it ended with."""
    if not done.returncode:
        return done.stdout.strip().splitlines()[-1].rstrip(".")
    lines = [re.sub(r"^(\[rank\d\]: )+", "", line) for line in done.stderr.splitlines()]
    told = (line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line))
    error = next(told, f"the process ends with {done.returncode}")
    return " ".join(error.replace("saccade.errors.ServingError", REFUSED).split())[:200]


def listed(section: str) -> dict[str, str]:
    """What a section says became of each model."""
    lines = re.findall(r"^- (.*?): (`[\w.-]+`(?:, `[\w.-]+`)*)$", section, re.MULTILINE)
    return {name: told for told, models in lines for name in re.findall(r"`([\w.-]+)`", models)}


def _write(name: str, told: str) -> None:
    section = model_types.on_page(vllm_types.PAGE, BEGIN)
    found = dict(sorted({**listed(section), name: told.replace("`", "'")}.items()))
    made = BEGIN + HEAD + "\n".join(model_types.by_reason(found)) + "\n" + model_types.END
    model_types.write(made, vllm_types.PAGE, BEGIN)


def main(asked: list[str]) -> int:
    """Compare one, or print what becomes of several; 1 if any answered otherwise."""
    if asked[:1] == [ONE]:
        transformers.logging.set_verbosity_error()
        vllm_types.inspect_here()
        print(told_of(asked[1]))
        return 0
    names, found = [name for name in asked if name != WRITE], {}
    for name in names or vllm_types.names():
        done = subprocess.run([sys.executable, __file__, ONE, name], capture_output=True, text=True, check=False)
        found[name] = _ending(done)
        print(f"{name:<44}{found[name]}", flush=True)
        if WRITE in asked:
            _write(name, found[name])
    return int(any(told.startswith(("other tokens", "log-prob")) for told in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
