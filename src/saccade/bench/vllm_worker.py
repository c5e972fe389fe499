"""What `saccade bench serve` asks of vLLM's workers, in whatever process they run: a random cache, and no model."""

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from ..adapters.vllm.cache_dtype import as_numbers
from ..adapters.vllm.options import given_to
from ..adapters.vllm.worker.backend import SparseLayer
from ..adapters.vllm.worker.step import Written
from ..adapters.vllm.worker.worker import Attended, serving_of
from ..types import Rows

FILLED = 256
"""Blocks that are filled at once: the same numbers whatever the cache's size and strides."""


class SkippedModel:
    """Stands in for a model and answers every token with zeros; all but the call is the model's own."""

    def __init__(self, real: Any, hidden: int, dtype: torch.dtype, attended: Attended) -> None:
        self.real, self._hidden, self._dtype, self._attended = real, hidden, dtype, attended

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __call__(self, input_ids: Tensor, **rest: Any) -> Tensor:
        """Hidden states `[tokens, hidden]`, which take no memory."""
        self._attended.due = False
        return torch.zeros((1, 1), dtype=self._dtype, device=input_ids.device).expand(len(input_ids), self._hidden)


class SyntheticWorker:
    """Mixed into vLLM's worker, of either model runner and of every rank: `worker_extension_cls`."""

    vllm_config: Any
    model_runner: Any

    def graph_facts(self) -> dict[str, Any]:
        """What only the worker knows: the kind of its CUDA graphs, the bytes set aside for them, and who attends."""
        layers = get_layers_from_vllm_config(self.vllm_config, Attention).values()
        return {
            "cudagraph_mode": self.vllm_config.compilation_config.cudagraph_mode.name,
            "cudagraph_bytes": getattr(self, "cudagraph_memory_estimate", 0),
            "attention": sorted({layer.attn_backend.get_name() for layer in layers}),
        }

    @torch.inference_mode()
    def fill_cache(self) -> None:
        """Random keys and values, the same in every engine, and the page bounds of them where a policy has some."""
        dtype = self.vllm_config.model_config.dtype
        layers = get_layers_from_vllm_config(self.vllm_config, Attention).values()
        # Layers of other kinds may lie in the same memory: ours come last, so that bounds are of what lies there.
        for seed, layer in enumerate(sorted(layers, key=lambda layer: isinstance(layer.impl, SparseLayer))):
            cache = as_numbers(layer.kv_cache, layer.kv_cache_dtype)
            generator = torch.Generator(cache.device).manual_seed(seed)
            for start in range(0, cache.shape[0], FILLED):
                part = cache[start : start + FILLED]
                # Far below what fp8 ends at: no number becomes NaN.
                part.copy_(torch.randn(part.shape, generator=generator, dtype=dtype, device=cache.device))
                if isinstance(layer.impl, SparseLayer):
                    table = torch.arange(start, start + part.shape[0], dtype=torch.int32, device=cache.device)
                    rows = Rows.on_host(table[None], [0], [part.shape[0] * part.shape[2]])
                    written = Written(rows, torch.zeros_like(rows.seq_lens), rows.max_len)
                    layer.impl.refresh(layer, layer.kv_cache, written)

    def skip_model(self, skip: bool) -> None:
        """Leave the model out of the steps that follow, or take it back in; full CUDA graphs may replay it anyway."""
        runner, config = self.model_runner, self.vllm_config.model_config
        graphs = getattr(runner, "cudagraph_manager", None)
        if skip:
            attended = serving_of(self.vllm_config).attended if given_to(self.vllm_config) else Attended(None, ())
            runner.model = SkippedModel(runner.model, config.get_hidden_size(), config.dtype, attended)
            if graphs is not None:
                graphs.run_pw_graph = lambda model, inputs: model(**inputs)
        else:
            runner.model = runner.model.real
            if graphs is not None:
                del graphs.run_pw_graph
