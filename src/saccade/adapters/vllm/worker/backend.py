"""What our subclasses of vLLM's backends have in common: they split rows, write bounds and decode through `attend`."""

from abc import abstractmethod
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any
from weakref import ref

from torch import Tensor
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from ....checkpoints.unsupported import ALIBI, SHARED_CACHE
from ....decode.attend import attend
from ....errors import ServingError
from ....types import KVView, Rows, Softmax
from ..cache_dtype import FP8, VALID, bounds_bytes, digits
from ..cache_spec import SaccadeAttentionSpec
from ..options import drafts_with
from . import dense_step
from .mixed_step import prepare
from .page_bounds import BlockBounds
from .sparse import SparseRows
from .step import BuildParent, Step, Written
from .worker import Serving, serving_of

_number = cache(extract_layer_index)
"""A layer's, of its name; vLLM takes the name apart, and layers ask in every step."""

_REFUSED = {"alibi_slopes": ALIBI, "kv_sharing_target_layer_name": SHARED_CACHE}
"""What a layer may say about itself, and why it cannot be served then."""


class SparseBackend:
    """Mixed into a backend class, which says what it is made of: names, and the room for bounds in the cache."""

    layer: type[Any]
    builder: type[Any]
    _serving: Callable[[], Serving | None] = lambda: None
    """Of the engine that is being built, while it lives: vLLM asks the class for the cache's layout, outside of any
    configuration's context, and engines of one process are built one after the other."""
    _longest = 0
    """Tokens of its longest row."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        return cls.layer

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        return cls.builder

    @classmethod
    def validate_configuration(cls, *args: Any, kv_cache_dtype: Any, **kwargs: Any) -> list[str]:
        """vLLM's reasons against us; what no policy can decode from is for `checks`, which names what can be."""
        judged = kv_cache_dtype if kv_cache_dtype in (None, *VALID) else "auto"
        reasons: list[str] = super().validate_configuration(*args, kv_cache_dtype=judged, **kwargs)  # type: ignore[misc]
        return reasons

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The cache's specification, with room for bounds, and a manager that publishes clean blocks only."""
        serving = SparseBackend._serving()
        assert serving is not None, "vLLM asks after the layers were made"
        page, sizes = serving.plan.bounds_page, (spec.num_kv_heads, spec.head_size, spec.dtype.itemsize)
        extra = 0 if page is None else bounds_bytes(spec.block_size, page, *sizes)
        told, longest = str(serving.options.policy), SparseBackend._longest
        return SaccadeAttentionSpec.of(spec, told, extra, covered=serving.covered, longest=longest)


class SparseBuilder:
    """Mixed into a metadata builder: the parent's metadata for the rows it serves, ours around it."""

    vllm_config: Any
    layer_names: list[str]
    sparse: SparseRows
    verifies = False
    """Whether it makes steps of a lossless engine's target, which are dense; its drafts have a builder of theirs."""
    _room: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ours = tuple(sorted(map(extract_layer_index, self.layer_names)))
        serving = serving_of(self.vllm_config)
        self.verifies = serving.options.drafts > 0 and not drafts_with(self.vllm_config)
        told = serving.plan.roles.concerned
        if ours != told:
            raise ServingError(
                f"vLLM keeps the caches of layers {', '.join(map(str, ours))} in a group of their own; in layers "
                f"{', '.join(map(str, told))} of this model a policy selects together"
            )

    @cached_property
    def _layers(self) -> dict[int, Any]:
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        return {extract_layer_index(name): layer for name, layer in layers.items()}

    def view(self, number: int, rows: Rows) -> KVView:
        """The cache of a layer, by its number in the model, as some rows see it."""
        layer = self._layers[number]
        kv: KVView = layer.impl.view(layer, layer.kv_cache, rows)
        return kv

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        parent = super().build  # type: ignore[misc]

        def build_parent(common: Any, unscheduled: bool) -> Any:
            return parent(common_prefix_len, common, fast_build or unscheduled)

        return self.prepare(common_attn_metadata, build_parent)

    def prepare(self, common: Any, build_parent: BuildParent) -> Step:
        """The step that vLLM's `CommonAttentionMetadata` describes."""
        if self.verifies:
            return dense_step.prepare(self.sparse, common, build_parent, self._room)
        return prepare(self.sparse, common, build_parent)


class SparseLayer:
    """Mixed into an attention implementation; a subclass says how its cache lies in memory."""

    scale: float
    sinks: Tensor | None
    logits_soft_cap: float | None
    num_kv_heads: int
    kv_cache_dtype: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = get_current_vllm_config()
        # First, since vLLM's own class names what it cannot take, and not what can be.
        self.serving = serving_of(config)
        super().__init__(*args, **kwargs)
        for name, reason in _REFUSED.items():
            given = getattr(self, name, None)
            if isinstance(given, Tensor) or given:
                raise ServingError(f"saccade cannot serve this model: a layer has {name}: {reason}")
        roles = self.serving.plan.roles
        heads = len(roles.layers[roles.concerned[0]])
        if self.num_kv_heads != heads:
            said = f"a layer has {self.num_kv_heads} KV heads, its configuration says {heads}"
            raise ServingError(f"saccade cannot serve this model: {said}")
        SparseBackend._serving, SparseBackend._longest = ref(self.serving), config.model_config.max_model_len

    @abstractmethod
    def view(self, layer: Any, kv_cache: Tensor, rows: Rows) -> KVView:
        """The one place that knows how a cache is laid out."""

    def scales(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        """Of keys and of values, `[Hkv]` on the device; None where the cache is not quantised."""
        if self.kv_cache_dtype not in FP8:
            return None, None
        heads = self.num_kv_heads
        return layer._k_scale.expand(heads), layer._v_scale.expand(heads)

    def stock(self, layer: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attention by vLLM's own kernel; its arguments are those of `forward`."""
        result: Tensor = super().forward(layer, query, *args, **kwargs)  # type: ignore[misc]
        return result

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of one layer; see vLLM's `AttentionImpl.forward` for the arguments."""
        if attn_metadata is None:
            return self.stock(layer, query, key, value, kv_cache, None, output, *args, **kwargs)
        step, number = attn_metadata, _number(layer.layer_name)
        self.serving.attended.note(number)
        # Here, and not with the cache's update, which vLLM may capture in piecewise graphs.
        for written in step.written:
            self.refresh(layer, kv_cache, written)
        part = step.part(number)
        if part.parent is not None:
            told = (*map(part.parent_tokens.of, (query, key, value)), kv_cache, part.parent)
            part.parent_tokens.fill(output, lambda own: self.stock(layer, *told, own, *args, **kwargs))
        sparse = part.sparse
        if sparse is not None:
            if query.itemsize == 1:  # vLLM's layer has quantised it
                query = digits(query, layer._q_scale).to(output.dtype)
            q, kv = sparse.tokens.of(query), self.view(layer, kv_cache, sparse.rows)
            softmax = Softmax(self.scale, self.sinks, self.logits_soft_cap or None)
            sparse.tokens.fill(output, lambda own: attend(sparse.state, number, q, kv, softmax, out=own))
        if self.serving.metrics is not None:
            self.serving.metrics.layer_done(number)
        return output

    def refresh(self, layer: Any, kv_cache: Tensor, written: Written) -> None:
        """Recompute the bounds of the pages that new tokens have fallen into, where the policy bounds this layer's."""
        plan, number = self.serving.plan, _number(layer.layer_name)
        page = plan.bounds_page
        if page is None or number not in plan.refreshing:
            return
        kv = self.view(layer, kv_cache, written.rows)
        bounds = self.serving.indexes.layers.get(number)
        if bounds is None or not bounds.lies_in(kv_cache):
            bounds = BlockBounds.behind(kv_cache.view(kv.k.dtype), kv.page, kv.head_dim, page, self.serving.filled)
            self.serving.indexes.layers[number] = bounds
        if written.count:
            start = kv.rows.seq_lens - 1 if written.start is None else written.start
            bounds.update(kv, start, written.count)
