"""An engine whose cache is filled with random numbers: to time long contexts nobody prefilled."""

import os
import time
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from ..adapters.vllm.engine_settings import engine_settings, pass_settings
from ..adapters.vllm.lossless import BY_BATCH, BY_CHANCE
from ..adapters.vllm.options import ServeOptions
from ..errors import SaccadeError

WORKER = "saccade.bench.vllm_worker.SyntheticWorker"


def prepare_process(*, served: bool) -> None:
    """Set what vLLM reads from the environment, before its first import; what the user has set stays.

    Args:
        served: engines run in their own processes, as a server's do; else in this one.
    """
    told = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(served)),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    for name, value in told.items():
        os.environ.setdefault(name, value)


def request_for(prompt: list[int], tokens: int) -> tuple[Any, Any]:
    """What vLLM is told of a request: a prompt of token ids, behind which so many are generated."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return TokensPrompt(prompt_token_ids=prompt), params


class Engine:
    """vLLM's `LLM`, with random weights unless `load_format` says otherwise.

    Args:
        options: of saccade; None is stock vLLM.
        apart: whether layers with a window are left to vLLM's own backend.
        draft_rate: by which a draft stands if those before it do, by chance; None: those stand that are the model's.
        adaptive: whether as many tokens are drafted as pay, none included, as a server does.
        settings: of vLLM's `LLM`: the model's folder, with a `config.json`, and sizes.

    Attributes:
        llm: vLLM's.
        facts: seconds that it took to start, the tokens that fit, and how vLLM runs it.
    """

    def __init__(
        self, options: ServeOptions | None, *, apart: bool = False, draft_rate: float | None = None,
        adaptive: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        start = time.perf_counter()
        import vllm
        from vllm.engine.arg_utils import EngineArgs

        ours, extension = dict[str, Any](), {"worker_extension_cls": WORKER}
        settings = {"load_format": "dummy", **settings}
        if options is not None:
            ours = engine_settings(options, settings["model"], apart=apart, fixed=not adaptive)
            if options.drafts:
                from ..adapters.vllm.worker.lossless import LosslessWorker

                # Engines of one process share classes: vLLM's own worker was extended, and this one inherits that.
                extension = {} if hasattr(LosslessWorker, "fill_cache") else extension
                told = ours["speculative_config"]
                if draft_rate is not None:
                    rates = [draft_rate**number for number in range(1, told["num_speculative_tokens"] + 1)]
                    told |= {"rejection_sample_method": BY_CHANCE, "synthetic_acceptance_rates": rates}
                if adaptive:
                    settings["max_num_seqs"] = max(settings["max_num_seqs"], len(told[BY_BATCH]))
            if options.rewrites is not None:
                config = EngineArgs(**{**settings, **ours}).create_engine_config()
                ours |= pass_settings(config, options.rewrites)
        self.llm = vllm.LLM(
            enable_chunked_prefill=True, disable_log_stats=True, seed=0, **extension, **ours, **settings
        )
        config = self.llm.llm_engine.vllm_config
        self.facts = {
            "start_seconds": round(time.perf_counter() - start, 1),
            "tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            "model_runner": "V2" if config.use_v2_model_runner else "V1",
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "vllm": vllm.__version__,
            **self.llm.collective_rpc("graph_facts")[0],
        }

    def drop(self, names: Iterable[str]) -> None:
        """Drop requests, and let the steps that are under way end."""
        inner = self.llm.llm_engine
        inner.abort_request(list(names))
        while inner.has_unfinished_requests():
            inner.step()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class SyntheticEngine(Engine):
    """An engine with a random cache, decoding `batch` rows of `context` tokens.

    Attributes:
        tokens: the latest of each row.
    """

    def __init__(self, options: ServeOptions | None, **settings: Any) -> None:
        super().__init__(options, enable_prefix_caching=False, **settings)
        self.llm.collective_rpc("fill_cache")
        self.tokens: list[int] = []
        self._counts: dict[str, int] = {}
        self._rounds = list[float]()
        self._points = self._tokens = 0

    def begin(self, context: int, batch: int) -> None:
        """Let `batch` requests stand at `context` tokens, as if they had been prefilled."""
        most = self.llm.llm_engine.model_config.max_model_len - context
        self._points += 1
        self._counts = {f"{self._points}-{row}": 0 for row in range(batch)}
        self.tokens = [0] * batch
        self.llm.collective_rpc("skip_model", args=(True,))
        for row, name in enumerate(self._counts):
            self.llm.llm_engine.add_request(name, *request_for([7 + row] * context, most))
        self.round()
        self.llm.collective_rpc("skip_model", args=(False,))
        self._rounds, self._tokens = [], sum(self._counts.values())

    def round(self) -> float:
        """Go on until every row has one more token, and say when that was, by `time.perf_counter`.

        Raises:
            SaccadeError: if a request ended, because rows have no room left.
        """
        start, before, inner = time.perf_counter(), dict(self._counts), self.llm.llm_engine
        while any(self._counts[name] == count for name, count in before.items()):
            for output in inner.step():
                # Steps that were under way when a batch was dropped may still tell of it.
                if output.request_id in before:
                    answer = output.outputs[0].token_ids
                    self._counts[output.request_id] = len(answer)
                    self.tokens[list(before).index(output.request_id)] = answer[-1]
                if output.finished:
                    raise SaccadeError("a request ended while it was timed: max_model_len leaves no room for its steps")
        end = time.perf_counter()
        self._rounds.append(end - start)
        return end

    @property
    def gained(self) -> float:
        """Tokens of a row in a round, the mean since all have come."""
        return (sum(self._counts.values()) - self._tokens) / (len(self._rounds) * len(self._counts))

    @property
    def pace(self) -> float:
        """Seconds of a round, the mean of all since all rows have come: as who loops over `LLMEngine.step` waits."""
        return fmean(self._rounds)

    def end(self) -> None:
        """Drop the requests."""
        self.drop(self._counts)
