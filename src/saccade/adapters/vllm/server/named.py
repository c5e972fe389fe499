"""Names and files that a server is told, looked up before an engine starts: without them it would end behind it."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name


def missing(args: Namespace) -> Iterator[str]:
    """What names nothing, one line each."""
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "tool_parser_plugin", "reasoning_parser_plugin"):
        told = getattr(args, name, None)
        if told and not Path(told).is_file():
            yield f"--{name.replace('_', '-')} {told}: there is no such file"
    if args.uds is not None and not Path(args.uds).absolute().parent.is_dir():
        yield f"--uds {args.uds}: there is no folder {Path(args.uds).absolute().parent}"
    if _lacks(args.generation_config):
        yield f"--generation-config {args.generation_config}: there is no such folder"
    for one in args.lora_modules or ():
        if not args.enable_lora or _lacks(one.path):
            told = "there is no such folder" if args.enable_lora else "adapters need --enable-lora"
            yield f"--lora-modules {one.name}={one.path}: {told}"
    wanted = [*(("--middleware", name) for name in args.middleware), ("--scheduler-cls", args.scheduler_cls)]
    wanted += [("--logits-processors", name) for name in args.logits_processors or ()]
    if args.enable_auto_tool_choice and not args.tool_parser_plugin:
        wanted += [("--tool-call-parser", args.tool_call_parser)]
    for flag, name in wanted:
        if not isinstance(name, str):
            continue
        try:
            _find(flag, name)
        except Exception as error:
            found = " ".join(str(error).split()) or type(error).__name__
            yield f"{flag} {name} names nothing that can be used: {found}"


def _lacks(told: str) -> bool:
    """Whether it can only be a path, which a hub's `name` or `owner/name` is not, and there is no such folder."""
    path = told.startswith(("/", "~", ".")) or ("://" not in told and told.count("/") > 1)
    return path and not Path(told).expanduser().is_dir()


def _find(flag: str, name: str) -> None:
    """Import what a name stands for; what is raised says what is against it."""
    if flag == "--tool-call-parser":
        from vllm.tool_parsers import ToolParserManager

        ToolParserManager.get_tool_parser(name)
        return
    if (":" if flag == "--logits-processors" else ".") not in name:
        raise ValueError("a module and a name in it are asked for")
    found = resolve_name(name)
    if flag == "--logits-processors":
        from vllm.v1.sample.logits_processor.interface import LogitsProcessor

        if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
            raise ValueError("it is no LogitsProcessor of vLLM's")
