"""What a page holds between `<!-- made: NAME -->` and `<!-- end -->`, and how it gets there."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claims.stored import stored, stored_json
from saccade.errors import SaccadeError
from saccade.report.labels import family, labels

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

_BLOCK = re.compile(r"(?P<begin><!-- made: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
_LISTED = re.compile(r"<!-- begin: .*?<!-- end -->", re.DOTALL)
"""The lists of models, which commands in tests/acceptance write."""

Results = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Made:
    """Lines of Markdown that follow from a file of results, or from the code alone.

    Attributes:
        lines: what they are, from the file's content.
        file: its name in docs/results, without .json; "": nothing was measured.
        command: what writes the file.
    """

    lines: Callable[[Results], Sequence[str]]
    file: str = ""
    command: str = ""

    def text(self) -> str:
        """Lines, an empty one around them; where the file is not there, what would make it."""
        name = f"{self.file}.json"
        if self.file and not stored(name).is_file():
            lines: Sequence[str] = [f"*To be measured for this version: `{self.command}` writes `{name}`.*"]
        else:
            lines = self.lines(stored_json(name, self.command) if self.file else {})
        # What stands below a table says where it comes from, in small print.
        return "\n".join(
            ["", *(line if not line or line[0] in "|*!" else f"<small>{line}</small>" for line in lines), "", ""]
        )


def filled(text: str, blocks: Mapping[str, Made]) -> str:
    """A page with what its marks ask for.

    Raises:
        SaccadeError: a mark without a block of its name.
    """

    def one(found: re.Match[str]) -> str:
        begin, name, end = found.group("begin", "name", "end")
        if name not in blocks:
            raise SaccadeError(f"table {name!r} is not valid; there are {', '.join(blocks)}")
        return f"{begin}{blocks[name].text()}{end}"

    return _BLOCK.sub(one, text)


def unmade(text: str) -> str:
    """The rest of a page: what somebody wrote."""
    return _LISTED.sub("", _BLOCK.sub("", text))


def typed(text: str) -> str:
    """What somebody wrote, without code."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", unmade(text), flags=re.DOTALL | re.MULTILINE)


def told(environment: Results, command: str, file: str, root: str = "") -> str:
    """A line below a table: where, with what and when it was measured, and by which command.

    `root` leads from the page to docs/.
    """
    versions = environment["versions"]
    own = environment.get("cpu") or environment.get("processor")
    parts = [str(own if environment["device"] in ("cpu", None) else environment["device"]), str(environment["dtype"])]
    if environment["device"] == "cpu":
        parts += [f"{environment['threads']} thread{'s' if environment['threads'] > 1 else ''}", environment["kernels"]]
    parts += [f"torch {versions['torch']}", (environment.get("date") or environment["timestamp"])[:10]]
    return f"{', '.join(parts)}. {source(command, file, root)}"


def named(specs: Iterable[str], shape: Mapping[str, Any] | None = None) -> dict[str, str]:
    """What a table calls policies, which is what reports call them, without budgets; `shape`: a run's environment."""
    told = {name: (shape or {}).get(name, 0) for name in ("kv_heads", "layers")}
    specs = list(specs)
    found = labels(map(family, specs), **told)
    return {spec: f"`{found[family(spec)]}`" for spec in specs}


def source(command: str, file: str, root: str = "") -> str:
    """The command, by its name of today, and a link to what it wrote."""
    if "--clients" in command:
        command = command.replace("saccade bench serve", "python -m benchmarks serve")
    return f"`{command}` ([{file}.json]({root}results/{stored(f'{file}.json').name}))"
