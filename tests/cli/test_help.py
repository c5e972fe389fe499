"""Help and lists: complete, and fast because nothing heavy is imported for them."""

import subprocess
import sys
from typing import Any

import pytest
from typer import Typer
from typer.main import get_command

import saccade
from claims.__main__ import app as claims
from commands import Invoke
from saccade.cli import app

LIGHT = """
import sys
from saccade.cli import main
for arguments in {arguments}:
    sys.argv = ["saccade", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
heavy = {{"torch", "transformers", "matplotlib", "scipy", "vllm", "prometheus_client"}} & set(sys.modules)
assert not heavy, heavy
"""


def test_the_module_is_the_command_line_and_help_does_not_wait_for_torch() -> None:
    given = "--help, --version, compare --help, generate --help, policies --help, serve --help, serve -h"
    arguments = [one.split() for one in given.split(", ")]
    subprocess.run([sys.executable, "-c", LIGHT.format(arguments=arguments)], check=True, timeout=60)
    done = subprocess.run(
        [sys.executable, "-m", "saccade", "--version"], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.strip() == saccade.__version__


def test_help_teaches_by_example_and_lists_every_policy_and_option(invoke: Invoke) -> None:
    for command in ("compare", "generate", "serve"):
        assert f"saccade {command} " in invoke(command, "--help").output.split("Examples:")[1]
    output = invoke("policies").output
    for name, description in saccade.policies().items():
        assert all(words in output for words in (name, description.source, *description.defaults))


@pytest.mark.parametrize("app", [app, claims], ids=["saccade", "claims"])
def test_no_option_has_its_own_name_as_placeholder(app: Typer) -> None:
    """typer 0.27 takes such a placeholder for the option: `--RATE` instead of `--rate`."""
    named = [
        f"{path} {parameter.opts[0]}"
        for path, command in _commands(get_command(app), "")
        for parameter in command.params
        if parameter.metavar and parameter.opts[0].lower() == f"--{parameter.metavar.lower()}"
    ]
    assert named == []


def _commands(command: Any, path: str) -> list[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    return [(path, command), *(found for name, one in inner.items() for found in _commands(one, f"{path} {name}"))]
