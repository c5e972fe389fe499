"""What goes out with a version: one number, a changelog by its form, papers cited, wheels, and CI elsewhere."""

import ast
import re
import runpy
import struct
import sys
from types import ModuleType
from typing import Any

import pytest
import yaml

import saccade
from parsing import parsed
from projects import ROOT, project, pyproject

CATEGORIES = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
"""Those of Keep a Changelog, in its order."""
UNPICKLING = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
GLIBC = b"\0libm.so.6\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.2.5\0"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def citation() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(read("CITATION.cff"))
    return loaded


def test_one_version_everywhere() -> None:
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", read("CHANGELOG.md"), re.MULTILINE)
    cited = citation()
    assert released[0] == (saccade.__version__, str(cited["date-released"]))
    assert cited["version"] == saccade.__version__
    assert "version" in project()["dynamic"]


def test_the_changelog_keeps_its_form() -> None:
    sections = re.split(r"^## ", read("CHANGELOG.md"), flags=re.MULTILINE)[1:]
    names = [section.partition("\n")[0] for section in sections]
    assert names[0] == "[Unreleased]"
    assert [name for name in names[1:] if not re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", name)] == []
    for name, section in zip(names, sections, strict=True):
        categories = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert categories == [category for category in CATEGORIES if category in categories], name
        lines = [line for line in section.splitlines() if line.startswith("- ")]
        assert len(lines) == len(set(lines)), name


def test_the_citation_has_what_its_schema_asks_for() -> None:
    cited = citation()
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["license"] == project()["license"]
    assert cited["authors"] == [{"name": "The saccade authors"}] == project()["authors"]
    for paper in cited["references"]:
        assert {"type", "title", "authors", "year", "url"} <= set(paper)
        assert all(set(author) == {"family-names", "given-names"} for author in paper["authors"])


def test_the_papers_are_those_that_the_methods_name() -> None:
    ours, baselines = ("tidal", "less_is_more", "lychee_decode", "lychee_cluster", "resa"), ("streaming", "quest")
    named = [saccade.policies()[name].source.partition(", arXiv ") for name in (*ours, *baselines)]
    papers = citation()["references"]
    assert [paper["identifiers"][0]["value"] for paper in papers] == [f"arXiv:{number}" for _, _, number in named]
    addresses = [f"https://arxiv.org/abs/{number}" for _, _, number in named]
    assert [paper["url"] for paper in papers] == addresses
    methods = zip(named[: len(ours)], addresses, strict=False)
    assert project()["urls"] == {f"Paper: {name}": url for (name, _, _), url in methods}


def test_the_metadata_names_every_python_that_ci_runs() -> None:
    workflow = yaml.safe_load(read(".github/workflows/ci.yml"))
    tried = workflow["jobs"]["pythons"]["strategy"]["matrix"]["python"]
    classifiers = project()["classifiers"]
    prefix = "Programming Language :: Python :: "
    assert [name.removeprefix(prefix) for name in classifiers if re.fullmatch(rf"{prefix}3\.\d+", name)] == tried
    assert project()["requires-python"] == f">={tried[0]}"
    assert [name for name in project()["license-files"] if not (ROOT / name).is_file()] == []


def test_github_runs_what_ci_runs() -> None:
    jobs = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]
    ran = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in ran
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    named = {word for line in ran for word in line.split() if word.startswith(("tests/", ".ci/"))}
    assert [word for word in named if not (ROOT / word).exists()] == []
    # YAML reads the key `on` as a truth value.
    assert set(yaml.safe_load(read(".github/workflows/ci.yml"))[True]) == {"push", "pull_request"}


def test_github_builds_a_wheel_for_each_platform() -> None:
    jobs = yaml.safe_load(read(".github/workflows/wheels.yml"))["jobs"]
    platforms = [row["platform"] for row in jobs["wheels"]["strategy"]["matrix"]["include"]]
    assert platforms == ["manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "macosx_11_0_arm64"]
    table = pyproject()["tool"]["cibuildwheel"]
    # One Python builds them all; the image is the one whose glibc the platform names.
    assert table["build"] == [f"cp312-{re.sub('(?<=[a-z])_[0-9]+_[0-9]+', '', name)}" for name in platforms]
    assert {table[f"manylinux-{name}-image"] for name in ("x86_64", "aarch64")} == {"manylinux_2_28"}


def test_nothing_is_unpickled_and_no_code_of_a_model_runs() -> None:
    # SECURITY.md says so.
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = (
                    [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                )
                found += [name for name in names if name.partition(".")[0] in UNPICKLING]
            elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save", "torch.hub"):
                found.append(ast.unparse(node))
            elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                found += [] if ast.unparse(node.value) == "False" else [ast.unparse(node)]
    assert found == []


def of_macos(version: int) -> bytes:
    """The beginning of a library of macOS: its header, a command that says something else, and its version."""
    header = struct.pack("<8I", 0xFEEDFACF, 0, 0, 6, 2, 0, 0, 0)
    return header + struct.pack("<6I", 0xD, 24, 0, 0xF0000, 0, 0) + struct.pack("<6I", 0x32, 24, 1, version, 0, 0)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """hatch_build.py, without the hatchling that only a build has."""
    stand_in = ModuleType("hatchling.builders.hooks.plugin.interface")
    stand_in.BuildHookInterface = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    return runpy.run_path(str(ROOT / "hatch_build.py"))


@pytest.mark.parametrize(
    ("library", "ours", "tag"),
    [
        (GLIBC, ["linux_x86_64", "manylinux_2_36_x86_64", "manylinux_2_35_x86_64"], "manylinux_2_34_x86_64"),
        (b"\0libc.musl-x86_64.so.1\0", ["linux_x86_64", "musllinux_1_2_x86_64"], "musllinux_1_2_x86_64"),
        (b"", ["macosx_14_0_arm64", "macosx_13_0_arm64"], "macosx_14_0_arm64"),
        (of_macos(0xB0000), ["macosx_15_0_arm64", "macosx_14_0_arm64"], "macosx_11_0_arm64"),
        (of_macos(0xA0F00), ["macosx_13_0_x86_64", "macosx_12_0_x86_64"], "macosx_10_15_x86_64"),
        (GLIBC, ["linux_sparc"], "linux_sparc"),
    ],
)
def test_a_wheel_says_what_its_library_needs(hook: dict[str, Any], library: bytes, ours: list[str], tag: str) -> None:
    assert hook["platform_tag"](library, ours) == tag
