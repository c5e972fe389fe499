"""vLLM's offloading connector on a CPU: all but the copies is vLLM's, whose own need a GPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

EXTRA = {"spec_name": "CopyingSpec", "spec_module_path": "copying", "cpu_bytes_to_use": 2**27}
CONNECTOR: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
PROMPTS = {**CONNECTOR, "kv_connector_extra_config": {**EXTRA, "offload_prompt_only": True}}
ANSWERS = {**CONNECTOR, "kv_connector_extra_config": {**EXTRA, "offload_prompt_only": False}}


class CopyingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: Any) -> Copies:
        return Copies(kv_caches, self.num_chunks)


class Copies(OffloadingWorker):  # type: ignore[misc]
    def __init__(self, caches: Any, chunks: int) -> None:
        # Of a block, keys and values: as vLLM's, which leaves what lies behind them.
        of, refs = caches.tensors, caches.group_data_refs[0]
        self.layers = [of[one.tensor_idx].tensor[:, : one.page_size_bytes] for one in refs]
        self.host, self.done = [torch.zeros(chunks, one.shape[1], dtype=torch.int8) for one in self.layers], []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.copy(job_id, self.layers, src_spec.block_ids, self.host, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.copy(job_id, self.host, src_spec.block_ids, self.layers, dst_spec.block_ids)

    def copy(self, job: int, source: Any, read: Any, target: Any, written: Any) -> bool:
        for one, other in zip(source, target, strict=True):
            other[written] = one[read]
        return self.done.append(TransferResult(job, True)) is None

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None: ...
