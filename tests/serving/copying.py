"""vLLM's offloading connector on a CPU: its blocks are copied here, since vLLM's own copies need a GPU.

Which blocks are stored, when, and who finds them is vLLM's; it finds this file by `spec_module_path`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopyingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: CanonicalKVCaches) -> Copies:
        return Copies(kv_caches, self.num_chunks)


class Copies(OffloadingWorker):  # type: ignore[misc]
    """As vLLM's, of which each block takes as many bytes as its keys and values: what lies behind them stays."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        (self._refs,) = kv_caches.group_data_refs
        self._device = [one.tensor for one in kv_caches.tensors]
        self._host = [torch.zeros(chunks, one.shape[1], dtype=torch.int8) for one in self._device]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._device, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._host, src_spec, self._device, dst_spec)

    def _copy(self, job: int, source: list[Any], taken: Any, target: list[Any], put: Any) -> bool:
        read, written = (torch.as_tensor(one.block_ids).long() for one in (taken, put))
        for ref in self._refs:
            target[ref.tensor_idx][written, : ref.page_size_bytes] = source[ref.tensor_idx][read, : ref.page_size_bytes]
        self._done.append(TransferResult(job, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is on its way."""


OFFLOADED: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "CopyingSpec",
        "spec_module_path": "copying",
        "cpu_bytes_to_use": 2**27,
        "offload_prompt_only": False,
    },
}
"""What `kv_transfer_config` is given: room for 170 blocks of the bundled model."""
