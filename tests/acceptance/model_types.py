"""Which text models of the installed transformers decode sparsely: a walk over all of them, each built tiny and random.

    python tests/acceptance/model_types.py [TYPE ...]
    python tests/acceptance/model_types.py --write

The second writes what it finds into docs/transformers.md; tests/adapters/test_model_types.py holds page and walk
together. A model is either refused by `sparsify` with the reason, or decodes under a budget above its context and
gives what it gives without saccade: the same tokens, and logits as near to float64 as its own. Whatever else happens
is a mistake of ours. What transformers itself cannot build, or cannot run, is listed with transformers' own words.
"""

import dataclasses
import inspect
import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from transformers.models.auto import modeling_auto

import saccade
from forcing import sparse_below_the_budget
from saccade.checkpoints.shape import shape_of
from saccade.types import FULL

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
BEGIN, END = "<!-- begin: tests/acceptance/model_types.py --write -->\n", "<!-- end -->\n"

ACCEPTED, REFUSED, NOT_BUILT, NOT_RUN, WRONG = "accepted", "refused", "not built", "not run", "WRONG"
FAMILIES = ("SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ")
"""Of transformers' tables, those of models that read or write text and are no causal language models."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
WIDTHS = ("intermediate_size", "dense_intermediate_size", "ffn_dim", "dff", "moe_intermediate_size")
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8},
    **{"num_key_value_heads": 2, "max_position_embeddings": 256, "is_decoder": True, "index_head_dim": 8},
    "vocab_size_per_layer_input": 64,
    # Weights so large that attention picks few tokens and the logits depend on it.
    **{"initializer_range": 0.3, "init_std": 0.3, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0},
    **{"attention_chunk_size": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(WIDTHS, 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 16),
}
"""Given to every type whose configuration has a field of that name."""

NARROW, WIDE = 8, 256
"""Sliding windows: narrower than the prompt, so that only full attention sees what lies before; or wide enough."""

SENSES = {
    **{"hidden_size": 32, "embed_dim": 32, "num_hidden_layers": 2, "depth": 2, "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_heads": 4, "image_size": 28, "patch_size": 14, "out_hidden_size": 32},
}
"""Given to what reads images or sounds."""

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
INDEXER = {f"indexer_{name}": 2 for name in ("n_heads", "budget", "compress_ratio")}
INDEXER |= {"indexer_kv_heads": 1, "indexer_head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
PLAIN = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
FURTHER: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**ROPE, "mrope_section": [1, 1, 2]}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    # No wider than a head.
    **{key: {"rotary_dim": 4} for key in ("codegen", "gptj")},
    # Above three layers that keep keys and values, three that read them.
    "gemma3n_text": {"num_kv_shared_layers": 3},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **PLAIN}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text"}},
    # As published: transformers' own defaults leave their other kinds of layer out.
    "bamba": {"attn_layer_indices": [1, 2, 4, 5], "num_hidden_layers": 6, **MAMBA},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", FULL, FULL] * 2, "num_hidden_layers": 6, **MAMBA},
    "lfm2": {"layer_types": ["conv", FULL, FULL] * 2, "num_hidden_layers": 6},
    "lfm2_moe": {"layer_types": ["conv", FULL, FULL] * 2, "num_hidden_layers": 6},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 2, "num_attention_heads": 4},
    },
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "minicpm3": {"num_key_value_heads": 4},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
}
"""What a type needs beside or instead of `SIZES`."""

ALONE, BESIDE = "full attention in every layer", "full attention beside "
"""How the page tells what accepted types consist of."""

PROMPT, NEW = 24, 8
SPEC = "less_is_more:budget={},dense_layers=1,reselect={}"
FEW_LAYERS = "exact_topk:budget={},dense_layers=0"
ABOVE, BELOW = 250, 6
"""Budgets: one that covers the context, and one that does not."""

MOST = 20_000_000
"""Weights that a random model may have; larger ones are looked at on the device meta only."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a type; `reason` in one line, empty where it is accepted; `others`: the
    kinds of layer that are left alone; `wide`: its windows must not be narrower than its positions."""

    word: str
    reason: str = ""
    others: str = ""
    wide: bool = False

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}" if self.reason else self.word


def causal() -> dict[str, str]:
    """The class of every type that `AutoModelForCausalLM` knows."""
    return dict(sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def others() -> list[str]:
    """Every further class of a model that reads or writes text."""
    tables = (getattr(modeling_auto, f"MODEL_FOR_{family}_MAPPING_NAMES", {}) for family in FAMILIES)
    return sorted({name for table in tables for name in table.values()} - set(causal().values()))


def outcome_of(kind: str) -> Outcome:
    """Walk one causal type."""
    return widened(lambda window: _with_windows(causal()[kind], kind, window))


def outcome_of_other(name: str) -> Outcome:
    """Walk a class that is no causal language model."""
    return widened(lambda window: _with_windows(name, "", window))


def widened(judged: Callable[[int], Outcome]) -> Outcome:
    """What became of a model with narrow windows and, where these leave nothing to a policy, with wide ones."""
    narrow = judged(NARROW)
    if narrow.word != REFUSED or not narrow.reason.startswith("none of its layers has full attention: sliding"):
        return narrow
    wide = judged(WIDE)
    return dataclasses.replace(wide, wide=True) if wide.word == ACCEPTED else wide


def _with_windows(name: str, kind: str, window: int) -> Outcome:
    """A class, tiny and random, or with transformers' own defaults and no weights if that is refused."""
    try:
        made = getattr(transformers, name)
        config, problem = tiny(made.config_class, kind or made.config_class.model_type, window), None
        on_meta = _without_weights(made, config)
    except Exception as error:
        problem = said(error)
        try:
            on_meta = _without_weights(made, made.config_class())
        except Exception:
            return Outcome(NOT_BUILT, problem)
    refused = _refused(on_meta)
    if refused is not None:
        return refused
    if problem is not None or sum(weight.numel() for weight in on_meta.parameters()) > MOST:
        return Outcome(WRONG if kind else NOT_RUN, f"accepted, but never built tiny: {problem or 'too large'}")
    return _run(made, config)


def tiny(config_class: Any, kind: str, window: int, sizes: Mapping[str, Any] = SIZES) -> Any:
    """A configuration as small as its type allows."""
    whole = config_class()
    if whole.get_text_config(decoder=True) is not whole:
        held = ((name, getattr(whole, name, None)) for name in whole.sub_configs)
        parts = {name: _part(part, window, sizes) for name, part in held if part is not None}
        return config_class(**{**parts, **FURTHER.get(kind, {})})
    fields, aliases = _fields(config_class), config_class.attribute_map
    given = {aliases.get(name, name): size for name, size in {**sizes, "sliding_window": window}.items()}
    others = sorted(set(getattr(config_class(), "layer_types", None) or ()) - {FULL})
    if others and "layer_types" in fields:
        # Of each kind some: transformers' own patterns have no layer with full attention among the first four.
        given |= {"layer_types": [others[0], FULL, FULL] * 2, "num_hidden_layers": 6}
    return config_class(**{**{name: size for name, size in given.items() if name in fields}, **FURTHER.get(kind, {})})


def _part(config: Any, window: int, sizes: Mapping[str, Any]) -> Any:
    """A tiny one of a part's kind: the decoder, or what reads images or sounds."""
    if config.model_type in causal() or config.model_type.endswith("_text"):
        return tiny(type(config), config.model_type, window, sizes)
    fields = _fields(type(config))
    return type(config)(**{name: size for name, size in SENSES.items() if name in fields})


def _fields(config_class: Any) -> set[str]:
    """What a configuration takes; those of transformers 4 are no dataclasses."""
    return {*inspect.signature(config_class).parameters}


def _without_weights(made: Any, config: Any) -> Any:
    with torch.device("meta"):
        return made(config).eval()


def _spec(model: Any, budget: int) -> str:
    """Publishes in the second and the fourth layer with full attention; where there are fewer, each chooses."""
    try:
        full = shape_of(model.config).full_layers
    except Exception:
        full = (0, 1, 2, 3)
    return SPEC.format(budget, full[3]) if len(full) > 3 else FEW_LAYERS.format(budget)


def _refused(model: Any) -> Outcome | None:
    """The refusal of `sparsify`, or what it raised instead; None if it accepts."""
    try:
        saccade.sparsify(model, _spec(model, ABOVE)).restore()
    except saccade.UnsupportedModelError as error:
        reason = str(error)
        return Outcome(WRONG if "\n" in reason else REFUSED, reason.partition(": ")[2])
    except Exception as error:
        return Outcome(WRONG, said(error))
    return None


def _run(made: Any, config: Any) -> Outcome:
    """Decode with and without saccade, and compare."""
    torch.manual_seed(0)
    # Since transformers 5.
    experts = {"experts_implementation": "eager"} if hasattr(config, "_experts_implementation") else {}
    attention = "sdpa" if made._supports_sdpa else "eager"
    model = made._from_config(config, attn_implementation=attention, **experts).eval()
    try:
        tokens, stock = _decoded(model)
    except Exception as error:
        return Outcome(NOT_BUILT, said(error))
    try:
        with sparse_below_the_budget(), saccade.sparsify(model, _spec(model, ABOVE)) as run:
            ours_tokens, ours = _decoded(model)
            steps = run.stats().steps
        with saccade.sparsify(model, _spec(model, BELOW)):
            _, sparse = _decoded(model, tokens)
    except saccade.UnsupportedModelError as error:
        return Outcome(REFUSED, str(error))
    except Exception as error:
        return Outcome(WRONG, said(error))
    _, exact = _decoded(model.double(), tokens)
    told = compare(tokens, ours_tokens, stock, ours, sparse, exact)
    if steps != NEW - 1:
        told.append(f"{steps} steps counted for {NEW - 1}")
    return Outcome(WRONG, "; ".join(told)) if told else Outcome(ACCEPTED, others=shape_of(config).other_kinds)


def compare(
    tokens: torch.Tensor,
    ours_tokens: torch.Tensor,
    stock: torch.Tensor,
    ours: torch.Tensor,
    sparse: torch.Tensor,
    exact: torch.Tensor,
) -> list[str]:
    """What is wrong with logits `[B, NEW, V]` of float32: stock's, ours, ours below the context; `exact` is float64.

    Both paths round as often, so ours may be as far from float64 as stock's is, and two bits more. A set below the
    context must show: else the model does not look at what it attends to, and equality says nothing.
    """
    budget = 4 * float((stock - exact).abs().max())
    error, change = float((ours - exact).abs().max()), float((sparse - exact).abs().max())
    told = []
    if not torch.equal(tokens, ours_tokens):
        told.append("other tokens than stock's")
    if not error <= budget:
        told.append(f"logits {error:.1e} from float64, stock's {budget / 4:.1e}")
    if not change > 100 * budget:
        told.append(f"a set of {BELOW} tokens changes logits by {change:.1e} only")
    return told


@torch.no_grad()
def _decoded(model: Any, forced: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens `[B, T]` of greedy `generate`, and the logits `[B, NEW, V]`; `forced` are fed instead if given."""
    ids = torch.randint(2, SIZES["vocab_size"], (2, PROMPT), generator=torch.Generator().manual_seed(1))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    fed = None if forced is None else lambda row, before: [int(forced[row, len(before)])]
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
        prefix_allowed_tokens_fn=fed,
    )
    return answer.sequences, torch.stack(answer.logits, dim=1)


def said(error: Exception) -> str:
    """An error's type and how its message begins, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:240]


def table(found: Mapping[str, Outcome], further: Mapping[str, Outcome]) -> str:
    """The section of the page, markers included."""
    return BEGIN + "\n".join(_lines(found, further)) + "\n" + END


def on_page(page: Path = PAGE, begin: str = BEGIN) -> str:
    """The section as the page has it."""
    text = page.read_text(encoding="utf-8")
    return begin + text.partition(begin)[2].partition(END)[0] + END


def write(made: str, page: Path = PAGE, begin: str = BEGIN) -> None:
    """Put a section into the page, in the place of what it has."""
    page.write_text(page.read_text(encoding="utf-8").replace(on_page(page, begin), made), encoding="utf-8")


def listed(section: str) -> dict[str, str]:
    """What a section says of every type, as `said_of`."""
    found = {}
    for line in section.splitlines():
        group = re.fullmatch(r"- (.*?): (`[\w.-]+`\*?(?:, `[\w.-]+`\*?)*)", line)
        for name, star in re.findall(r"`([\w.-]+)`(\*?)", group[2] if group else ""):
            reason = group[1] if group else ""
            kinds = reason.removeprefix(ALONE).removeprefix(BESIDE) if reason.startswith((ALONE, BESIDE)) else None
            found[name] = reason if kinds is None else f"{ACCEPTED}{star}{f' beside {kinds}' if kinds else ''}"
    return found


def said_of(outcome: Outcome) -> str:
    """What the page says of a type: that it is accepted, or why not; numbers are left out."""
    if outcome.word == ACCEPTED:
        return f"{ACCEPTED}{'*' * outcome.wide}{f' beside {outcome.others}' if outcome.others else ''}"
    reason = re.sub(r"=\S+(?=:)", "", outcome.reason.partition("; ")[0]).replace("`", "'")
    reason = re.sub(
        r"^found \d+ plain attention layers for \d+ ", "attention is plain in fewer or more than its ", reason
    )
    return re.sub(r"\[\d[\d, ]*\]|\b\d+(, \d+)*\b", "N", reason)


def _lines(found: Mapping[str, Outcome], further: Mapping[str, Outcome]) -> Iterator[str]:
    by_word: dict[str, dict[str, str]] = defaultdict(dict)
    for kind, outcome in found.items():
        by_word[outcome.word][kind] = said_of(outcome)
    yield f"transformers {transformers.__version__}, {len(found)} types of causal language models:\n"
    accepted, refused, not_built = by_word[ACCEPTED], by_word[REFUSED], by_word[NOT_BUILT]
    yield f"**Accepted, {len(accepted)}**, with * where no sliding window may be narrower than the model's positions:\n"
    yield from by_kinds(accepted)
    yield f"\n**Refused, {len(refused)}**, by the first reason:\n"
    yield from by_reason(refused)
    yield f"\n**Not built, {len(not_built)}**, for which transformers gives the reason:\n"
    yield from by_reason(not_built)
    yield f"\n**Others, {len(further)}** classes that read or write text (encoders, encoder-decoders, those of images"
    yield "or sound), with a prompt of text:\n"
    yield from by_kinds({name: said_of(one) for name, one in further.items() if one.word == ACCEPTED})
    unknown = [f"`{name}`" for name, one in further.items() if one.word == NOT_RUN]
    yield f"- accepted, but too large here to be run: {', '.join(unknown)}\n"
    words = [outcome.word for outcome in further.values()]
    refusals, failures = words.count(REFUSED), words.count(NOT_BUILT)
    yield f"{words.count(ACCEPTED)} are accepted, {refusals} refused, {failures} transformers does not build from"
    yield "defaults. The command prints each with its reason."


def by_kinds(found: Mapping[str, str]) -> Iterator[str]:
    """A line for every set of kinds that is left alone."""
    groups: dict[str, list[str]] = defaultdict(list)
    for kind, words in found.items():
        first, _, kinds = words.partition(" beside ")
        groups[f"{BESIDE}{kinds}" if kinds else ALONE].append(f"`{kind}`{first.removeprefix(ACCEPTED)}")
    yield from (f"- {kinds}: {', '.join(names)}" for kinds, names in sorted(groups.items()))


def by_reason(found: Mapping[str, str]) -> Iterator[str]:
    """A line for every reason."""
    groups: dict[str, list[str]] = defaultdict(list)
    for kind, reason in found.items():
        groups[reason].append(kind)
    yield from (f"- {reason}: " + ", ".join(f"`{kind}`" for kind in kinds) for reason, kinds in sorted(groups.items()))


def main(asked: list[str]) -> int:
    """Walk, print and, with `--write`, put the section into the page; 1 if anything went wrong."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    kinds = [name for name in asked if name != "--write"]
    found, further = {}, {}
    for kind in kinds or causal():
        found[kind] = outcome_of(kind)
        print(f"{kind:<32}{found[kind]}", flush=True)
    for name in () if kinds else others():
        further[name] = outcome_of_other(name)
        print(f"{name:<44}{further[name]}", flush=True)
    words = [outcome.word for outcome in (*found.values(), *further.values())]
    print(", ".join(f"{words.count(word)} {word}" for word in (ACCEPTED, REFUSED, NOT_BUILT, WRONG)))
    if "--write" in asked and not kinds and WRONG not in words:
        write(table(found, further))
    return int(WRONG in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
