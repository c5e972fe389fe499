"""What is installed, by what: pinned lists, entry points, the Makefile's targets; and the tests that stay out."""

import ast
import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from parsing import parsed
from projects import ROOT, project, pyproject
from saccade.adapters.vllm.vllm_api import VERSIONS
from saccade.checkpoints.versions import TRIED

CONSTRAINTS = "constraints.txt"
LOCK = "requirements-vllm-cpu.txt"
GPU = Path("benchmarks", "gpu", "vllm")


def pinned(file: str) -> list[Requirement]:
    """What a list of pip's names, without its comments and options."""
    lines = (line.split("#")[0].strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("--")]


def names(file: str) -> list[str]:
    return [canonicalize_name(requirement.name) for requirement in pinned(file)]


@pytest.mark.parametrize("file", [CONSTRAINTS, LOCK])
def test_lists_name_one_version_each(file: str) -> None:
    assert [str(one) for one in pinned(file) if not re.fullmatch(r"==[^,*]+", str(one.specifier))] == []


def test_a_package_is_pinned_in_one_place() -> None:
    # Our tests compile Triton kernels, and vLLM's grammar library imports Triton, with or without them.
    assert set(names(CONSTRAINTS)) & set(names(LOCK)) == {"triton"}
    versions = [str(one.specifier) for file in (CONSTRAINTS, LOCK) for one in pinned(file) if one.name == "triton"]
    assert len(set(versions)) == 1, versions
    assert len(set(names(LOCK))) == len(names(LOCK))


def test_make_setup_installs_all_that_dev_asks_for() -> None:
    """By the list of versions alone, while our own package is built."""
    tables = project()
    lines = [
        *tables["dependencies"],
        *(one for name, extra in tables["optional-dependencies"].items() if name != "vllm" for one in extra),
    ]
    assert {canonicalize_name(Requirement(line).name) for line in lines} - {tables["name"]} <= set(names(CONSTRAINTS))
    assert "install -qq --no-compile --requirement constraints.txt" in make(
        "--dry-run", "--assume-new=pyproject.toml", "setup"
    )


def test_the_lock_brings_no_cuda() -> None:
    assert [name for name in names(LOCK) if name.startswith(("torch", "nvidia", "cuda"))] == []


def test_the_locks_hold_the_vllms_that_the_extra_allows() -> None:
    wanted = {one.name: one for one in map(Requirement, project()["optional-dependencies"]["vllm"])}
    held = {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in pinned(LOCK)}
    following = (ROOT / GPU / "versions.txt").read_text(encoding="utf-8").splitlines()[-1].split()[0]
    tried = [held["vllm-cpu"], following]
    assert [version.rpartition(".")[0] for version in tried] == list(VERSIONS)
    major, minor = VERSIONS[-1].split(".")
    untried = f"{major}.{int(minor) + 1}.0"
    assert [version in wanted["vllm"].specifier for version in (*tried, untried)] == [True, True, False]
    assert held["prometheus-client"] in wanted["prometheus_client"].specifier


def test_entry_points_name_what_exists() -> None:
    # Read, not imported: importing them takes vLLM. It refuses to start where a logits processor cannot be loaded.
    tables: dict[str, dict[str, str]] = project()["entry-points"]
    for target in [target for table in tables.values() for target in table.values()]:
        module, _, name = target.partition(":")
        body = parsed((ROOT / "src" / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")).body
        assert name in [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)], target


def test_the_device_machine_finds_our_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Before Python 3.11 it has another name, as in `projects`.
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    monkeypatch.setitem(sys.modules, "tomllib", toml)
    (tmp_path / "saccade-0.1.0.dist-info").mkdir()
    runpy.run_path(str(ROOT / GPU / "assemble.py"))["describe"](ROOT, tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    (named,) = distributions(path=[str(tmp_path)], name=project()["name"])
    assert found.metadata["Name"] == named.metadata["Name"] == "saccade-attention"
    assert {point.name for point in named.entry_points} == {"saccade"}


def test_setup_removes_what_it_installed_by_another_name() -> None:
    steps = make("--dry-run", "--assume-new=pyproject.toml", "setup")
    assert 0 < steps.find("uninstall -qq --yes saccade\n") < steps.find("--editable")


def test_the_source_archive_holds_what_make_needs() -> None:
    included = pyproject()["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    needed = {f"/{name.partition('/')[0]}" for name in pyproject()["tool"]["mypy"]["files"]}
    assert needed | {f"/{name}" for name in ("Makefile", "hatch_build.py", CONSTRAINTS, LOCK)} <= set(included)
    assert [name for name in included if not (ROOT / name.lstrip("/")).exists()] == []


def test_checkout_and_pack_fit_together_on_the_device_machine() -> None:
    most = dict(re.findall(r"^(\w+)_MIB=(\d+)$", (ROOT / GPU / "limits.sh").read_text(encoding="utf-8"), re.MULTILINE))
    assert int(most["CHECKOUT"]) + int(most["PACK"]) <= 62
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    sizes = [path.lstat().st_size for name in tracked if name and (path := ROOT / os.fsdecode(name)).exists()]
    assert sum(sizes) <= int(most["CHECKOUT"]) * 2**20
    assert subprocess.run(["git", "check-ignore", "--quiet", ".gpu-0/"], cwd=ROOT, check=False).returncode == 0


def test_the_pack_holds_versions_of_the_lists() -> None:
    script = (ROOT / GPU / "prepare.sh").read_text(encoding="utf-8")
    packed = re.findall(r'^NAMES="\n(.*?)"', script, re.MULTILINE | re.DOTALL)[0].split()
    held = {*names(CONSTRAINTS), *names(LOCK)}
    assert set(packed) <= held
    lines = (ROOT / GPU / "versions.txt").read_text(encoding="utf-8").splitlines()
    known = {version: more for version, _, *more in map(str.split, lines[1:])}
    assert [line for line in lines[1:] if not re.fullmatch("[0-9.]+ [0-9a-f]{64}( [a-z0-9_-]+==[^ ]+)*", line)] == []
    assert {str(one.specifier).removeprefix("==") for one in pinned(LOCK) if one.name == "vllm-cpu"} <= {*known}
    assert not held & {Requirement(more).name for line in known.values() for more in line}


def make(*arguments: str) -> str:
    """Standard output of a make that is nobody's child."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        **{"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "check": True},
    )
    return done.stdout


def test_help_lists_the_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    described = re.findall(r"^#   make (\S+)", makefile, re.MULTILINE)
    assert {"setup", "demo", "test", "setup-vllm", "test-vllm"} <= set(described)
    assert re.findall(r"^make (\S+)", make("help"), re.MULTILINE) == described
    assert [name for name in described if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_the_documentation_is_built_strictly_and_with_the_tests() -> None:
    # mkdocs counts the warnings that it logs: --quiet would let every dead link pass.
    for target in ("docs", "test"):
        assert re.search(r"-m mkdocs build --strict (?!.*--quiet)", make("--dry-run", target)), target


def test_only_the_targets_that_say_so_need_vllm() -> None:
    installs, runs = f"--requirement {LOCK}", "loadscope tests/serving"
    targets = ("test", "setup", "setup-vllm", "test-vllm", "setup-vllm-next", "test-vllm-next")
    dry = {name: make("--dry-run", f"--assume-new={LOCK}", name) for name in targets}
    assert [name for name, output in dry.items() if installs in output] == list(targets[2:])
    assert [name for name, output in dry.items() if runs in output] == ["test-vllm", "test-vllm-next"]


def test_plain_pytest_leaves_vllm_out_and_says_so(tmp_path: Path) -> None:
    for name in ("conftest.py", "limits.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path)
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "test_served.py").write_text("raise ImportError('no vLLM here')\n")
    (tmp_path / "test_plain.py").write_text("def test_plain():\n    pass\n")
    # One process for both: most of the time goes into importing torch.
    code = """
import pytest
for named in ((), ("serving",)):
    print("end", int(pytest.main(["--quiet", "-p", "no:cacheprovider", *named])))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    plain, named = re.split(r"^end 0$", done.stdout, flags=re.MULTILINE)
    left_out = [line for line in plain.splitlines() if "tests/serving" in line]
    assert len(left_out) == 1
    assert left_out[0].startswith("left out: ")
    assert "make test-vllm" in left_out[0]
    assert named.endswith("\nend 2\n")
    assert "no vLLM here" in named
    assert "left out" not in named


def test_versions_that_were_tried_are_the_same_everywhere() -> None:
    lanes = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8"))
    nightly = lanes["jobs"]["versions"]["strategy"]["matrix"]["version"]
    others = re.search(r"^OTHERS := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert others is not None and set(others[1].split()) <= set(nightly)
    run = {*nightly, *(str(one) for one in pinned(CONSTRAINTS) if one.name in TRIED)}
    minors = {
        name: {one.split("==")[1].rpartition(".")[0] for one in run if one.startswith(f"{name}==")} for name in TRIED
    }
    assert minors == {name: {*tried} for name, tried in TRIED.items()}
    for name, tried in TRIED.items():
        major, minor = tried[-1].split(".")
        (asked,) = (one for one in project()["dependencies"] if one.startswith(f"{name}>="))
        assert asked.endswith(f",<{major}.{int(minor) + 1}")
