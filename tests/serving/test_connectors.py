"""What a start decides beside the policy: which KV connectors carry what is dense, which graphs hold dense passes.

`test_lossless` has a lossless engine with a connector.
"""

from itertools import pairwise
from typing import Any

import loads
import pytest
from copying import ANSWERS, CONNECTOR, PROMPTS
from engines import Engines
from unstarted import made
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from saccade.adapters.vllm.checks import reasons_against
from saccade.adapters.vllm.options import ServeOptions
from saccade.adapters.vllm.server import serve
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
    found = reasons(
        policy, **({"kv_transfer_config": KVTransferConfig(**given)} if given else {"kv_offloading_size": 1})
    )
    assert len(found) == bool(words), found
    assert all(word in found[0] and "\n" not in found[0] for word in words)


def test_answers_of_streaming_sessions_are_not_carried_as_prompts() -> None:
    (found,) = reasons(SPARSE, kv_transfer_config=KVTransferConfig(**PROMPTS), enable_prefix_caching=False)
    assert "needs the prefix cache" in found


def reasons(policy: str, **settings: Any) -> list[str]:
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


def sizes_of(policy: str, *asked: str) -> list[int] | None:
    sizes: list[int] | None = made(*asked, policy=policy).args.cudagraph_capture_sizes
    return sizes


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
    sizes = sizes_of(RECTIFIED, "--max-num-seqs", str(rows), *rest)
    assert sizes is not None
    assert sizes == sorted({*sizes})
    assert {*sizes} == held
    assert all(later - size <= 16 for size, later in pairwise(sizes))


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
