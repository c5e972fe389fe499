"""The worker of a lossless engine, named by `--worker-cls`: its model runner drafts with the model that it serves."""

import logging
from typing import Any

from vllm.platforms import current_platform

from ....errors import ServingError
from ..checks import refuse_unsupported
from ..lossless import BY_CHANCE, WORKER
from ..options import ServeOptions
from ..vllm_api import check_interfaces
from .worker import serving_of

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

logger = logging.getLogger("vllm.saccade")


class LosslessWorker(Worker):
    """vLLM's own worker on this platform."""

    vllm_config: Any
    model_runner: Any

    def init_device(self) -> None:
        """Make the model runner, and take the place of the speculator that it chose, before that loads a model.

        Raises a ServingError if no policy drafts, or the engine cannot, or for a vLLM that this was not written for.
        """
        options = ServeOptions.of(self.vllm_config)
        if options is None or not options.drafts:
            raise ServingError(f"--worker-cls {WORKER} drafts with a policy: give it one with rectify=8:verify")
        refuse_unsupported(self.vllm_config, options)
        if self.vllm_config.speculative_config.rejection_sample_method == BY_CHANCE:
            logger.warning("saccade: drafts stand by chance, so answers are nobody's: this engine is for timing alone")
        super().init_device()
        check_interfaces("lossless")
        from .speculator import SelfSpeculator

        self.model_runner.speculator = SelfSpeculator(self.vllm_config, self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's, which drafts for requests of its own, then captures graphs, where no thread may read the device."""
        metrics = serving_of(self.vllm_config).metrics
        if metrics is None:
            return super().compile_or_warm_up_model()
        metrics.starting = True
        done = super().compile_or_warm_up_model()
        metrics.starting = False
        metrics.disregard()
        return done
