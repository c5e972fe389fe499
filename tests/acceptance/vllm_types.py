"""Which models of the installed transformers the plugin takes in the installed vLLM: a walk over their configurations.

    python tests/acceptance/vllm_types.py [NAME ...]
    python tests/acceptance/vllm_types.py --write

A type of causal language models goes by its type, any other model that reads images and text by its class. Of each a
tiny configuration is given to `saccade serve`'s own checks, which make vLLM's configuration from it; the model itself
is built by vllm_answers.py alone. The second writes docs/vllm.md, with what docs/transformers.md says of the
same; it needs torchvision, without which vLLM knows few models that read images.
"""

import os
import re
import sys
import tempfile
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_CPU_KVCACHE_SPACE": "1024"}

import transformers
import vllm
from transformers.models.auto import modeling_auto
from vllm.model_executor.models import registry

from acceptance import model_types
from acceptance.model_types import ACCEPTED, END, NOT_BUILT, NOT_RUN, REFUSED, SIZES, Outcome
from saccade.adapters.vllm.server.serve import RefusedError, prepare
from saccade.checkpoints.shape import shape_of
from saccade.errors import SaccadeError

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
BEGIN = "<!-- begin: tests/acceptance/vllm_types.py --write -->\n"
THEIRS, QUOTE = "vLLM's own obstacle", "vLLM: "
BOTH, HERE_ONLY, THERE_ONLY, NEITHER = "In both", "In vLLM only", "In transformers only", "In neither"
UNJUDGED = "Not judged"
GROUPS = {
    BOTH: "by kinds of layers",
    HERE_ONLY: "by what is against transformers",
    THERE_ONLY: "by what is against vLLM",
    NEITHER: "by what is against vLLM",
    UNJUDGED: "and why",
}
FLAGS = ("--load-format", "dummy", "--skip-tokenizer-init", "--language-model-only")
"""Nothing but the configuration is at hand."""

AT_FIRST = "vLLM looks at the checkpoint's image processor first, which no configuration describes"
UNLISTED = "refused or not built there"
POLICY = "exact_topk:budget=250,dense_layers=0"
"""Fits every model that any policy fits, and covers every row of the walk."""


@dataclass(frozen=True)
class Told:
    """What the page says of a model: in which group, on which line, and marked how."""

    group: str
    line: str
    marks: str = ""


def names() -> dict[str, str]:
    """Classes, by type if they are causal language models, else by their own name."""
    images = set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()) - set(model_types.causal().values())
    return {**model_types.causal(), **{name: name for name in sorted(images)}}


def outcome_of(name: str) -> Outcome:
    """Let `saccade serve` judge a model, with narrow windows and, where these leave nothing to a policy, wide ones."""
    return model_types.widened(lambda window: _with_windows(name, window))


def _with_windows(name: str, window: int) -> Outcome:
    try:
        config = config_of(name, window, SIZES)
    except Exception as error:
        return Outcome(NOT_BUILT, model_types.said(error))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        try:
            prepare([*FLAGS, "--uds", f"{folder}/socket"], model=folder, policy=POLICY)
        except RefusedError as refused:
            reason = refused.reasons[0]
            if refused.__cause__ is None or isinstance(refused.__cause__, SaccadeError):
                return Outcome(REFUSED, reason)
            if _of_ours(refused.__cause__):
                raise
            return Outcome(NOT_RUN, AT_FIRST) if "processor" in reason else Outcome(THEIRS, _quoted(name, reason))
    return Outcome(ACCEPTED, others=shape_of(config).other_kinds)


def _of_ours(error: BaseException) -> bool:
    """Whether no vLLM stands between our last frame and an error: then it is no obstacle of vLLM's."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    last = max((place for place, file in enumerate(files) if "/src/saccade/" in file), default=len(files))
    return not any(file.startswith(f"{vllm.__path__[0]}/") for file in files[last:])


def config_of(name: str, window: int, sizes: Mapping[str, Any]) -> Any:
    """A model's configuration, tiny if its type allows."""
    made = getattr(transformers, names()[name])
    kind = name if name in model_types.causal() else made.config_class.model_type
    try:
        config = model_types.tiny(made.config_class, kind, window, sizes)
    except Exception:
        config = made.config_class()
    config.architectures = [made.__name__]
    return config


def _quoted(name: str, said: str) -> str:
    """How vLLM's words begin; where it points to its log, what is written there."""
    if "failed to be inspected" in said:
        try:
            registry.ModelRegistry.models[names()[name]].load_model_cls()
        except Exception as error:
            said = model_types.said(error)
    first = re.split(r"(?<=[a-z)\]])[.!?](?: |$)", said)[0]
    return re.sub(r" \['?\w+'?\]|(?<=architecture )\w+ ", " ", first).replace("  ", " ").strip()[:160]


def inspect_here() -> None:
    """vLLM starts a process for every class that it looks at, for fear of CUDA; the walk imports all into this one."""
    registry._run_in_subprocess = lambda look: look()


@cache
def _in_transformers() -> dict[str, str]:
    return model_types.listed(model_types.on_page())


def told_of(name: str, outcome: Outcome) -> Told:
    """What the page says of a model that the walk found to be so."""
    there = _in_transformers().get(name, UNLISTED)
    if outcome.word != ACCEPTED:
        group = THERE_ONLY if there.startswith(ACCEPTED) else NEITHER
        reason = model_types.said_of(outcome)
        return Told(
            UNJUDGED if outcome.word in (NOT_RUN, NOT_BUILT) else group, QUOTE * (outcome.word == THEIRS) + reason
        )
    marks = "*" * outcome.wide + "†" * (names()[name] not in registry.ModelRegistry.models)
    if not there.startswith(ACCEPTED):
        return Told(HERE_ONLY, there, marks)
    line = f"{model_types.BESIDE}{outcome.others}" if outcome.others else model_types.ALONE
    return Told(BOTH, line, marks)


def table(told: Mapping[str, Told]) -> str:
    """The section of the page, markers included."""
    return BEGIN + "\n".join(_lines(told)) + "\n" + END


def listed(section: str) -> dict[str, Told]:
    """What a section says of every model."""
    found, group = {}, ""
    for line in section.splitlines():
        heading = re.match(r"\*\*(.*), \d+\*\*", line)
        group = heading[1] if heading else group
        entry = re.fullmatch(r"- (.*?): (`[\w.-]+`[*†]*(?:, `[\w.-]+`[*†]*)*)", line)
        for name, marks in re.findall(r"`([\w.-]+)`([*†]*)", entry[2] if entry else ""):
            found[name] = Told(group, entry[1] if entry else "", marks)
    return found


def _lines(told: Mapping[str, Told]) -> Iterator[str]:
    version = vllm.__version__.partition("+")[0]
    yield f"**vLLM {version} and transformers {transformers.__version__}**: what `saccade serve` says of a tiny"
    yield "configuration of every causal type, and every other class that reads images, and what"
    yield "[transformers](transformers.md#which-models) does. With † vLLM has no model of its own and runs"
    yield "transformers' code; with * no sliding window may be narrower than the longest row."
    for group, by in GROUPS.items():
        lines: dict[str, list[str]] = defaultdict(list)
        for name, one in told.items():
            if one.group == group:
                lines[one.line].append(f"`{name}`{one.marks}")
        yield f"\n**{group}, {sum(map(len, lines.values()))}**, {by}:\n"
        yield from (f"- {line}: {', '.join(models)}" for line, models in sorted(lines.items()))


def main(asked: list[str]) -> int:
    """Walk, print and, with `--write`, put the section into the page."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    inspect_here()
    chosen, write = [name for name in asked if name != "--write"], "--write" in asked
    told = {}
    for name in chosen or names():
        outcome = outcome_of(name)
        told[name] = told_of(name, outcome)
        print(f"{name:<44}{outcome} | {told[name].group}{told[name].marks}", flush=True)
    if write and not chosen:
        model_types.write(table(told), PAGE, BEGIN)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
