"""What a start decides beside the policy: which KV connectors carry what is dense, which graphs hold dense passes, what
a lossless engine is started with. What is refused is refused in one line, before there is an engine.

`test_lossless` has a lossless engine with a connector.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import loads
import pytest
from copying import ANSWERS, CONNECTOR, PROMPTS
from engines import Engines
from transformers import Qwen3NextConfig
from unstarted import SMALL, made, model, reasons
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from saccade.adapters.vllm.checks import SCHEDULER, reasons_against
from saccade.adapters.vllm.lossless import ADAPTIVE, WORKER
from saccade.adapters.vllm.options import ServeOptions
from saccade.adapters.vllm.server import serve
from saccade.adapters.vllm.server.serve import prepare
from saccade.checkpoints.bundled import model_path
from saccade.errors import ServingError
from walking import walk

SPARSE, REWRITTEN, LOSSLESS, PAGED = "tidal", "tidal:rectify=8", "tidal:rectify=8:verify", "quest:rectify=8:verify"
OTHERS = "LMCacheConnectorV1", "MultiConnector"
WOULD = "would carry answers away", '"offload_prompt_only": true', "rectify=8:verify"


@pytest.mark.parametrize(
    ("policy", "given", "words"),
    [
        *((LOSSLESS, given, ()) for given in (CONNECTOR, ANSWERS)),
        *((policy, PROMPTS, ()) for policy in (REWRITTEN, SPARSE)),
        *((policy, given, WOULD) for policy, given in ((SPARSE, CONNECTOR), (REWRITTEN, ANSWERS), (SPARSE, None))),
        (PAGED, PROMPTS, ("OffloadingConnector", "bounds of pages", "quest")),
        *((LOSSLESS, {**CONNECTOR, "kv_connector": name}, (f"{name} is not known",)) for name in OTHERS),
        (LOSSLESS, {**CONNECTOR, "kv_connector_module_path": "os"}, ("OffloadingConnector of os is not known",)),
    ],
)
def test_a_connector_runs_if_what_it_carries_is_dense(policy: str, given: Any, words: tuple[str, ...]) -> None:
    """Whoever makes the configuration hears it, before a process starts. None: `--kv-offloading-size`."""
    told = {"kv_transfer_config": KVTransferConfig(**given)} if given else {"kv_offloading_size": 1}
    found = against(policy, **told)
    assert len(found) == bool(words) and all(word in found[0] and "\n" not in found[0] for word in words), found


def test_answers_of_streaming_sessions_are_not_carried_as_prompts() -> None:
    (found,) = against(SPARSE, kv_transfer_config=KVTransferConfig(**PROMPTS), enable_prefix_caching=False)
    assert "needs the prefix cache" in found


def against(policy: str, **settings: Any) -> list[str]:
    told = {"additional_config": {"saccade": policy}, "attention_backend": "CUSTOM", **settings}
    try:
        config = AsyncEngineArgs(str(model_path()), **told).create_engine_config()
    except ServingError as error:
        return [str(error)]
    found = reasons_against(config, ServeOptions.of(config))  # type: ignore[arg-type]
    return [reason for reason in found if "KV connector" in reason]


@walk
@pytest.mark.parametrize("policy", ["tidal:budget=64,reselect=7", "lychee_cluster:budget=64,rectify=8"])
def test_prompts_alone_are_carried_where_answers_are_sparse(policy: str, engines: Engines) -> None:
    """Answers are those of an engine that finds nothing; of an answer no block is found."""
    alone = loads.turns(engines.sparse(policy))
    engines.close()
    carried = loads.turns(engines.sparse(policy, enable_prefix_caching=True, kv_transfer_config=PROMPTS))
    assert [one.tokens for one in carried.values()] == [one.tokens for one in alone.values()]
    assert [one.cached for one in carried.values()] == [0, 160, 160]


RECTIFIED = "quest:rectify=8"


def sizes_of(policy: str, *asked: str) -> Any:
    return made(*asked, policy=policy).args.cudagraph_capture_sizes


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations have the graphs that vLLM chooses on a GPU."""
    real = serve._made

    def made_on_a_gpu(args: Any) -> Any:
        config = real(args)
        most = 2 * config.scheduler_config.max_num_seqs
        config.compilation_config.cudagraph_capture_sizes = [size for size in (1, 2, 4) if size <= most]
        config.compilation_config.cudagraph_capture_sizes += range(8, min(most, 512) + 1, 8)
        return config

    monkeypatch.setattr(serve, "_made", made_on_a_gpu)


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(
    ("rows", "rest", "held"),
    [
        (1, (), {1, 2, 8, 9}),
        (28, (), {1, 2, 4, *range(8, 249, 8), 252}),
        (100, (), {1, 2, 4, *range(8, 249, 8), *range(256, 513, 16)}),
        (100, ("--max-num-batched-tokens", "300"), {1, 2, 4, *range(8, 249, 8), *range(256, 300, 16), 300}),
    ],
)
def test_a_pass_of_all_rows_is_captured(rows: int, rest: tuple[str, ...], held: set[int]) -> None:
    """Nine tokens a row, up to what vLLM captures by itself or a step holds."""
    assert sizes_of(RECTIFIED, "--max-num-seqs", str(rows), *rest) == sorted(held)


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(
    ("policy", "asked", "sizes"),
    [
        ("quest:rectify=1", ("--max-num-seqs", "4"), None),
        (RECTIFIED, ("--max-num-seqs", "256"), None),
        (RECTIFIED, ("--max-num-seqs", "4", "--cudagraph-capture-sizes", "1", "2"), [1, 2]),
        (RECTIFIED, ("--max-num-seqs", "4", "--max-cudagraph-capture-size", "8"), None),
        (RECTIFIED, ("--max-num-seqs", "4", "-cc.cudagraph_capture_sizes", "[1, 2]"), None),
    ],
)
def test_what_suffices_or_was_said_stays(policy: str, asked: tuple[str, ...], sizes: list[int] | None) -> None:
    assert sizes_of(policy, *asked) == sizes


def test_without_graphs_none_is_asked_for() -> None:
    assert sizes_of(RECTIFIED, "--max-num-seqs", "4") is None


on_v2 = pytest.mark.usefixtures("runner_v2")
FIXED = {"method": "draft_model", "model": str(model_path()), "num_speculative_tokens": 8}
FIXED |= {"draft_sample_method": "probabilistic"}
SIZES = [[1, 1, 1], [2, 2, 3], [3, 3, 7], [4, 4, 0]]
PROPER = {**FIXED, "num_speculative_tokens": 7, "num_speculative_tokens_per_batch_size": SIZES}
"""All lengths, so that vLLM captures them."""
ALWAYS = ("--speculative-config", json.dumps(FIXED))
SEQS = ("--max-num-seqs", "8")
lossless = partial(made, *SEQS, policy=PAGED)
refused = partial(reasons, *SEQS, policy=PAGED)


@on_v2
def test_verification_brings_its_worker_its_scheduler_and_slots() -> None:
    server = lossless()
    assert (server.args.worker_cls, server.args.scheduler_cls) == (WORKER, ADAPTIVE)
    assert server.args.speculative_config == PROPER
    assert (server.options.drafts, server.options.rewrites) == (8, None)


@on_v2
@pytest.mark.parametrize(("drafts", "rows"), [(8, 64), (16, 32), (6, 128), (600, 12)])
def test_as_many_rows_as_have_graphs_unless_it_is_said(drafts: int, rows: int) -> None:
    """vLLM's own number would be refused on most cards: 1,024 rows and steps of 8,192 tokens."""
    policy, room = f"streaming:budget=2048,rectify={drafts}:verify", ("--max-num-batched-tokens", "8192")
    assert prepare(["--port", "0", *room], policy=policy).args.max_num_seqs == rows


@on_v2
@pytest.mark.parametrize(("proper", "scheduler"), [(PROPER, ADAPTIVE), (FIXED, None)])
def test_what_is_said_by_hand_stays(proper: dict[str, Any], scheduler: str | None) -> None:
    """Also how drafts are sampled; without numbers by batch there are always as many, of any number of rows."""
    for method in ("greedy", "probabilistic"):
        given = {**proper, "draft_sample_method": method}
        args = lossless("--worker-cls", WORKER, "--speculative-config", json.dumps(given)).args
        assert (args.speculative_config, args.scheduler_cls) == (given, scheduler)
    assert lossless(*ALWAYS, "--max-num-seqs", "1")


def _speculative(**settings: Any) -> tuple[str, str]:
    return "--speculative-config", json.dumps({**PROPER, **settings})


@on_v2
@pytest.mark.parametrize(
    ("policy", "rest", "words"),
    [
        (LOSSLESS, _speculative(num_speculative_tokens=4), "needs --speculative-config"),
        (LOSSLESS, _speculative(rejection_sample_method="block"), "needs --speculative-config"),
        (LOSSLESS, ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 8}'), json.dumps(PROPER)),
        (LOSSLESS, ("--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"), f"needs --worker-cls {WORKER}"),
        (LOSSLESS, ("--scheduler-cls", SCHEDULER), f"needs --scheduler-cls {ADAPTIVE}"),
        (LOSSLESS, (*ALWAYS, "--scheduler-cls", ADAPTIVE), "leave out --scheduler-cls"),
        (LOSSLESS, _speculative(num_speculative_tokens_per_batch_size=[[1, 9, 7]]), json.dumps(PROPER)),
        (LOSSLESS, ("--max-num-seqs", "3"), "needs --max-num-seqs 4 or more: vLLM captures one length (0, 1, 3, 7)"),
        (LOSSLESS, ("--enable-lora",), "leave out --enable-lora"),
        (LOSSLESS, ("--enable-prompt-embeds",), "--enable-prompt-embeds"),
        (LOSSLESS, ("--max-num-batched-tokens", "71"), "counted as 9, in a step of 71: --max-num-seqs 7"),
        (LOSSLESS, ("--max-num-batched-tokens", "8"), "raise --max-num-batched-tokens"),
        ("token_clusters:budget=96,rectify=32:verify", (), "budget=96 cannot hold 16 sinks"),
        ("quest:budget=64", ("--speculative-config", json.dumps(PROPER)), "or drafts them itself: rectify=8:verify"),
    ],
)
def test_what_cannot_be_drafted_or_verified(policy: str, rest: tuple[str, ...], words: str) -> None:
    assert any(words in reason for reason in refused(*rest, policy=policy))


@on_v2
def test_recurrent_layers_do_not_forget_drafts(tmp_path: Path) -> None:
    config = Qwen3NextConfig(**{**SMALL, "head_dim": 32}, layer_types=["linear_attention", "full_attention"] * 2)
    given = {"model": str(model(tmp_path, config)), "policy": "quest:rectify=8:verify,dense_layers=0"}
    assert any("layers of type linear_attention would not" in reason for reason in refused(**given))
