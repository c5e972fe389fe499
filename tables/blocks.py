"""Every block by its name: what a page asks for with `<!-- made: NAME -->`."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from claims.comparison import page as compared
from claims.eviction.report import section as eviction
from claims.gates import page as gates
from claims.gates.variants import VARIANTS
from claims.judging import page as verdicts
from claims.judging.claim import PAPERS
from claims.stored import stored, stored_json
from saccade.adapters.vllm.vllm_api import VERSIONS
from saccade.checkpoints.versions import TRIED
from saccade.files import replace_text

from . import counted, decoding, front, lossless, pictures, quality, serving
from .page import DOCS, ROOT, Made, Results, filled, told

_DECODE = (
    "taskset -c 0 python -m benchmarks decode --context 0,32768,131072 --threads 1 --steps 9 "
    "--policy tidal:reselect=15 --policy less_is_more:reselect=15 --policy quest "
    "--policy lychee_decode:roles=every:4 --policy lychee_cluster --policy resa:rectify=none --policy streaming "
    "--json docs/results/decode_cpu.json"
)
_SLICES = {
    "decode_cpu_gemma3": "gemma-3-12b:18 --context 131072",
    "decode_cpu_gptoss": "gpt-oss-20b:24:4 --context 32768,131072",
    "decode_cpu_qwen3next": "qwen3-next-80b:48:10 --context 131072",
}
"""Layers that fit into 24 GB, at which contexts; as many experts as a token takes, which are what one row reads."""
_SLICE = (
    "taskset -c 0 saccade bench decode --shape {shape} --threads 1 --steps 6 "
    "--baseline transformers,torch-sdpa --policy tidal:dense_layers=0 --policy less_is_more:dense_layers=0 "
    "--policy quest:dense_layers=0 --policy resa:rectify=none,dense_layers=0 --json docs/results/{file}.json"
)
_SERVE = (
    "taskset -c 0 saccade bench serve --context 8192,32768 --batch 1,4 --threads 1 "
    "--policy less_is_more:reselect=15 --policy quest --steps 9 --json docs/results/serve_cpu.json"
)
_CLIENTS = (
    "taskset -c 0 python -m benchmarks serve --clients 4 --context 4096,8192 --shared 0.95 --new-tokens 128 "
    "--requests 12 --threads 1 --policy less_is_more:reselect=15 --policy quest "
    "--json docs/results/serve_clients_cpu.json"
)
_PASSES = (
    "python -m benchmarks.gpu.passes docs/results/passes_h200.json --heads 32x8x128,32x4x128 "
    "--points 131072x1,131072x4,32768x8"
)
_LAYERS = "saccade calibrate layers --task kv --context 4096 --budgets 16,64,256 --output-dir results/layers"
_TUNE = "saccade tune --context 1024 --agreement 0.95 --dtype float32 --output-dir results/tune"
_UPKEEP = "python -m claims upkeep --budget 256,1024 --json docs/results/upkeep.json --picture docs/images/upkeep.svg"
_CODER = "models/qwen2.5-coder-0.5b"

_SPEEDS = "v1 more rectified large cluster lossless lossless-28 adaptive rejected qwen3 qwen3-fp8 glm fp8 gemma3 gptoss"
"""Of which steps there are tables, as their files are called."""
_STEPS = "saccade bench serve"


def _slice(name: str, shape: str) -> Made:
    """The decode benchmark of the first layers of a model that does not fit."""
    command = _SLICE.format(shape=shape, file=name)
    return Made(partial(decoding.steps, command=command, file=name), name, command)


def _speed(name: str) -> Made:
    return Made(partial(serving.speed, file=name), name, _STEPS)


def _claims(paper: str) -> Made:
    """The ledger's verdicts on a paper, from all of docs/results/claims."""
    return Made(lambda _: verdicts.paper_lines(paper))


def _compare(thousands: int) -> str:
    much, copy, file = " --texts 17 --budgets 4096", "-yarn4" if thousands > 32 else "", f"compared_{thousands}k"
    asked = {30: "30720 --texts 24 --budgets 1024,4096", 64: f"65536{much}", 126: f"126000{much}"}.get(thousands)
    more = f"{copy} --context {asked} --output-dir results/{file}" if asked else ""
    return f"python -m claims compare --model models/qwen2.5-coder-1.5b{more} --plain 0 --json docs/results/{file}.json"


def _compared(lines: Callable[[Results], list[str]], root: str, thousands: int, results: Results) -> list[str]:
    *body, asked = lines(results)
    return [*body, f"{asked}; {told(results['environment'], _compare(thousands), f'compared_{thousands}k', root)}"]


BLOCKS: Mapping[str, Made] = {
    "demo": Made(quality.demo, "demo", "make demo"),
    "verify": Made(quality.verify, "verify", "python tests/acceptance/check_verify.py 500 docs/results/verify.json"),
    "layers": Made(quality.layers, "layers", _LAYERS),
    "gates": Made(gates.section, "gates", gates.command({"runs": [{"variant": name} for name in VARIANTS]})),
    "gates-published": Made(partial(gates.section, model=_CODER), *gates.made(_CODER)),
    "tune": Made(quality.tune, "tune", _TUNE),
    "promise": Made(quality.promise, "promise", "python -m claims promise"),
    "promise-power": Made(quality.power, "promise", "python -m claims promise"),
    "upkeep": Made(quality.upkeep, "upkeep", _UPKEEP),
    "accumulation": Made(quality.accumulation, "accumulation", "python -m claims accumulation"),
    "eviction": Made(eviction, "eviction", "python -m claims eviction"),
    "growth": Made(quality.growth, "growth", "python -m benchmarks growth --json docs/results/growth.json"),
    "serve-h200": _speed("serve_h200"),
    **{f"serve-h200-{of}": _speed(f"serve_h200_{of.replace('-', '_')}") for of in _SPEEDS.split()},
    "serve-h200-versions": Made(partial(serving.versions, file="serve_versions_h200"), "serve_versions_h200", _STEPS),
    "serve-h200-ceiling": Made(serving.ceiling, "serve_h200", _STEPS),
    "serve-h200-slower": Made(serving.slower, "serve_h200", _STEPS),
    "lossless": Made(partial(lossless.gains, file="serve_h200"), "serve_h200", "python -m benchmarks tables"),
    "drafts": Made(partial(lossless.accepted, file="drafts_h200"), "drafts_h200", lossless.COUNTED),
    "drafts-rates": Made(partial(lossless.rates, file="drafts_h200"), "drafts_h200", lossless.COUNTED),
    "serve-h200-engines": Made(serving.engines, "serve_h200", _STEPS),
    "serve-h200-more-ceiling": Made(serving.ceiling, "serve_h200_more", _STEPS),
    "serve-h200-glm-ceiling": Made(partial(serving.ceiling, least=serving.SHORT), "serve_h200_glm", _STEPS),
    "agent-h200": Made(partial(serving.day, file="agent_h200"), "agent_h200", "python -m benchmarks agent"),
    "agent-h200-half": Made(
        partial(serving.day, file="agent_h200_half"), "agent_h200_half", "python -m benchmarks agent"
    ),
    "serve-h200-gemma3-ceiling": Made(serving.ceiling, "serve_h200_gemma3", _STEPS),
    "serve-h200-gptoss-ceiling": Made(serving.ceiling, "serve_h200_gptoss", _STEPS),
    "front-methods": Made(partial(_compared, compared.short, "docs/", 8), "compared_8k", _compare(8)),
    **{
        f"compared-{size}k": Made(partial(_compared, compared.whole, "", size), f"compared_{size}k", _compare(size))
        for size in (8, 30, 64, 126)
    },
    "front-speed": Made(front.speed, "serve_h200", _STEPS),
    "serve-cpu": Made(partial(serving.speed, file="serve_cpu"), "serve_cpu", _SERVE),
    "serve-clients-cpu": Made(
        partial(serving.load, command=_CLIENTS, file="serve_clients_cpu"), "serve_clients_cpu", _CLIENTS
    ),
    **{
        name.replace("_", "-"): Made(partial(serving.load, file=name), name, "python -m benchmarks serve")
        for name in (f"serve_clients_{of}h200" for of in ("", "cold_", "long_", "drafts_", "stream_"))
    },
    "passes": Made(partial(decoding.passes, command=_PASSES, file="passes_h200"), "passes_h200", _PASSES),
    "decode-cpu": Made(partial(decoding.steps, command=_DECODE), "decode_cpu", _DECODE),
    **{name.replace("_", "-"): _slice(name, shape) for name, shape in _SLICES.items()},
    **{f"claims-{paper.lower()}": _claims(paper) for paper in PAPERS},
    "claims-worth": Made(lambda _: verdicts.worth_lines()),
    "cost": Made(counted.cost),
    "texts-needed": Made(counted.texts),
    "recipes": Made(counted.recipes),
    "versions-vllm": Made(partial(counted.versions, of="vLLM", tried=VERSIONS)),
    "versions-transformers": Made(partial(counted.versions, of="transformers", tried=TRIED["transformers"])),
}


def _trial() -> str:
    """The trial of gates, whose picture's module needs matplotlib."""
    from claims.gates.picture import trial_picture

    return _of("gates", trial_picture)


def _of(file: str, draw: Callable[[Results], str]) -> str:
    """What is drawn from a file of results."""
    return draw(stored_json(f"{file}.json", "the command beside its table"))


PICTURES: Mapping[str, Callable[[], str]] = {
    "serve_h200.svg": partial(_of, "serve_h200", pictures.step_times),
    "lossless_h200.svg": partial(_of, "serve_h200", lossless.picture),
    "demo_accuracy.svg": partial(_of, "demo", pictures.answers),
    "demo_recall.svg": partial(_of, "demo", pictures.recalls),
    **({gates.PICTURE: _trial} if stored("gates.json").is_file() else {}),
    **{verdicts.picture_name(paper): partial(verdicts.paper_picture, paper) for paper in verdicts.pictured()},
}
"""Files in docs/images, and what draws them."""


def pages() -> list[Path]:
    """Every page that somebody writes, the log left out."""
    return [ROOT / "README.md", *(path for path in sorted(DOCS.rglob("*.md")) if path.name != "log.md")]


def drawn(name: str) -> str:
    """The picture of this name, as SVG."""
    return PICTURES[name]()


def write() -> list[str]:
    """Fill all pages and draw all pictures anew; names of those that changed."""
    wanted = {path: filled(path.read_text(encoding="utf-8"), BLOCKS) for path in pages()}
    wanted |= {DOCS / "images" / name: drawn(name) for name in PICTURES}
    changed = []
    for path, new in wanted.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != new:
            replace_text(path, new)
            changed.append(str(path.relative_to(ROOT)))
    return changed
