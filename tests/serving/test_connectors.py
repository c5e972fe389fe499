"""KV connectors: which may run, and that what they carry is dense; `test_lossless` has the lossless engine."""

from __future__ import annotations

from typing import Any

import loads
import pytest
from copying import OFFLOADED
from engines import Engines, answers, greedy
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from saccade.adapters.vllm.checks import reasons_against
from saccade.adapters.vllm.options import ServeOptions
from saccade.checkpoints.bundled import model_path
from saccade.errors import ServingError
from walking import walk

SPARSE, REWRITTEN, LOSSLESS, PAGED = "tidal", "tidal:rectify=8", "tidal:rectify=8:verify", "quest:rectify=8:verify"
OFFLOADING = "OffloadingConnector"
PROMPTS, ANSWERS = {"offload_prompt_only": True}, {"offload_prompt_only": False}
ELSEWHERE = {"kv_connector_module_path": "os"}


def reasons(policy: str, **settings: Any) -> list[str]:
    """Against the connector, from whoever makes the configuration: no process has started, no weights are read."""
    told = {"additional_config": {"saccade": policy}, "attention_backend": "CUSTOM", **settings}
    try:
        config = AsyncEngineArgs(model=str(model_path()), **told).create_engine_config()
    except ServingError as error:
        return [str(error)]
    options = ServeOptions.of(config)
    assert options is not None
    return [reason for reason in reasons_against(config, options) if "KV connector" in reason]


@pytest.mark.parametrize(
    ("policy", "name", "more", "words"),
    [
        (LOSSLESS, OFFLOADING, {}, None),
        (LOSSLESS, OFFLOADING, {"kv_connector_extra_config": ANSWERS}, None),
        (REWRITTEN, OFFLOADING, {"kv_connector_extra_config": PROMPTS}, None),
        (SPARSE, OFFLOADING, {"kv_connector_extra_config": PROMPTS}, None),
        (SPARSE, OFFLOADING, {}, ("answers", '"offload_prompt_only": true', "rectify=8:verify")),
        (REWRITTEN, OFFLOADING, {"kv_connector_extra_config": ANSWERS}, ("answers", '"offload_prompt_only": true')),
        (PAGED, OFFLOADING, {"kv_connector_extra_config": PROMPTS}, ("bounds of pages", "quest")),
        (LOSSLESS, OFFLOADING, ELSEWHERE, ("not known to leave behind",)),
        *((LOSSLESS, name, {}, (name, "not known")) for name in ("LMCacheConnectorV1", "NixlConnector")),
        *((LOSSLESS, name, {}, (name, "not known")) for name in ("MooncakeConnector", "MultiConnector")),
    ],
    ids=str,
)
def test_a_connector_runs_if_what_it_carries_is_dense(
    policy: str, name: str, more: dict[str, Any], words: tuple[str, ...] | None
) -> None:
    found = reasons(policy, kv_transfer_config=KVTransferConfig(kv_connector=name, kv_role="kv_both", **more))
    assert len(found) == (words is not None), found
    assert all(word in found[0] and "\n" not in found[0] for word in words or ())


def test_answers_that_become_prompts_are_not_carried() -> None:
    """Those of streaming sessions; hashes that nobody else has hide them, and the prefix cache makes those."""
    given = KVTransferConfig(kv_connector=OFFLOADING, kv_role="kv_both", kv_connector_extra_config=PROMPTS)
    (found,) = reasons(SPARSE, kv_transfer_config=given, enable_prefix_caching=False)
    assert "answers" in found and "prefix cache" in found


def test_offloading_by_vllms_own_flag_is_that_connector() -> None:
    (found,) = reasons(SPARSE, kv_offloading_size=1)
    assert "answers" in found and OFFLOADING in found
    assert reasons(LOSSLESS, kv_offloading_size=1) == []


@walk
@pytest.mark.parametrize("policy", ["tidal:budget=64,reselect=7", "lychee_cluster:budget=64,rectify=8"])
def test_prompts_alone_are_carried_where_answers_are_sparse(policy: str, engines: Engines) -> None:
    """Found again they are answered as in an engine that finds nothing; of an answer no block is found."""
    told = {**OFFLOADED, "kv_connector_extra_config": {**OFFLOADED["kv_connector_extra_config"], **PROMPTS}}
    engine = engines.sparse(policy, enable_prefix_caching=True, kv_transfer_config=told)
    heard, (length, most) = loads.turns(engine), loads.TURNS
    whole = (length - 1) // 32 * 32
    assert [one.cached for one in heard.values()] == [0, whole, whole]
    assert heard["same"].tokens == heard["first"].tokens
    (alone,) = answers(engine, [loads.turn_of(heard["first"].tokens)], greedy(most))
    assert heard["turn"].tokens == list(alone.tokens)
