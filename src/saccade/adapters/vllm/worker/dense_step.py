"""One forward pass of a lossless engine's target: vLLM's own kernel serves all rows, drafts to verify among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .batch import Batch
from .mixed_step import written_in
from .requests import requests_of
from .step import BuildParent, Part, Written
from .worker import serving_of


@dataclass(frozen=True, slots=True, eq=False)
class DenseStep:
    """A `Step` in which all rows attend to everything; `parent` is the metadata of vLLM's own kernel for them."""

    parent: Any
    written: tuple[Written, ...]
    num_actual_tokens: int

    def part(self, layer: int) -> Part:
        return Part(self.parent, None, None)


def prepare(vllm_config: Any, common: Any, build_parent: BuildParent) -> DenseStep:
    """The step that vLLM's `CommonAttentionMetadata` describes; pages are bounded anew where they are written."""
    serving = serving_of(vllm_config)
    serving.attended.begin(False)
    # The rows are read on the host only where pages are to be bounded.
    written = () if serving.page is None else written_in(common, Batch.of(common, requests_of(vllm_config)))
    return DenseStep(build_parent(common, False), written, common.num_actual_tokens)
