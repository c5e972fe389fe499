"""The worker of a lossless engine, named by `--worker-cls`: its model runner drafts with the model that it serves."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from ....errors import ServingError
from ..vllm_api import check_interfaces

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class LosslessWorker(Worker):
    """vLLM's own worker on this platform."""

    vllm_config: Any
    model_runner: Any

    def init_device(self) -> None:
        """Make the model runner, and take the place of the speculator that it chose, before that loads a model.

        Raises:
            ServingError: model runner V1, or a vLLM that this was not written for.
        """
        super().init_device()
        if not self.vllm_config.use_v2_model_runner:
            raise ServingError("drafts need vLLM's model runner V2: do not set VLLM_USE_V2_MODEL_RUNNER=0")
        check_interfaces("lossless")
        from .speculator import SelfSpeculator

        self.model_runner.speculator = SelfSpeculator(self.vllm_config, self.model_runner)
