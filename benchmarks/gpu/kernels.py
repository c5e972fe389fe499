"""Single operations of a layer, each checked, then timed in CUDA graphs in turn with the best dense attention."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from saccade.decode.state import own_indexes
from saccade.errors import KernelError
from saccade.kernels.dense_decode_scores.api import dense_decode_scores
from saccade.kernels.dense_pass.api import dense_pass
from saccade.kernels.hybrid_decode.api import hybrid_decode
from saccade.kernels.page_bounds.api import page_scores, update_page_bounds
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.kernels.topk.api import topk
from saccade.plans.plan import Plan, layer_roles
from saccade.selection.clusters.index import ClusterLayer
from saccade.selection.clusters.selector import ClusterSelector
from saccade.selection.rules.rank_union import RankUnion
from saccade.selection.rules.ratio import Ratio
from saccade.selection.rules.top_k import TopK
from saccade.text.history import TokenHistory
from saccade.types import ModelShape, Rows, Selection, Softmax

from . import dense
from .caches import Cell, Heads, bounds_oracle, page_score_oracle, score_oracle, sparse_oracle
from .environment import environment
from .timing import Call, Captured, Deadline, arguments, bandwidth, interleaved, reason, relative_error, write

PAGE = 16
BUDGETS = (4096, 2048)
BATCHES = (1, 4, 7)
CONTEXTS = (131_072, 32_768, 262_144, 16_384)
"""The most telling first: what time does not allow is left out from the end."""

LONGEST_REFERENCE = 2**18
"""Tokens of all rows up to which an operation is timed that has no kernel here: plain torch takes too long beyond."""


@dataclass
class Variant:
    """Something to time.

    Attributes:
        name: in words.
        make: call number i, on its own queries and caches.
        read: bytes that one call must move.
        check: the error of call 0 against the oracle, and how much is allowed; None for parts checked elsewhere.
        facts: for the row.
    """

    name: str
    make: Callable[[int], Call]
    read: float
    check: Callable[[Any], tuple[float, float]] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    given = arguments(__doc__, 180).parse_args()
    deadline = Deadline(given.seconds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = bandwidth(device, 16 if given.smoke else 2048)
    results: dict[str, Any] = {"environment": environment(given.smoke), "rows": [], "left_out": [], "memory": memory}
    cells = [(256, 2), (512, 1)] if given.smoke else [(context, batch) for context in CONTEXTS for batch in BATCHES]
    for context, batch in cells:
        if deadline.left < 8:
            results["left_out"].append({"context": context, "batch": batch, "reason": "no time was left"})
            continue
        torch.manual_seed(0)
        cell = Cell(context, batch, Heads(), torch.bfloat16, device)
        budgets = (64, 32) if given.smoke else BUDGETS
        for group, variants in groups(cell, budgets):
            if deadline.left < 4:
                results["left_out"].append({"context": context, "batch": batch, "group": group, "reason": "no time"})
                continue
            try:
                measure(cell, group, variants, memory, results, deadline)
            except Exception as error:  # one group's failure leaves the others'
                results["left_out"].append(
                    {"context": context, "batch": batch, "group": group, "reason": reason(error)}
                )
            write(given.file, results)
        del cell
        if device.type == "cuda":
            torch.cuda.empty_cache()
    write(given.file, results)
    wrong = [row for row in results["rows"] if row.get("wrong")]
    if wrong:
        raise SystemExit(f"wrong results: {wrong}")


def groups(cell: Cell, budgets: tuple[int, ...]) -> Iterator[tuple[str, Callable[[], Iterator[Variant]]]]:
    """What belongs together is timed in turn."""
    yield "attention", lambda: attention(cell, budgets)
    yield "selection", lambda: selection(cell, budgets)
    yield "layers", lambda: layers(cell, budgets[0])
    yield "hybrid", lambda: hybrid(cell)
    yield "resa", lambda: resa(cell)
    if cell.batch == 1:
        yield "clusters", lambda: clusters(cell, max(budgets[-1], 64))


def measure(
    cell: Cell,
    group: str,
    variants: Callable[[], Iterator[Variant]],
    memory: dict[str, float],
    results: dict[str, Any],
    deadline: Deadline,
) -> None:
    q, (k, v) = cell.queries[0], cell.caches[0]
    where = {"group": group, "context": cell.context, "batch": cell.batch}
    best, missing = dense.runnable(cell.device, q, k, v, cell.expected)
    timed: dict[str, Captured] = {}
    known: dict[str, Variant] = {}
    if group == "attention":
        results["left_out"] += [{**where, "variant": name, "reason": why} for name, why in missing.items()]
    for name, attend in best.items():
        count = cell.calls(cell.kv_bytes)
        timed[name] = Captured(dense.calls(attend, cell.queries, cell.caches, count), cell.device)
        known[name] = Variant(name, lambda i: lambda: None, cell.kv_bytes, facts={"implementation": "library"})
    for variant in variants():
        try:
            wrong = refused(variant)
            if wrong is not None:
                results["rows"].append({**where, "variant": variant.name, "wrong": wrong})
                continue
            if variant.facts.get("implementation") == "reference" and cell.context * cell.batch > LONGEST_REFERENCE:
                results["left_out"].append({**where, "variant": variant.name, "reason": "no kernel, reference only"})
                continue
            calls = [variant.make(number) for number in range(cell.calls(variant.read))]
            timed[variant.name], known[variant.name] = Captured(calls, cell.device), variant
        except Exception as error:  # one variant's failure leaves the others'
            results["left_out"].append({**where, "variant": variant.name, "reason": reason(error)})
    measured = interleaved(timed, rounds=15, seconds=min(2.5, deadline.left / 2))
    dense_ms = min(measured[name]["ms"] for name in best)
    for name, times in measured.items():
        gb_s = known[name].read / times["ms"] / 1e6
        results["rows"].append(
            {
                **where,
                "variant": name,
                **known[name].facts,
                **times,
                "bytes": known[name].read,
                "share_of_copy": gb_s / memory["copy_gb_s"],
                "speedup_over_best_dense": dense_ms / times["ms"],
                "best_dense": min(best, key=lambda library: measured[library]["ms"]),
            }
        )


def refused(variant: Variant) -> str | None:
    """Why a variant is not timed: its result is wrong; the error found becomes one of its facts."""
    if variant.check is None:
        return None
    error, allowed = variant.check(variant.make(0)())
    variant.facts["error"] = error
    return None if error <= allowed else f"relative error {error:.2e}, allowed {allowed:.2e}"


def runs(operation: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Which implementation "auto" takes on this device: Triton's where that does not refuse."""
    try:
        operation(*args, **options, implementation="triton")
    except KernelError:
        return "reference"
    return "triton"


def attention(cell: Cell, budgets: tuple[int, ...]) -> Iterator[Variant]:
    """Dense attention with and without scores; attention to sets of tokens and of pages, one per KV head and others."""
    heads, scale = cell.heads, cell.heads.scale
    q, k = cell.queries[0], cell.caches[0][0]
    for pooling in (None, "max", "each"):
        # Scores are float32: written once.
        stored = 4 * cell.batch * cell.context * {None: 0, "max": heads.kv, "each": heads.query}[pooling]

        def check(got: tuple[Tensor, Tensor | None], pooled: str | None = pooling) -> tuple[float, float]:
            error = relative_error(got[0], cell.expected)
            if got[1] is not None:
                error = max(error, relative_error(got[1], score_oracle(q, k, pooled == "max")))
            return error, dense.TOLERANCE

        def make(i: int, pooled: Any = pooling) -> Call:
            q, view = cell.query(i), cell.view(i)
            return lambda: dense_decode_scores(q, view, Softmax(scale), pooling=pooled)

        facts = {
            "operation": "dense_decode_scores",
            "pooling": pooling,
            "implementation": runs(dense_decode_scores, q, cell.view(0), Softmax(scale), pooling=pooling),
        }
        yield Variant(f"dense, scores {pooling}", make, cell.kv_bytes + stored, check, facts)
    for budget in budgets:
        for groups_of, unit in ((heads.kv, 1), (1, 1), (heads.query, 1), (heads.kv, PAGE)):
            yield sparse(cell, budget, groups_of, unit)


def sparse(cell: Cell, budget: int, groups_of: int, unit: int) -> Variant:
    """`sparse_decode` with random sets; a set per query head reads as many times as much as one per KV head."""
    heads, scale = cell.heads, cell.heads.scale
    read = sparse_bytes(cell, budget, groups_of)
    sets = [cell.selection(groups_of, budget, unit) for _ in range(cell.calls(read))]

    def make(i: int) -> Call:
        q, view, chosen = cell.query(i), cell.view(i), sets[i]
        return lambda: sparse_decode(q, view, chosen, Softmax(scale))

    def check(got: Tensor) -> tuple[float, float]:
        q, (k, v) = cell.queries[0], cell.caches[0]
        return relative_error(got, sparse_oracle(q, k, v, sets[0], scale)), dense.TOLERANCE

    owner = {1: "all heads", heads.kv: "each KV head", heads.query: "each query head"}[groups_of]
    facts = {
        "operation": "sparse_decode",
        "budget": budget,
        "unit": unit,
        "sets": owner,
        "implementation": runs(sparse_decode, cell.query(0), cell.view(0), sets[0], Softmax(scale)),
    }
    return Variant(f"sparse {budget}, unit {unit}, a set for {owner}", make, read, check, facts)


def sparse_bytes(cell: Cell, budget: int, groups_of: int) -> float:
    """Keys and values of the sets, and their ids."""
    heads = cell.heads
    tokens = min(budget, cell.context) * cell.batch
    return tokens * max(groups_of, heads.kv) * 2 * heads.dim * 2 + 4 * tokens * groups_of


def selection(cell: Cell, budgets: tuple[int, ...]) -> Iterator[Variant]:
    """Cutting scores, and page bounds. Scores lie in the last-level cache, as they do when they have just been made."""
    heads = cell.heads
    for groups_of, order, name in ((heads.kv, "position", "each KV head"), (heads.query, "score", "each query head")):
        scores = [torch.randn((cell.batch, groups_of, cell.context), device=cell.device) for _ in range(2)]
        for budget in budgets:

            def make(i: int, scores: list[Tensor] = scores, budget: int = budget, order: Any = order) -> Call:
                return lambda: topk(scores[i % 2], cell.rows.seq_lens, budget, order=order)

            def check(
                got: tuple[Tensor, Tensor], scores: list[Tensor] = scores, budget: int = budget
            ) -> tuple[float, float]:
                best = scores[0].topk(min(budget, cell.context)).values
                return relative_error(
                    scores[0].gather(-1, got[0].long()).sort(descending=True).values, best.double()
                ), 0

            facts = {
                "operation": "topk",
                "budget": budget,
                "order": order,
                "implementation": runs(topk, scores[0], cell.rows.seq_lens, budget, order=order),
            }
            yield Variant(f"topk {budget} for {name}, by {order}", make, scores[0].nbytes, check, facts)
    bounds = [bounds_oracle(k, PAGE) for k, _ in cell.caches]
    (q, (k, _)), (lower, upper) = (cell.queries[0], cell.caches[0]), bounds[0]

    def score(i: int) -> Call:
        q, (low, high) = cell.query(i), bounds[i % len(bounds)]
        return lambda: page_scores(q, low, high, cell.rows.seq_lens, page=PAGE, pooling="max")[0]

    facts = {
        "operation": "page_scores",
        "implementation": runs(page_scores, q, lower, upper, cell.rows.seq_lens, page=PAGE, pooling="max"),
    }
    read = lower.nbytes + upper.nbytes
    expected = page_score_oracle(q, lower, upper)
    yield Variant("page bounds, score", score, read, lambda got: (relative_error(got, expected), 1e-4), facts)
    start = cell.rows.seq_lens - 1

    def update(i: int) -> Call:
        view, (low, high) = cell.view(i), bounds[i % len(bounds)]
        return lambda: update_page_bounds(low, high, view, page=PAGE, start=start, count=1)

    def unchanged(_: Any) -> tuple[float, float]:
        low, high = bounds_oracle(k, PAGE)
        return float(not (torch.equal(low, lower) and torch.equal(high, upper))), 0

    facts = {
        "operation": "update_page_bounds",
        "implementation": runs(update_page_bounds, lower, upper, cell.view(0), page=PAGE, start=start, count=1),
    }
    touched = cell.batch * heads.kv * heads.dim * 2 * (PAGE + 2)
    yield Variant("page bounds, update of a token", update, touched, unchanged, facts)


def layers(cell: Cell, budget: int) -> Iterator[Variant]:
    """What a layer does by role (TidalDecode, figure 9): attend to all; choose by that; attend to a set; Quest."""
    heads, scale, rows = cell.heads, cell.heads.scale, cell.rows
    chosen, union = TopK(budget), RankUnion(budget, sinks=4, recent=0.25)
    sets = [cell.selection(heads.kv, budget) for _ in range(cell.calls(sparse_bytes(cell, budget, heads.kv)))]
    bounds = [bounds_oracle(k, PAGE) for k, _ in cell.caches]

    def full(i: int) -> Call:
        q, view = cell.query(i), cell.view(i)
        return lambda: dense_decode_scores(q, view, Softmax(scale))

    def tidal(i: int) -> Call:
        q, view = cell.query(i), cell.view(i)

        def layer() -> Any:
            output, scores = dense_decode_scores(q, view, Softmax(scale), pooling="max")
            assert scores is not None
            return output, chosen.choose(scores, rows, 1, scale)

        return layer

    def less_is_more(i: int) -> Call:
        q, view = cell.query(i), cell.view(i)

        def layer() -> Any:
            output, scores = dense_decode_scores(q, view, Softmax(scale), pooling="each")
            assert scores is not None
            return output, union.choose(scores, rows, 1, scale)

        return layer

    def reuse(i: int) -> Call:
        q, view, held = cell.query(i), cell.view(i), sets[i % len(sets)]
        return lambda: sparse_decode(q, view, held, Softmax(scale))

    def quest(i: int) -> Call:
        q, view, (low, high) = cell.query(i), cell.view(i), bounds[i % len(bounds)]

        def layer() -> Tensor:
            update_page_bounds(low, high, view, page=PAGE, start=rows.seq_lens - 1, count=1)
            scores, _ = page_scores(q, low, high, rows.seq_lens, page=PAGE, pooling="max")
            return sparse_decode(q, view, chosen.choose(scores, rows, PAGE, scale), Softmax(scale))

        return layer

    stored = 4.0 * cell.batch * cell.context
    read = sparse_bytes(cell, budget, heads.kv)
    facts = {"budget": budget, "implementation": runs(dense_decode_scores, cell.query(0), cell.view(0), Softmax(scale))}
    yield Variant("full layer", full, cell.kv_bytes, facts=facts)
    yield Variant("select layer, tidal", tidal, cell.kv_bytes + 2 * stored * heads.kv, facts=facts)
    yield Variant("select layer, less_is_more", less_is_more, cell.kv_bytes + 2 * stored * heads.query, facts=facts)
    yield Variant("sparse layer", reuse, read, facts=facts)
    yield Variant("quest layer", quest, read + 2 * cell.kv_bytes / 2 / PAGE, facts=facts)


def hybrid(cell: Cell) -> Iterator[Variant]:
    """4, 6, 7 and 8 of 8 heads sparse at 90% sparsity (LycheeDecode, figure 4)."""
    heads, scale = cell.heads, cell.heads.scale
    budget = cell.context // 10
    read_sparse = sparse_bytes(cell, budget, heads.kv)
    sets = [cell.selection(heads.kv, budget) for _ in range(min(cell.calls(read_sparse), 4))]
    q, (k, v) = cell.queries[0], cell.caches[0]
    for count in (4, 6, 7, 8):
        flags = tuple(head >= count for head in range(heads.kv))

        def make(i: int, flags: tuple[bool, ...] = flags) -> Call:
            q, view, held = cell.query(i), cell.view(i), sets[i % len(sets)]
            return lambda: hybrid_decode(q, view, held, flags, Softmax(scale))

        def check(got: tuple[Tensor, Any], flags: tuple[bool, ...] = flags) -> tuple[float, float]:
            to_all = torch.tensor(flags, device=q.device).repeat_interleave(heads.query // heads.kv)[None, :, None]
            to_set = sparse_oracle(q, k, v, sets[0], scale)
            return relative_error(got[0], torch.where(to_all, cell.expected, to_set)), dense.TOLERANCE

        share = count / heads.kv
        facts = {
            "operation": "hybrid_decode",
            "sparse_heads": count,
            "budget": budget,
            "implementation": runs(hybrid_decode, q, cell.view(0), sets[0], flags, Softmax(scale)),
        }
        read = share * read_sparse + (1 - share) * cell.kv_bytes
        yield Variant(f"{count} of {heads.kv} heads sparse", make, read, check, facts)


def resa(cell: Cell) -> Iterator[Variant]:
    """Estimation, attention and rectification of a layer (ReSA, figure 6); a dense pass serves 32 tokens."""
    heads, scale, rows, every = cell.heads, cell.heads.scale, cell.rows, 32
    rule = Ratio(0.1, minimum=16, local=1)
    bounds = [bounds_oracle(k, PAGE) for k, _ in cell.caches]
    kept = rule.size(cell.context, PAGE) * PAGE
    read = sparse_bytes(cell, kept, heads.kv)
    sets = [cell.selection(heads.kv, kept, PAGE) for _ in range(min(cell.calls(read), 4))]
    again = torch.randn((cell.batch, heads.query, every + 1, heads.dim), dtype=torch.bfloat16, device=cell.device)

    def estimation(i: int) -> Call:
        q, view, (low, high) = cell.query(i), cell.view(i), bounds[i % len(bounds)]

        def estimate() -> Selection:
            update_page_bounds(low, high, view, page=PAGE, start=rows.seq_lens - 1, count=1)
            scores, _ = page_scores(q, low, high, rows.seq_lens, page=PAGE, pooling="mean")
            return rule.choose(scores, rows, PAGE, scale)

        return estimate

    def attend(i: int) -> Call:
        q, view, held = cell.query(i), cell.view(i), sets[i % len(sets)]
        return lambda: sparse_decode(q, view, held, Softmax(scale))

    def rectification(i: int) -> Call:
        view = cell.view(i)
        return lambda: dense_pass(again, view, Softmax(scale))

    kernel = runs(sparse_decode, cell.query(0), cell.view(0), sets[0], Softmax(scale))
    facts = {"budget": kept, "implementation": kernel}
    yield Variant("estimation", estimation, 2 * cell.kv_bytes / 2 / PAGE, facts=facts)
    yield Variant("attention", attend, read, facts=facts)
    facts = {"implementation": runs(dense_pass, again, cell.view(0), Softmax(scale))}
    yield Variant("rectification, of 32 tokens", rectification, cell.kv_bytes, facts=facts)


def clusters(cell: Cell, budget: int) -> Iterator[Variant]:
    """The search of a cluster index of one row."""
    selector = ClusterSelector(budget=budget, chunking="fixed")
    rows = Rows.on_host(cell.rows.page_table, [0], [cell.context])
    view = replace(cell.view(0), rows=rows)
    shape = ModelShape(1, cell.heads.query, cell.heads.kv, cell.heads.dim)
    indexes = own_indexes(Plan(selector, layer_roles(shape, 0)), TokenHistory())
    index = indexes.of(0, view)
    assert isinstance(index, ClusterLayer), "groups are planted"
    tree = index.tree

    def search(i: int) -> Call:
        q = cell.query(i)
        return lambda: index.search(q, view)

    def check(got: Selection) -> tuple[float, float]:
        """No more than the budget, ascending, the current token among them; which ones, tests/kernels says."""
        ids, count = got.ids[0], got.counts[0]
        sound = bool((count <= budget).all()) and bool((ids.diff(dim=-1)[:, : int(count.min()) - 1] > 0).all())
        last = ids.gather(-1, count[:, None].long() - 1)
        return float(not (sound and bool((last == cell.context - 1).all()))), 0

    facts = {
        "operation": "cluster_search",
        "budget": budget,
        "index_bytes": indexes.nbytes,
        "kv_bytes": cell.kv_bytes,
        "build_seconds": indexes.build_seconds,
        "implementation": "reference",
    }
    yield Variant("cluster search", search, tree.centroids.nbytes + tree.unit_centroids.nbytes, check, facts)


if __name__ == "__main__":
    main()
