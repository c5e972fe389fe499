"""The CUDA backend without CUDA: vLLM's own layers and FLASH_ATTN's classes, with stand-ins for what is compiled."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, compute_layout_strides

from saccade.adapters.vllm import checks
from saccade.adapters.vllm.worker import cuda, decode_step
from saccade.adapters.vllm.worker.cuda import SaccadeFlashBackend, SaccadeFlashBuilder
from saccade.adapters.vllm.worker.requests import RequestRow, RequestRows
from saccade.adapters.vllm.worker.worker import serving_of
from saccade.checkpoints.bundled import model_path
from saccade.plans.role_file import RoleFile
from saccade.plans.roles import RoleMap
from saccade.types import ModelShape, Role

assert "cpu" not in decode_step.async_tensor_h2d.__module__, "imported after a CPU's worker, which replaces it"
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 12, 8, 4, 32
SCALE = HEAD_DIM**-0.5
MAX_LEN = 512
QKV = list[tuple[Tensor, Tensor, Tensor]]
"""Queries, keys and values of all layers."""
SHAPE = ModelShape(LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, architecture="qwen3")


def mixed_roles(folder: Path) -> Path:
    """A file under which heads of one layer differ in every way."""
    roles = [Role.SELECT, Role.PUBLISH, Role.REUSE, Role.DENSE, Role.REUSE]
    layers = tuple(tuple(roles[(layer + head) % len(roles)] for head in range(KV_HEADS)) for layer in range(1, LAYERS))
    path = folder / "roles.json"
    path.write_text(RoleFile(SHAPE, RoleMap(((Role.SELECT,) * KV_HEADS, *layers))).to_json())
    return path


@dataclass(frozen=True)
class Row:
    """One row of a step: a request and its length with the new tokens, which may be a prompt's; none pads the batch."""

    slot: int
    length: int
    new: int = 1
    prefilling: bool = False


def varlen(
    q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Tensor, max_seqlen_k: int, seqused_k: Tensor,
    softmax_scale: float, causal: bool, block_table: Tensor, num_splits: int = 0, fa_version: int = 2,
    out: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, **others: Any,
) -> Tensor:  # fmt: skip
    """`flash_attn_varlen_func` over a paged cache as vLLM documents it, in float64, and what its kernels check.

    The factors of numbers in 8 bits are `[requests, Hkv]`; one that is not told counts as 1.
    """
    assert all(value is None or value in (0, [-1, -1]) for value in others.values())
    pages, page, kv_heads, head_dim = k.shape
    requests = cu_seqlens_q.shape[0] - 1
    assert k.stride(-1) == v.stride(-1) == block_table.stride(-1) == 1
    assert q.dtype == k.dtype == v.dtype
    assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert seqused_k.shape == block_table.shape[:1] == (requests,)
    steps = 16 // k.element_size()
    assert k.shape == v.shape and k.stride(2) % steps == 0 and k.stride(0) % steps == 0 and page % 16 == 0
    assert q.shape[1] % kv_heads == 0 and q.shape[2] == head_dim
    result = torch.empty_like(q) if out is None else out
    if q.is_meta:
        return result
    assert int(seqused_k.max()) <= max_seqlen_k <= block_table.shape[1] * page
    edges = cu_seqlens_q.tolist()
    for request, length in enumerate(seqused_k.tolist()):
        start, stop = edges[request : request + 2]
        assert stop - start <= max_seqlen_q
        at = torch.arange(length)
        numbers = block_table[request].long()[at // page]
        assert bool(((numbers >= 0) & (numbers < pages)).all())
        factors = [
            1.0 if descale is None or k.element_size() > 1 else descale[request].double()[:, None, None]
            for descale in (q_descale, k_descale, v_descale)
        ]
        queries = q[start:stop].double().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        keys, values = (storage[numbers, at % page].double().transpose(0, 1) for storage in (k, v))
        keys, values = keys * factors[1], values * factors[2]
        queries = queries * (factors[0] if isinstance(factors[0], float) else factors[0][:, None])
        scores = queries @ keys[:, None].transpose(-1, -2) * softmax_scale
        if causal:
            hidden = at > torch.arange(length - (stop - start), length)[:, None]
            scores = scores.masked_fill(hidden, -torch.inf)
        mixed = torch.softmax(scores, -1) @ values[:, None]
        result[start:stop] = mixed.permute(2, 0, 1, 3).flatten(1, 2).to(result.dtype)
    return result


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, dtype: str, *scales: Tensor
) -> None:
    """Writes new tokens to their slots; those of padding are negative."""
    if key.is_meta:
        return
    page = key_cache.shape[1]
    if dtype == "fp8":
        key, value = (to_fp8(*pair).view(torch.uint8) for pair in zip((key, value), scales, strict=True))
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[slot // page, slot % page] = key[token]
            value_cache[slot // page, slot % page] = value[token]


def to_fp8(numbers: Tensor, scale: Tensor) -> Tensor:
    """The nearest numbers in 8 bits, whose factor is the scale; further away than the largest there is none."""
    return (numbers / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def scaled_fp8_quant(numbers: Tensor, scale: Tensor, group_shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """As vLLM's of `[T, N]`: one scale for all, or one for each `group_shape[1]` numbers of a row."""
    assert numbers.dim() == 2 and group_shape[0] == -1
    if group_shape[1] == -1:
        assert scale.numel() == 1
        return to_fp8(numbers, scale), scale
    return to_fp8(numbers.unflatten(1, (-1, group_shape[1])), scale[:, None]).flatten(1), scale


class CudaEngine:
    """The attention layers of the bundled model's shape, over a cache of some layout, each with factors of its own.

    On the device "meta" only shapes and the order of calls are there.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, policy: str, *, block: int = 16, layout: str = "LBNHC", device: str = "cpu",
        requests: int = 4, cache: str = "auto", settings: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        patch.setattr(flash_attn, "flash_attn_varlen_func", varlen, raising=False)
        patch.setattr(flash_attn, "reshape_and_cache_flash", reshape_and_cache, raising=False)
        patch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 2)
        patch.setattr(flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *_, **__: True)
        patch.setattr(cuda, "scaled_fp8_quant", scaled_fp8_quant)
        patch.setattr(checks, "_bytes", lambda _: [])
        self.quantised = cache == "fp8"
        self.device, self.block = torch.device(device), block
        self.config = EngineArgs(
            model=str(model_path()),
            dtype="float32",
            max_model_len=MAX_LEN,
            block_size=block,
            enforce_eager=True,
            attention_backend="CUSTOM",
            kv_cache_dtype=cache,
            additional_config={"saccade": {"policy": policy}},
            **(settings or {}),
        ).create_engine_config()
        self.names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
        self.serving = serving_of(self.config)
        with set_current_vllm_config(self.config), self.device:
            self.layers = [self._layer(name) for name in self.names]
        self._bind(layout, requests)
        with set_current_vllm_config(self.config):
            self.builder = SaccadeFlashBuilder(self.spec, self.names, self.config, self.device)
        self.requests = RequestRows(self.config)
        self.requests.rows.update({slot: RequestRow() for slot in range(requests)})

    def _layer(self, name: str) -> Attention:
        given = {"cache_config": self.config.cache_config, "prefix": name, "attn_backend": SaccadeFlashBackend}
        made = Attention(QUERY_HEADS, HEAD_DIM, SCALE, num_kv_heads=KV_HEADS, **given)
        number = self.names.index(name)
        for scale, size in ((made._q_scale, 0.05), (made._k_scale, 0.02), (made._v_scale, 0.3)):
            # Or a layer that reads another's would pass for right, and one that takes them where nothing is quantised.
            scale.fill_(size * (1 + number / LAYERS))
        # vLLM's custom operations have no kernel for tensors without content.
        made.use_direct_call = self.device.type == "meta"
        return made.to(self.device)

    def _bind(self, layout: str, requests: int) -> None:
        """Give every layer its cache: NaN but for what is written, so that whatever else is read shows."""
        per_request = MAX_LEN // self.block
        blocks = requests * per_request + 1
        plain, absent = (torch.uint8, 0x7F) if self.quantised else (torch.float32, torch.nan)
        mode = self.layers[0].impl.kv_quant_mode
        sizes = {"block_size": self.block, "num_kv_heads": KV_HEADS, "head_size": HEAD_DIM}
        spec = FullAttentionSpec(**sizes, dtype=plain, kv_quant_mode=mode)
        self.spec = SaccadeFlashBackend.customize_spec(spec)
        steps = compute_layout_strides(self.spec, blocks, LAYERS, KVCacheLayout[layout])
        strides = [max(step // plain.itemsize, 1) for step in steps]
        count = LAYERS * blocks * self.spec.page_size_bytes // plain.itemsize
        storage = torch.full((count,), absent, dtype=plain, device=self.device)
        shape = (blocks, KV_HEADS, self.block, 2 * HEAD_DIM)
        for number, layer in enumerate(self.layers):
            layer.kv_cache = storage.as_strided(shape, strides[1:], number * strides[0])
        numbers = list(range(1, blocks))
        random.Random(0).shuffle(numbers)
        self.tables = torch.tensor(numbers, dtype=torch.int32).view(requests, per_request)

    def metadata(self, rows: Sequence[Row]) -> CommonAttentionMetadata:
        """What vLLM's model runner gives a builder."""
        edges = [0, *accumulate(row.new for row in rows)]
        starts = torch.tensor(edges, dtype=torch.int32)
        lengths = torch.tensor([row.length for row in rows], dtype=torch.int32)
        table = torch.stack([self.tables[row.slot] if row.new else torch.zeros_like(self.tables[0]) for row in rows])
        slots = [self._slot(row, at) for row in rows for at in range(row.length - row.new, row.length)]
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(self.device),
            num_reqs=len(rows),
            num_actual_tokens=edges[-1],
            max_query_len=max(row.new for row in rows),
            max_seq_len=max(row.length for row in rows),
            block_table_tensor=table.to(self.device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64).to(self.device),
            is_prefilling=torch.tensor([row.prefilling for row in rows]),
            seq_lens_cpu_upper_bound=lengths,
            req_idx=torch.tensor([row.slot for row in rows]).numpy(),
        )

    def _slot(self, row: Row, at: int) -> int:
        return int(self.tables[row.slot, at // self.block]) * self.block + at % self.block

    def step(self, rows: Sequence[Row], qkv: QKV) -> list[Tensor]:
        """Every layer's output `[tokens, Hq, d]` for queries, keys and values of the rows' new tokens."""
        common = self.metadata(rows)
        return self.layers_of(self.builder.build(0, common), common, qkv)

    def run(self, *rows: Row) -> list[Tensor]:
        return self.step(rows, self.random_qkv(sum(row.new for row in rows)))

    def prepared(self, common: Any) -> Any:
        """A step that nobody runs, which the plugin would miss."""
        step = self.builder.build(0, common)
        serving_of(self.config).attended.due = False
        return step

    def layers_of(self, step: Any, common: Any, qkv: QKV) -> list[Tensor]:
        slots = dict.fromkeys(self.names, common.slot_mapping)
        with set_forward_context(dict.fromkeys(self.names, step), self.config, slot_mapping=slots):
            outs = [layer(*(one.flatten(1) for one in own)) for layer, own in zip(self.layers, qkv, strict=True)]
        return [out.view(-1, QUERY_HEADS, HEAD_DIM) for out in outs]

    def random_qkv(self, tokens: int) -> QKV:
        heads = (QUERY_HEADS, KV_HEADS, KV_HEADS)
        return [
            tuple(torch.randn(tokens, count, HEAD_DIM, device=self.device) for count in heads)  # type: ignore[misc]
            for _ in self.layers
        ]
