"""Names and files that a server is told, looked up before an engine starts: without them it would end behind it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

_FILES = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "tool_parser_plugin", "reasoning_parser_plugin")


def missing(args: Namespace) -> Iterator[str]:
    """What names nothing, one line each."""
    for name in _FILES:
        told = getattr(args, name, None)
        if told and not Path(told).is_file():
            yield f"{_flag(name)} {told}: there is no such file"
    if args.uds is not None and not Path(args.uds).absolute().parent.is_dir():
        yield f"--uds {args.uds}: there is no folder {Path(args.uds).absolute().parent}"
    folder = args.generation_config
    if folder not in ("auto", "vllm") and not (Path(folder) / "generation_config.json").is_file() and _is_path(folder):
        yield f"--generation-config {folder}: there is no generation_config.json in it"
    for module in args.lora_modules or ():
        if not args.enable_lora:
            yield f"--lora-modules {module.name}={module.path}: adapters need --enable-lora"
        elif _is_path(module.path) and not Path(module.path).expanduser().is_dir():
            yield f"--lora-modules {module.name}={module.path}: there is no such folder"
    if isinstance(args.scheduler_cls, str):
        yield from _lookup("--scheduler-cls", args.scheduler_cls, _object)
    for name in args.middleware:
        yield from _lookup("--middleware", name, _object)
    for one in args.logits_processors or ():
        if isinstance(one, str):
            yield from _lookup("--logits-processors", one, _processor)
    if args.enable_auto_tool_choice and not args.tool_parser_plugin:
        yield from _lookup("--tool-call-parser", args.tool_call_parser, _tool_parser)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_path(told: str) -> bool:
    """Whether it can only be a path: a hub's names are `name` or `owner/name`."""
    return told.startswith(("/", "~", ".")) or told.count("/") > 1


def _lookup(flag: str, name: str, find: Callable[[str], Any]) -> Iterator[str]:
    try:
        find(name)
    except Exception as error:
        told = " ".join(str(error).split()) or type(error).__name__
        yield f"{flag} {name} names nothing that can be used: {told}"


def _object(name: str) -> Any:
    module, dot, attribute = name.rpartition(".")
    if not dot:
        raise ValueError("a module and a name in it are asked for, with a dot between them")
    return getattr(import_module(module), attribute)


def _processor(name: str) -> None:
    from vllm.v1.sample.logits_processor.interface import LogitsProcessor

    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError("module:class is asked for")
    found: Any = import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise ValueError("it is no LogitsProcessor of vLLM's")


def _tool_parser(name: str) -> None:
    from vllm.tool_parsers import ToolParserManager

    ToolParserManager.get_tool_parser(name)
