"""An engine in this process whose cache is filled with random numbers: to time long contexts nobody prefilled."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor

from ..adapters.vllm.options import KEY, ServeOptions
from ..types import Rows


def prepare_process() -> None:
    """Set what vLLM reads from the environment; before its first import."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
    os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")


class SyntheticEngine:
    """vLLM with random weights and a random cache, decoding `batch` rows of `context` tokens.

    Args:
        folder: with a `config.json`; weights are vLLM's dummy ones.
        options: of saccade; None is stock vLLM.
        tokens: room of the cache, over all rows.
        rows: most rows of a batch.
        block: tokens of a block.
        dtype: of weights and cache.
        bytes_per_token: of keys and values, all layers.
    """

    def __init__(
        self,
        folder: str,
        options: ServeOptions | None,
        *,
        tokens: int,
        rows: int,
        block: int,
        dtype: str,
        bytes_per_token: int,
    ) -> None:
        from vllm import LLM

        ours: dict[str, Any] = {}
        if options is not None:
            ours = {"attention_backend": "CUSTOM", "additional_config": {KEY: options.to_dict()}}
        blocks = tokens // block + 8 * rows + 8
        self._engine = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=dtype,
            enforce_eager=True,
            max_model_len=tokens // rows + 4 * block,
            max_num_seqs=rows,
            max_num_batched_tokens=tokens + rows * block,
            block_size=block,
            num_gpu_blocks_override=blocks,
            # The bounds' share of a page is at most a quarter.
            kv_cache_memory_bytes=blocks * block * bytes_per_token * 5 // 4,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **ours,
        )
        self._runner = self._engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._fill(blocks, block)

    def begin(self, context: int, batch: int) -> None:
        """Let `batch` requests stand at `context` tokens, as if they had been prefilled."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        inner = self._engine.llm_engine
        params = SamplingParams(temperature=0, max_tokens=10**6, ignore_eos=True, detokenize=False)
        self._names = [f"{context}-{batch}-{row}" for row in range(batch)]
        for row, name in enumerate(self._names):
            inner.add_request(name, TokensPrompt(prompt_token_ids=[7 + row] * context), params)
        real, self._runner._model_forward = self._runner._model_forward, self._no_forward
        try:
            waiting = set(self._names)
            while waiting:
                waiting -= {output.request_id for output in inner.step() if output.outputs[0].token_ids}
        finally:
            self._runner._model_forward = real

    def step(self) -> tuple[float, list[int]]:
        """Seconds that decoding one more token of every row takes, and the tokens."""
        start = time.perf_counter()
        outputs = self._engine.llm_engine.step()
        elapsed = time.perf_counter() - start
        return elapsed, [output.outputs[0].token_ids[-1] for output in outputs]

    def end(self) -> None:
        """Drop the requests."""
        self._engine.llm_engine.abort_request(self._names)
        self._engine.llm_engine.step()

    def close(self) -> None:
        self._engine.llm_engine.engine_core.shutdown()

    def _fill(self, blocks: int, block: int) -> None:
        """Random keys and values, the same for every engine of the same sizes, and the bounds of them where needed."""
        from ..adapters.vllm.worker.backend import SparseLayer
        from ..adapters.vllm.worker.step import Written

        rows = Rows.on_host(torch.arange(blocks, dtype=torch.int32)[None], [0], [blocks * block])
        everything = Written(rows, torch.zeros(1, dtype=torch.int32), rows.max_len)
        generator = torch.Generator().manual_seed(0)
        layers = self._runner.compilation_config.static_forward_context
        for layer in layers.values():
            cache = layer.kv_cache
            for held in cache:
                held.normal_(generator=generator)
            if isinstance(layer.impl, SparseLayer):
                layer.impl.refresh(layer, cache, everything)

    def _no_forward(self, input_ids: Tensor | None = None, **rest: Any) -> Tensor:
        """Hidden states of a prefill that is not run."""
        assert input_ids is not None
        hidden = self._runner.model_config.get_hidden_size()
        return torch.zeros((input_ids.shape[0], hidden), dtype=self._runner.model_config.dtype)
