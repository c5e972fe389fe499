"""The shape of the package: which module may import which, what an import costs, which names are public."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from limits import LIMITS
from parsing import parsed
from projects import pyproject

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "saccade"
TESTS = Path(__file__).parent
MAX_LINES, MAX_TEST_LINES = 400, 500

PUBLIC_NAMES = {
    "Run",
    "sparsify",
    "Recipe",
    "Policy",
    "policy",
    "policies",
    "Method",
    "register",
    "Rectify",
    "LayerStats",
    "RunStats",
    "SaccadeError",
    "PolicyError",
    "UnsupportedModelError",
    "AttachmentError",
    "ModelFolderError",
    "DocumentError",
    "OutputError",
    "KernelError",
    "ServingError",
    "__version__",
}

# What each room of the package may import, lowest first: a row names only rooms above it in this table, so that nothing
# imports upward. A room is a top-level module or folder; "saccade" is the lazy facade `__init__.py`.
CORE = {"errors", "types", "files", "kernels", "text", "selection", "plans", "methods"}
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "files": {"errors"},
    "kernels": {"errors", "types"},
    "text": {"types"},
    "selection": {"errors", "types", "kernels", "text"},
    "plans": {"errors", "types", "files", "text", "selection"},
    "methods": CORE - {"methods", "files", "kernels", "text"},
    "decode": {"types", "kernels", "text", "selection", "plans"},
    "checkpoints": {"errors", "types", "text"},
    "recipes": {"saccade", "errors", "types", "files", "kernels", "plans", "methods", "checkpoints"},
    "adapters.hf": {*CORE, "decode", "checkpoints", "recipes"} - {"files", "selection"},
}
ARROWS["adapters.vllm"] = {*ARROWS["adapters.hf"], "selection"}
ARROWS["lm_eval"] = {"errors", "plans", "checkpoints", "recipes", "adapters.hf"}
MEASURED = {*CORE, "decode", "checkpoints", "recipes", "adapters.hf"}
ARROWS["eval"] = MEASURED - {"kernels", "text", "selection"}
ARROWS["bench"] = {*MEASURED, "adapters.vllm", "eval"} - {"files", "kernels", "text", "selection"}
ARROWS["calibrate"] = {*MEASURED, "eval"} - {"text"}
ARROWS["report"] = {"errors", "files", "plans", "eval", "calibrate"}
ARROWS["cli"] = {*ARROWS, "saccade"} - {"lm_eval"}
ARROWS["__main__"] = {"cli"}

# Rooms of the vLLM adapter, by process: what scheduler, worker and server share is the adapter's own modules.
VLLM = ("scheduler", "worker", "server")
VLLM_SHARED = {"plugin", "vllm_api", "options", "checks", "cache_dtype", "cache_spec", "clean", "lossless", "metrics"}
VLLM_SHARED |= {"engine_settings"}

# Which rooms may import which library; the standard library is free.
LIBRARIES: dict[str, set[str]] = {
    "torch": {*ARROWS} - {"errors", "files", "plans", "methods", "report", "__main__"},
    "triton": {"kernels"},
    "pydantic": {"files", "plans", "methods", "recipes"},
    "transformers": {"adapters.hf", "calibrate", "bench", "checkpoints", "cli"},
    "safetensors": {"checkpoints", "calibrate"},
    "vllm": {"adapters.vllm", "bench"},
    "prometheus_client": {"adapters.vllm"},
    "lm_eval": {"lm_eval", "eval"},
    "pyarrow": {"eval"},
    "uvloop": {"adapters.vllm"},
    "numpy": {"eval", "calibrate", "report"},
    "scipy": {"eval", "calibrate"},
    "matplotlib": {"report"},
    "jinja2": {"report"},
    "typer": {"cli"},
    "rich": {"report", "cli"},
}

# Roots beside the package, and what they import of each other; a command line imports whatever it runs.
ROOTS: dict[str, set[str]] = {
    "lab": set(),
    "claims": {"lab"},
    "tables": {"lab", "claims"},
    "benchmarks": {"lab"},
    "benchmarks.__main__": {"lab", "tables", "benchmarks"},
    "testbed": {"claims"},
}
EVERYWHERE = (PACKAGE, *(ROOT / name for name in ROOTS if "." not in name))

IMPLEMENTATIONS = {"reference", "cpu", "native", "triton"}


@dataclass(frozen=True)
class Import:
    """An import statement somewhere in a module, at whatever depth: lazy imports are arrows too."""

    importer: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def modules(root: Path) -> dict[str, Path]:
    """Dotted names, from the package's own on, of all modules below `root`."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: set[str]) -> Iterator[Import]:
    """Every module that `path` imports; `from a import b` counts as `a.b` where that is a module."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join(filter(None, (*above, base)))
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(name, inner if inner in known else base, node.lineno)


def room(module: str) -> str:
    """The row of the table that a module of the package belongs to."""
    parts = module.split(".")
    if parts[1:2] == ["adapters"]:
        return ".".join(parts[1:3])
    return parts[1] if len(parts) > 1 else parts[0]


def every_import(*roots: Path) -> list[Import]:
    """All imports within the roots and between them, lazy ones among them; the package's lazy facade makes none."""
    found = {name: path for root in roots for name, path in modules(root).items()}
    names = set(found)
    return [
        edge
        for name, path in found.items()
        for edge in imports(name, path, names)
        if name != PACKAGE.name and edge.target in names
    ]


def circles(*roots: Path) -> list[list[str]]:
    """Files that import each other in a ring, however long; a package's `__init__` counts as a file."""
    below: dict[str, set[str]] = {}
    for edge in every_import(*roots):
        if edge.target not in (edge.importer, PACKAGE.name):
            below.setdefault(edge.importer, set()).add(edge.target)
    reach = {name: _reach(below, name) for name in sorted(below)}
    rings = ((start, [one for one in own if start in reach.get(one, ())]) for start, own in reach.items())
    return [[start, *sorted(ring)] for start, ring in rings if ring]


def _reach(below: dict[str, set[str]], start: str) -> set[str]:
    reached, waiting = set(), list(below.get(start, ()))
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += below.get(name, ())
    return reached


def broken_arrows(root: Path) -> list[str]:
    """Everything below `root` that imports what the tables do not allow."""
    found = modules(root)
    names = set(found)
    complaints = []
    for name, path in found.items():
        own = room(name)
        if name in (root.name, f"{root.name}.adapters"):
            continue
        if own not in ARROWS:
            complaints.append(f"{name}: unknown room {own!r}; give it a row in ARROWS")
            continue
        for edge in imports(name, path, names):
            top = edge.target.partition(".")[0]
            if top == root.name:
                other = room(edge.target)
                if other != own and other not in ARROWS[own]:
                    complaints.append(f"{edge}: {own} has no arrow to {other}")
                if own == other == "kernels" and not _op_arrow(name, edge.target):
                    complaints.append(f"{edge}: implementations stand alone; only their own api.py chooses")
            elif top not in sys.stdlib_module_names and own not in LIBRARIES.get(top, ()):
                complaints.append(f"{edge}: only {sorted(LIBRARIES.get(top, ())) or 'no room'} may")
    return complaints


def _op_arrow(importer: str, target: str) -> bool:
    """Whether one module below `kernels` may import another: shared helpers always, an op only from its own api."""
    source, goal = importer.split(".")[2:], target.split(".")[2:]
    if len(goal) < 1 or goal[0].startswith("_"):
        return True
    if not source or source[0].startswith("_"):
        return False
    if source[0] != goal[0]:
        return goal[1:] in ([], ["api"]) and source[-1] not in IMPLEMENTATIONS
    return source[-1] not in IMPLEMENTATIONS and (goal[-1] not in IMPLEMENTATIONS or source[-1] == "api")


def test_arrows() -> None:
    assert broken_arrows(PACKAGE) == []


def test_only_rooms_that_may_import_numpy_make_arrays_of_tensors() -> None:
    # `tensor.numpy()` needs numpy without importing it.
    arrays = [
        f"{name}:{node.lineno} {node.attr}"
        for name, path in modules(PACKAGE).items()
        if room(name) not in LIBRARIES["numpy"]
        for node in ast.walk(parsed(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("numpy", "from_numpy")
    ]
    assert arrays == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(*EVERYWHERE) == []


def root_of(module: str) -> str:
    """The row of `ROOTS` that a module belongs to."""
    return module if module in ROOTS else module.partition(".")[0]


def test_roots_import_each_other_as_the_table_says() -> None:
    """And nothing else: the package imports none of them, and every arrow is used."""
    used = {(root_of(edge.importer), root_of(edge.target)) for edge in every_import(*EVERYWHERE)}
    between = {(own, other) for own, other in used if own != other and other != PACKAGE.name}
    assert between == {(own, other) for own, others in ROOTS.items() for other in others}


def test_every_root_is_watched() -> None:
    assert {path.parent for path in ROOT.glob("*/__init__.py")} == {*EVERYWHERE[1:]}
    assert {ROOT / name for name in pyproject()["tool"]["mypy"]["files"]} == {*EVERYWHERE}
    assert {f"lines of {path.name}" for path in EVERYWHERE[1:]} <= LIMITS.keys()


def test_a_circle_between_roots_is_found(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("lab", "claims", "tables")]
    for root, line in zip(
        roots, ("", "from lab import job", "def late():\n    from claims.job import run"), strict=True
    ):
        root.mkdir()
        (root / "job.py").write_text(f"{line}\n")
    assert circles(*roots) == []
    (tmp_path / "lab" / "job.py").write_text("from tables import job\n")
    assert [ring[0] for ring in circles(*roots)] == ["claims.job", "lab.job", "tables.job"]


def test_a_circle_of_files_is_found(tmp_path: Path) -> None:
    package = tmp_path / "saccade"
    package.mkdir()
    for name, line in (
        ("__init__", ""),
        ("a", "from . import b"),
        ("b", "def late():\n    from .c import x"),
        ("c", ""),
    ):
        (package / f"{name}.py").write_text(f"{line}\n")
    assert circles(package) == []
    (package / "c.py").write_text("from saccade.a import y\n")
    assert circles(package) == [
        [name, "saccade.a", "saccade.b", "saccade.c"] for name in ("saccade.a", "saccade.b", "saccade.c")
    ]


def test_vllm_processes_share_only_what_is_beside_them() -> None:
    """Worker, scheduler and server never import each other, nor does what they share import them, but the plugin."""
    strangers = []
    for edge in every_import(PACKAGE):
        source, target = (name.split(".")[2:] for name in (edge.importer, edge.target))
        if (
            edge.importer.split(".")[1:3] != ["adapters", "vllm"]
            or target[:1] != ["vllm"]
            or target[1:2] == source[1:2]
        ):
            continue
        if target[1:2] and target[1] in VLLM and source[1:] != ["plugin"]:
            strangers.append(str(edge))
    assert strangers == []
    shared = {path.stem for path in (PACKAGE / "adapters" / "vllm").glob("*.py")} - {"__init__"}
    assert shared == VLLM_SHARED


def test_the_table_has_no_arrow_upward() -> None:
    seen = {"saccade"}
    for name, below in ARROWS.items():
        assert below <= seen, f"{name} may import {below - seen}, which stand below it in the table"
        seen.add(name)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/topk/api.py", "from saccade.plans.plan import Plan"),
        ("kernels/topk/api.py", "from ...plans.roles import RoleMap"),
        ("kernels/page_bounds/cpu.py", "from saccade.kernels.page_bounds import reference"),
        ("kernels/page_bounds/cpu.py", "from . import reference"),
        ("kernels/topk/reference.py", "from .cpu import topk"),
        ("kernels/topk/reference.py", "from saccade.kernels.topk.api import topk"),
        ("kernels/topk/api.py", "from saccade.kernels.page_bounds.cpu import page_scores"),
        ("kernels/page_bounds/cpu.py", "from saccade.kernels.topk.api import topk"),
        ("kernels/_flat.py", "from .topk.api import topk"),
        ("kernels/topk/api.py", "import transformers"),
        ("kernels/topk/api.py", "import numpy as np"),
        ("selection/rules.py", "from ..methods import quest"),
        ("selection/exact.py", "from ..decode.attend import attend"),
        ("methods/quest.py", "from ..adapters.hf import sparsify"),
        ("methods/quest.py", "def late():\n    from saccade import sparsify"),
        ("methods/quest.py", "import saccade.decode.attend"),
        ("decode/attend.py", "import transformers.cache_utils"),
        ("adapters/hf/run.py", "from ...eval import facts"),
        ("eval/facts.py", "import matplotlib.pyplot"),
        ("eval/facts.py", "from ..cli import main"),
        ("eval/facts.py", "from rich.console import Console"),
        ("types.py", "import somebody_elses_library"),
        ("novel.py", ""),
    ],
)
def test_a_broken_arrow_is_found(tmp_path: Path, file: str, line: str) -> None:
    package = tmp_path / "saccade"
    kernels, core = ("kernels", "kernels/topk", "kernels/page_bounds"), ("selection", "plans", "methods", "decode")
    for name in ("", *kernels, *core, "eval", "adapters", "adapters/hf"):
        (package / name).mkdir(exist_ok=True)
        (package / name / "__init__.py").touch()
    for name in ("kernels/topk/api", "kernels/page_bounds/cpu", "kernels/topk/reference", "kernels/page_bounds/api"):
        (package / f"{name}.py").touch()
    for name in ("kernels/page_bounds/cpu", "plans/plan", "plans/roles", "eval/facts", "decode/attend"):
        (package / f"{name}.py").touch()
    assert broken_arrows(package) == []
    path = package / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{line}\n")
    assert len(broken_arrows(package)) == 1


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_every_arrow_is_used() -> None:
    """A table that allows what nobody does would not see who begins to."""
    names = set(modules(PACKAGE))
    used: set[tuple[str, str]] = set()
    for name, path in modules(PACKAGE).items():
        for edge in imports(name, path, names):
            top = edge.target.partition(".")[0]
            used.add((room(name), room(edge.target) if top == PACKAGE.name else top))
    allowed = {(own, other) for own, others in ARROWS.items() if own != "cli" for other in others}
    allowed |= {(own, library) for library, owners in LIBRARIES.items() for own in owners}
    assert sorted(allowed - used) == []


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    most = {path: 500 if "kernels" in path.parts else MAX_LINES for path in lengths}
    assert {path: length for path, length in lengths.items() if length > most[path]} == {}


def test_test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in TESTS.rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > MAX_TEST_LINES} == {}


def python(code: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names() -> None:
    import saccade

    assert set(saccade.__all__) == PUBLIC_NAMES
    assert len(saccade.__all__) == len(PUBLIC_NAMES)
    for name in PUBLIC_NAMES:
        assert getattr(saccade, name) is not None


def test_importing_saccade_loads_no_library() -> None:
    heavy = ("torch", "transformers", "vllm", "triton", "matplotlib", "numpy", "pydantic")
    assert python(f"import sys, saccade\nprint([name for name in {heavy} if name in sys.modules])").strip() == "[]"


# Without the parts that import vLLM, which is not installed everywhere.
IMPORT_EVERYTHING = """
from importlib import import_module
from pkgutil import walk_packages
import saccade
for module in walk_packages(saccade.__path__, "saccade."):
    needs_vllm = module.name.startswith(("saccade.adapters.vllm.", "saccade.bench.vllm_"))
    if not needs_vllm and not module.name.endswith("__main__"):
        import_module(module.name)
"""


def test_importing_everything_patches_nothing_and_keeps_public_names() -> None:
    """A submodule called `policy` would replace the function of that name the moment somebody imports it."""
    before = """
import sys
import torch, transformers
import transformers.cache_utils, transformers.masking_utils, transformers.modeling_utils
import transformers.models.llama.modeling_llama, transformers.integrations.sdpa_attention
from transformers import AttentionInterface, GenerationMixin, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
watched = {
    name: module for name, module in list(sys.modules.items())
    if name == "torch" or name.startswith(("torch.nn", "transformers.")) or name == "transformers"
}
owners = {**watched, "model": PreTrainedModel, "generation": GenerationMixin, "module": torch.nn.Module}
snapshot = {name: dict(vars(owner)) for name, owner in owners.items()}
names = sorted(AttentionInterface().valid_keys()), sorted(AttentionMaskInterface().valid_keys())
"""
    after = """
changed = [
    f"{name}.{key}" for name, owner in owners.items() for key, value in snapshot[name].items()
    if vars(owner).get(key, None) is not value and not key.startswith("__")
]
assert (sorted(AttentionInterface().valid_keys()), sorted(AttentionMaskInterface().valid_keys())) == names
changed += [name for name in saccade.__all__ if isinstance(getattr(saccade, name), type(sys))]
assert saccade.policy("dense").name == "dense" and "dense" in saccade.policies()
print(changed)
"""
    assert python(before + IMPORT_EVERYTHING + after).strip() == "[]"
