"""What vLLM's KV-cache manager knows of sparse decoding: room beside the keys, and which blocks others may reuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, get_kv_cache_spec_kind, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from ...errors import ServingError
from ...methods.policy import Policy
from . import clean


@dataclass(frozen=True, kw_only=True)
class SaccadeAttentionSpec(FullAttentionSpec):
    """Full attention whose decoding steps may be sparse; made by `of`.

    `policy` is a spec string; `covered` the longest row, of which every head attends to all (`clean.covered_length`).
    """

    policy: str
    covered: int

    @classmethod
    def of(
        cls,
        spec: FullAttentionSpec | SlidingWindowSpec,
        policy: str,
        extra_bytes: int = 0,
        *,
        covered: int,
        longest: int = 0,
    ) -> SaccadeAttentionSpec:
        """The spec of a layer, of which `spec` is what vLLM would use, with room for an index behind each page's keys.

        `extra_bytes` are of one page, this rank's KV heads; a multiple of the cache's item size. No row exceeds
        `longest` tokens: a window as wide as that hides nothing, and its layer is one of full attention.
        Raises a ServingError for a layer that does not attend to all tokens, or whose cache is not keys and values.
        """
        if type(spec) is SlidingWindowSpec and 0 < longest <= spec.sliding_window:
            spec = replace_as(spec, FullAttentionSpec, drop=("extra_retained_tokens", "sliding_window"))
        kind = get_kv_cache_spec_kind(spec).value
        window, chunk = getattr(spec, "sliding_window", None), getattr(spec, "attention_chunk_size", None)
        if window is not None:
            raise ServingError(f"a layer of this model sees a window of {window} tokens; saccade selects among all")
        if chunk is not None:
            raise ServingError(f"a layer of this model attends in chunks of {chunk} tokens; saccade selects among all")
        if type(spec) is not FullAttentionSpec:
            raise ServingError(f"a layer of this model has a cache of kind {kind}; saccade needs full attention")
        if spec.non_causal:
            raise ServingError("a layer of this model is not causal; saccade decodes causal models")
        if spec.tokens_per_state != 1 or spec.state_content_bytes is not None or spec.num_head_slots is not None:
            raise ServingError("a layer of this model packs its cache; saccade reads keys and values token by token")
        if spec.head_size_v != spec.head_size:
            raise ServingError(f"values of a layer are {spec.head_size_v} wide, its keys {spec.head_size}")
        page = spec.unpadded_page_size_bytes + extra_bytes if extra_bytes else spec.page_size_padded
        made: SaccadeAttentionSpec = replace_as(spec, cls, policy=policy, covered=covered, page_size_padded=page)
        return made

    @property
    def extra_page_bytes(self) -> int:
        """Bytes behind the keys and values of one page."""
        extra: int = self.page_size_bytes - self.unpadded_page_size_bytes
        return extra

    def copy_with_new_block_size(self, block_size: int) -> SaccadeAttentionSpec:
        """The same with pages of another size; what lies behind the keys grows and shrinks with them."""
        resized: SaccadeAttentionSpec = replace_as(self, type(self), block_size=block_size, page_size_padded=None)
        if self.page_size_padded is None:
            return resized
        extra = -(-self.extra_page_bytes * block_size // self.block_size)
        page = resized.unpadded_page_size_bytes + extra
        padded: SaccadeAttentionSpec = replace_as(resized, type(self), page_size_padded=page)
        return padded

    @classmethod
    def merge(cls, specs: list[Any]) -> SaccadeAttentionSpec:
        """One spec for a group of layers, or an AssertionError, by which vLLM finds out whether they may form one."""
        if not all(isinstance(spec, cls) for spec in specs):
            raise AssertionError("layers that decode sparsely and others cannot share a group")
        if len({(spec.policy, spec.covered) for spec in specs}) > 1:
            raise AssertionError("layers under different policies cannot share a group")
        ours = {name: getattr(specs[0], name) for name in ("policy", "covered")}
        merged: SaccadeAttentionSpec = replace_as(FullAttentionSpec.merge(specs), cls, **ours)
        return merged


class CleanPrefixManager(FullAttentionManager):
    """Blocks of full attention, of which the prefix cache gets none with KV that a sparse step wrote."""

    def __init__(self, kv_cache_spec: SaccadeAttentionSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        rectify = Policy.from_spec(kv_cache_spec.policy).rectify
        # Where sparse steps are made good, the scheduler says how far the cache is clean.
        self._rectified = rectify is not None and rectify.mode == "overwrite"
        # A dense pass rewrites what is not clean yet, exact or not, and a published block must not change.
        self._exact = 0 if self._rectified else kv_cache_spec.covered

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Publish full blocks among the first `num_tokens` slots, as far as they are clean.

        vLLM calls this before the step that computes the last of them. Up to the boundary this step is dense; the
        token that a sparse step is about to compute lies behind it.
        """
        boundary = clean.boundary(request)
        if boundary is not None:
            known = max(boundary, self._exact)
            num_tokens = min(num_tokens, known)
            if not self._rectified:
                clean.keep_private(request, known, self.block_pool.hash_block_size)
        super().cache_blocks(request, num_tokens, *args, **kwargs)


def register_cache_spec() -> None:
    """Let vLLM find the manager of our spec; in every process, any number of times."""
    # vLLM registers its own specs when it first looks for one, and only while the table is empty: let it look.
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    KVCacheSpecRegistry.register(
        SaccadeAttentionSpec, manager_class=CleanPrefixManager, uniform_type_base_spec=FullAttentionSpec
    )
