"""What a lossless engine is started with, and what it cannot serve: the policy drafts, and vLLM verifies densely."""

import json
from collections.abc import Iterator
from typing import Any

from ...checkpoints.unsupported import mixed_kinds
from ...types import FULL, SLIDING
from .options import CAPTURED, ServeOptions

WORKER = "saccade.adapters.vllm.worker.lossless.LosslessWorker"
"""What `--worker-cls` is given."""

ADAPTIVE = "saccade.adapters.vllm.scheduler.AdaptiveScheduler"
"""What `--scheduler-cls` is given, unless there are always as many drafts."""

BY_BATCH = "num_speculative_tokens_per_batch_size"
"""What `--speculative-config` has where the number of drafts adapts: vLLM captures all that it names."""

BY_CHANCE = "synthetic"
"""vLLM's name of a sampler whose answers are nobody's."""


def lengths(most: int) -> tuple[int, ...]:
    """How many tokens a row may draft before a dense pass, where that adapts: 0, 1, 3, 7 … up to the most.

    With its certain token a row then verifies 1, 2, 4, 8 …, of which vLLM's sizes of graphs are multiples: with other
    numbers it would not find graphs that exist.
    """
    return tuple(2**power - 1 for power in range((most + 1).bit_length()))


def rows_with_graphs(most: int) -> int:
    """As many as have full graphs of all lengths, at least one a length; vLLM's own 1,024 leave drafts no room."""
    *fewer, largest = lengths(most)
    return 4 * max(CAPTURED // (largest + 1) // 4, len(fewer) // 4 + 1)


def speculation(model: str, drafts: int, *, fixed: bool = False) -> dict[str, Any]:
    """What `--speculative-config` is given: slots for so many drafts a row, of a model that is not loaded again.

    Where their number adapts, batches of 1, 2, 3 … rows stand for one length each, so that all get graphs; none at
    all stands for the largest, whose rows are then a size of their own.
    """
    none, *some = lengths(drafts)
    told = {"method": "draft_model", "model": model, "num_speculative_tokens": drafts if fixed else some[-1]}
    told |= {"draft_sample_method": "probabilistic"}
    sizes = [[rows, rows, length] for rows, length in enumerate((*some, none), 1)]
    return told if fixed else {**told, BY_BATCH: sizes}


def unmet_by_drafts(vllm_config: Any, options: ServeOptions) -> Iterator[str]:
    """What an engine lacks to draft so many tokens and verify them, a line each to be read behind the option.

    What is said under every policy (KV connectors, pipeline and context parallelism, micro-batches) is not repeated.
    """
    model, parallel, scheduling = vllm_config.model_config, vllm_config.parallel_config, vllm_config.scheduler_config
    given = vllm_config.speculative_config
    fixed = given is not None and given.method == "draft_model" and getattr(given, BY_BATCH) is None
    wanted = speculation(str(model.model), options.drafts, fixed=fixed)
    found, drafts = {name: getattr(given, name, None) for name in wanted}, wanted["num_speculative_tokens"]
    found |= {} if fixed else {BY_BATCH: [list(one) for one in found[BY_BATCH] or ()]}
    found |= {"draft_sample_method": wanted["draft_sample_method"]}  # whichever: vLLM's sampler is told
    plain = given is not None and given.rejection_sample_method in ("standard", BY_CHANCE)
    if found != wanted or not plain:
        yield f"needs --speculative-config '{json.dumps(wanted)}', as it stands here"
    if parallel.worker_cls != WORKER:
        yield f"needs --worker-cls {WORKER}"
    if not vllm_config.use_v2_model_runner:
        yield "needs vLLM's model runner V2, which VLLM_USE_V2_MODEL_RUNNER=0 and a vLLM without Triton rule out"
    chosen, rows = scheduling.get_scheduler_cls(), scheduling.max_num_seqs
    if getattr(chosen, "adapts", False) == fixed or getattr(chosen, "rectifies", False):
        yield "needs vLLM's own scheduler: leave out --scheduler-cls" if fixed else f"needs --scheduler-cls {ADAPTIVE}"
    if not fixed and rows < len(wanted[BY_BATCH]):
        captured = f"vLLM captures one length ({', '.join(map(str, lengths(drafts)))}) for each number of rows"
        yield f"needs --max-num-seqs {len(wanted[BY_BATCH])} or more: {captured}"
    if gone := sorted({*mixed_kinds(model.hf_text_config, model.max_model_len)} - {FULL, SLIDING}):
        yield f"drafts tokens that may be rejected, and layers of type {', '.join(gone)} would not forget them"
    if model.uses_mrope or model.is_multimodal_model or model.enable_prompt_embeds:
        yield "drafts from token ids at plain positions: no M-RoPE, no images or audio, no --enable-prompt-embeds"
    if vllm_config.lora_config is not None:
        yield "drafts without adapters: leave out --enable-lora"
    if parallel.data_parallel_size > 1 or parallel.enable_eplb:
        yield "drafts on one replica alone: leave out --data-parallel-size and --enable-eplb"
    if vllm_config.watermark_config is not None:
        yield "drafts without a watermark: leave out --watermark-config"
    if 0 < scheduling.long_prefill_token_threshold <= drafts:
        yield f"verifies {drafts + 1} tokens at once, which --long-prefill-token-threshold would cut in two"
    limits = scheduling.max_num_batched_tokens, scheduling.max_num_scheduled_tokens
    tokens = min(limit for limit in limits if limit is not None)
    # Beside its draft model's own first token vLLM counts one more for each row.
    if (drafts + 2) * rows > tokens:
        told = f"verifies {drafts + 1} tokens of each of {rows} rows, counted as {drafts + 2}, in a step of {tokens}"
        fitting = tokens // (drafts + 2)
        yield f"{told}: --max-num-seqs {fitting} would fit" if fitting else f"{told}: raise --max-num-batched-tokens"
