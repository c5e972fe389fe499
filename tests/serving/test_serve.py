"""`saccade serve` up to the point where the engine would start: what it sets, what it says, and why it refuses."""

import json
import os
import re
import shutil
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Gemma3nTextConfig,
    Gemma3TextConfig,
    MiMoV2FlashConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3NextConfig,
)
from typer.testing import CliRunner
from unstarted import SMALL, made, model, reasons
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from saccade.adapters.vllm.checks import SCHEDULER
from saccade.adapters.vllm.metrics import VARIABLE
from saccade.adapters.vllm.options import ServeOptions, shape_of
from saccade.adapters.vllm.server import serve
from saccade.adapters.vllm.server.serve import BUNDLED_CACHE, Server
from saccade.checkpoints.bundled import model_path
from saccade.checkpoints.load import ModelSource
from saccade.cli import app
from saccade.errors import ServingError
from saccade.methods.policy import Policy
from saccade.recipes.recipe import Recipe
from saccade.types import ModelShape

pytestmark = pytest.mark.usefixtures("environment")


def test_the_bundled_model_is_served_unless_another_is_named() -> None:
    server = made("--port", "7")
    args = server.args
    assert (args.model, args.served_model_name, server.model) == (str(model_path()), ["bundled"], "bundled")
    assert server.options.policy == Recipe.read(model_path() / "saccade.json").policy
    assert (args.dtype, args.kv_cache_memory_bytes, args.host) == ("float32", BUNDLED_CACHE, "127.0.0.1")
    assert args.attention_backend is AttentionBackendEnum.CUSTOM
    assert args.additional_config == {"saccade": server.options.to_dict()}
    assert (args.scheduler_cls, args.async_scheduling, args.block_size) == (None, None, 32)
    assert server.address == "http://127.0.0.1:7"
    assert made("--uds", "/tmp/socket").address == "unix:/tmp/socket"
    assert "12 layers" in server.shape and "float32" in server.shape
    assert made("--kv-cache-dtype", "fp8").shape == f"{server.shape}, cache in fp8"


def test_rectification_brings_its_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for together in (False, True):
        args = made(policy="quest:rectify=8", rectify_together=together or None).args
        assert (args.scheduler_cls, args.async_scheduling) == (SCHEDULER, False)
        assert args.additional_config["saccade"]["rectify_together"] is together
    # As on a GPU, where model runner V2 is.
    monkeypatch.setattr("saccade.adapters.vllm.engine_settings.rectifies_ahead", lambda config: True)
    assert made(policy="quest:budget=64,rectify=8").args.async_scheduling is None, "as vLLM chooses"


def test_blocks_hold_whole_pages() -> None:
    args = made(policy="lychee_cluster:budget=96").args
    assert (args.scheduler_cls, args.async_scheduling, args.block_size) == (None, False, 32), "it reads text"
    assert made(policy="quest:page=24,budget=96").args.block_size == 96
    assert made("--block_size=16", policy="quest:page=16").args.block_size == 16


@pytest.mark.parametrize(("policy", "block"), [("quest:page=24,budget=96", 48), ("dense", None)])
def test_blocks_on_an_accelerator(monkeypatch: pytest.MonkeyPatch, policy: str, block: int | None) -> None:
    """No larger than pages need. There vLLM may choose other blocks than it says, unless it is told."""
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: False)
    asked, whole = list[int | None](), serve._made

    def made(args: Namespace) -> Any:
        asked.append(args.block_size)
        monkeypatch.undo()
        monkeypatch.setattr(serve, "unit", lambda: 16)
        return whole(args)

    monkeypatch.setattr(serve, "_made", made)
    args = serve._parse(["--served-model-name", "x"])
    serve._config(args, ServeOptions.read({"policy": policy}, "", ModelSource.locate(None).decoder))
    assert (asked, args.block_size) == ([None], block)


def test_what_the_user_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"other": 1, "saccade": {"policy": "quest:budget=64", "recall": 0.5}}
    rest = ["--host", "0.0.0.0", "--dtype", "bfloat16", "--served-model-name", "mine", "--max-model-len", "1k"]
    args = made(*rest, "--additional-config", json.dumps(given), "--kv-cache-memory-bytes", "100000000").args
    stays = args.host, args.dtype, args.served_model_name, args.max_model_len, args.kv_cache_memory_bytes
    assert stays == ("0.0.0.0", "bfloat16", ["mine"], 1000, 100_000_000)
    assert args.additional_config == {"other": 1, "saccade": {**given["saccade"], "rectify_together": False}}
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    server = made("--additional-config", '{"saccade": "quest:budget=64"}', recall=0.25)
    assert (str(server.options.policy), server.options.recall) == ("quest:budget=64", 0.25)
    assert server.args.kv_cache_memory_bytes is None


def test_another_model_is_as_vllm_would_serve_it(tmp_path: Path) -> None:
    folder = model(tmp_path, Qwen3Config(**SMALL))
    dummy = ("--load-format", "dummy")
    for server in (made(*dummy, model=str(folder)), made(*dummy, "--model", str(folder)), made(*dummy, str(folder))):
        assert (server.args.model, server.args.dtype, server.args.served_model_name) == (str(folder), "auto", None)
        assert server.args.kv_cache_memory_bytes is None
        assert str(server.options.policy) == "less_is_more"
        assert any("reselect" in note for note in server.notes), "of random weights no layer is the right one"


def test_workers_find_the_recipe_themselves() -> None:
    """As with `vllm serve --additional-config`; those of `saccade serve` are told the policy that it has found."""
    recipe, server = Recipe.read(model_path() / "saccade.json"), made(policy="auto")
    assert server.options.policy == recipe.policy
    assert server.args.additional_config["saccade"]["policy"] == str(recipe.policy)
    server.args.additional_config = {"saccade": {"policy": "auto"}}
    config = serve._made(server.args)
    assert config.additional_config == {"saccade": {"policy": "auto"}} and shape_of(config) == recipe.model
    options = ServeOptions.of(config)
    assert options.policy == recipe.policy and ServeOptions.of(config) is options
    config.model_config.max_model_len -= 1
    assert ServeOptions.of(config) is not options
    config.additional_config = {"saccade": "quest"}
    assert str(ServeOptions.of(config).policy) == "quest"


def test_a_recipe_beside_another_model(tmp_path: Path) -> None:
    folder = model(tmp_path / "mine", Qwen3Config(**SMALL))
    recipe = Recipe(ModelShape(4, 4, 2, 32, "qwen3"), Policy.from_spec("tidal:reselect=3"))
    recipe.write(tmp_path / "elsewhere.json")
    assert str(made(model=str(folder), policy=str(tmp_path / "elsewhere.json")).options.policy) == "tidal:reselect=3"
    (reason,) = reasons(model=str(folder), policy="auto")
    assert f"no recipe for model '{folder}'" in reason
    recipe.write(folder / "saccade.json")
    for policy in (None, "auto"):
        assert str(made(model=str(folder), policy=policy).options.policy) == "tidal:reselect=3"
    Recipe.read(model_path() / "saccade.json").write(folder / "saccade.json")
    (reason,) = reasons(model=str(folder))
    assert all(words in reason for words in ("belongs to another model", "layers=12", "layers=4"))


def test_a_model_without_a_chat_template_is_told_of(tmp_path: Path) -> None:
    told = [note for note in made().notes if "chat template" in note]
    assert len(told) == 1 and "/v1/completions" in told[0] and "--chat-template" in told[0]
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    assert made("--chat-template", str(template)).notes == ()


def test_the_arguments_are_not_those_of_the_check() -> None:
    """A configuration changes parts of what it is made from, and the server makes another one."""
    rest = ("--profiler-config", '{"profiler": "torch", "torch_profiler_dir": "/tmp"}')
    assert made(*rest).args.profiler_config == serve._parse(rest).profiler_config


TEN_MB = ("--kv-cache-memory-bytes", "10000000", "--max-model-len")
REFUSED: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    ({}, ("--polcy", "quest"), ("--polcy", "did you mean --policy?")),
    ({}, ("--max-model-len", "99000"), ("99000", "32768")),
    ({}, ("--additional-config", "{"), ("--additional-config",)),
    # 25 blocks of 12 × 32 KiB, one nobody's.
    ({}, (*TEN_MB, "8192"), ("hold 768 tokens, max_model_len=8192", "lower --max-model-len")),
    ({}, ("--additional-config", '{"saccade": {"policy": 7}}'), ("policy=7", "spec")),
    ({}, ("--additional-config", '{"saccade": {"polcy": 1}}'), ("'polcy'", "recall, rectify_together", "mean policy?")),
    ({}, ("--additional-config", '{"saccade": ["quest"]}'), ("['quest']", '"policy"')),
    ({"policy": "quest"}, ("--additional-config", '{"saccade": {"policy": "resa"}}'), ("twice", "quest", "resa")),
    ({"recall": 2.0}, (), ("recall=2.0",)),
    ({"policy": "quest", "rectify_together": True}, (), ("rectify_together", "quest", "no dense passes")),
    ({}, ("--additional-config", '{"saccade": {"policy": "resa", "rectify_together": 1}}'), ("rectify_together=1",)),
    ({"policy": "resa:rectify=8"}, ("--scheduler-cls", "vllm.v1.core.sched.scheduler.Scheduler"), ("--scheduler-cls",)),
    ({"policy": "quest:rectify=8:verify"}, ("--max-num-seqs", "8"), ("rectify=8:verify", "model runner V2")),
    ({"policy": "quest:rectify=8:verify", "recall": 0.5}, (), ("recall=0.5", "verified")),
    ({"policy": "quest:rectify=8:verify", "rectify_together": True}, (), ("rectify_together", "overwrite")),
    ({}, ("--attention-backend", "CPU_ATTN"), ("--attention-backend CUSTOM", "CPU_ATTN")),
    ({}, ("--kv-cache-dtype", "fp8_e5m2"), ("kv_cache_dtype=fp8_e5m2", "auto, bfloat16, float16, fp8, fp8_e4m3")),
    ({}, (*TEN_MB, "3300", "--kv-cache-dtype", "fp8"), ("hold 3200",)),
    ({"policy": "quest"}, (*TEN_MB, "705"), ("hold 704 tokens",)),
    ({}, ("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0"), ("kv_cache_dtype_skip_layers=0",)),
    ({"policy": "lychee_cluster"}, ("--kv-cache-dtype", "fp8"), ("lychee_cluster", "keeps means in the cache's dtype")),
    ({"policy": "quest"}, ("--kv-cache-dtype", "fp8", "--block-size", "16"), ("block_size=16", "multiples of 32")),
    ({}, ("--api-server-count", "2"), ("--api-server-count",)),
    ({}, ("--grpc",), ("--grpc: saccade serve speaks HTTP",)),
    ({}, ("--host", "no.such.host.invalid"), ("--host no.such.host.invalid",)),
    ({}, ("--enable-auto-tool-choice",), ("--tool-call-parser",)),
    ({}, ("--logits-processors", "os.path:join"), ("os.path:join names nothing", "no LogitsProcessor")),
    ({}, ("--tool-parser-plugin", "/gone/x.py"), ("--tool-parser-plugin /gone/x.py", "no such file")),
    ({}, ("--lora-modules", "a=/gone"), ("a=/gone", "--enable-lora")),
    ({"policy": "quest:page=24,budget=96"}, ("--block-size", "40"), ("block_size=40", "--block-size 96")),
]


@pytest.mark.parametrize(("ours", "rest", "words"), REFUSED, ids=lambda part: " ".join(part) or None)
def test_what_cannot_be_served_is_refused(ours: dict[str, Any], rest: tuple[str, ...], words: tuple[str, ...]) -> None:
    (reason,) = reasons(*rest, **ours)
    assert all(word in reason for word in words), reason


MIXED = Gemma3TextConfig(**SMALL, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 2)


def test_layers_with_a_window_are_left_to_vllm(tmp_path: Path) -> None:
    folder = str(model(tmp_path, MIXED))
    args = made(model=folder, policy="tidal:dense_layers=0,reselect=3").args
    assert args.attention_backend is None
    assert args.attention_config.backend_per_kind == {"full_attention": AttentionBackendEnum.CUSTOM}
    # A row that no window cuts is one of full attention.
    short = made("--max-model-len", "128", model=folder, policy="tidal:dense_layers=0,reselect=3").args
    assert short.attention_backend is AttentionBackendEnum.CUSTOM


@pytest.mark.parametrize(
    ("ours", "rest", "words"),
    [
        ({}, ("--attention-backend", "CUSTOM"), ("layers with a window", "backend_per_kind")),
        ({}, ("--attention-config", '{"backend_per_kind": {"sliding_window": "CPU_ATTN"}}'), ("backend_per_kind",)),
        ({"policy": "tidal:dense_layers=0,reselect=0"}, (), ("reselect=0", "1, 3 (full attention)")),
    ],
)
def test_windows_are_not_ours(
    tmp_path: Path, ours: dict[str, Any], rest: tuple[str, ...], words: tuple[str, ...]
) -> None:
    given = {"policy": "tidal:dense_layers=0,reselect=3", **ours}
    (reason,) = reasons(*rest, model=str(model(tmp_path, MIXED)), **given)
    assert all(word in reason for word in words), reason


HALF: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}


RECURRENT = {"layer_types": ["linear_attention", "full_attention"] * 2}
# Others are on the page that test_vllm_types holds.
UNFIT = (
    (MistralConfig(**SMALL, sliding_window=128), "none of its layers has full attention.*--disable-sliding-window"),
    (Qwen3NextConfig(**SMALL, **RECURRENT), "rectify=8.*layers of type linear_attention"),
    (Gemma3nTextConfig(**SMALL, **HALF, num_kv_shared_layers=2), "^num_kv_shared_layers=2: layers that share a KV"),
    (MiMoV2FlashConfig(**SMALL, v_head_dim=16, sliding_window=64), "its values are 16 wide, its keys 32"),
)


@pytest.mark.parametrize(("config", "told"), UNFIT, ids=[config.model_type for config, _ in UNFIT])
def test_models_that_no_policy_fits(config: Any, told: str, tmp_path: Path) -> None:
    policy = "quest:rectify=8,dense_layers=0" if config.model_type == "qwen3_next" else None
    found = reasons(model=str(model(tmp_path, config)), policy=policy)
    assert any(re.search(told, reason) for reason in found)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    (ours,), (theirs,) = reasons(model=str(tmp_path / "nowhere")), reasons(str(tmp_path / "nowhere"))
    assert "does not exist" in ours and "nowhere" in theirs


def test_the_command_prints_what_it_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[Server, str]] = []
    monkeypatch.setattr(Server, "run", lambda server: ran.append((server, os.environ[VARIABLE])))
    rest = ["--load-format", "dummy", "--port", "0"]
    done = CliRunner().invoke(app, ["serve", "--policy", "tidal:rectify=16", *rest])
    assert done.exit_code == 0, done.output
    (server, folder), *_ = ran
    told = "bundled", "layers [7] of the recipe beside", "after every 16 sparse steps", "http://127.0.0.1:0/v1"
    assert all(words in done.stdout for words in (str(server.options.policy), "32 tokens", *told))
    assert not Path(folder).exists() and VARIABLE not in os.environ


def test_the_command_prints_every_reason_on_a_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        rest = ["--pipeline-parallel-size", "2", "--kv-cache-dtype", "fp8_e5m2", "--headless", "--port", port]
        done = CliRunner().invoke(app, ["serve", *rest])
    lines = done.stderr.splitlines()
    assert (done.exit_code, done.stdout, len(lines)) == (2, "", 4)
    assert all(line.startswith("saccade: error: ") for line in lines)
    for words in ("pipeline", "fp8_e5m2", "--headless", f"port {port} of 127.0.0.1 is in use"):
        assert any(words in line for line in lines), lines


def test_vllm_that_gives_up_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(args: Namespace) -> None:
        raise RuntimeError("Engine core initialization failed.\nSee root cause above.")

    monkeypatch.setattr("vllm.entrypoints.launchers.api_server.entry.run_server", fail)
    with pytest.raises(ServingError, match=r"^vLLM stopped: Engine core initialization failed\. See root"):
        made().run()


def test_weights_are_asked_for_unless_vllm_is_told_where_they_come_from(tmp_path: Path) -> None:
    shutil.copytree(model_path(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", "saccade.json"))
    folder = str(tmp_path / "model")
    assert any("model.safetensors" in reason for reason in reasons(model=folder, policy="quest"))
    assert made("--load-format", "dummy", model=folder, policy="quest").args.load_format == "dummy"
