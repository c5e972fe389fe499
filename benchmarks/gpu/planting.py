"""What an index of text takes in between two steps: slices of a long prompt, and full buffers of rows that decode.

All layers of Llama-3.1-8B's shape, a paged cache with pages in disorder and text of random delimiters. Times are the
wall's, from a device that is idle to one that is idle again, by which a step is longer at most; and the device's own
of work that the host launched ahead, by which it is longer where the host does not wait. Searches are of one layer,
whose tree has room for the longest row. Clusters of tokens are planted by Triton's kernels and by plain torch, and
compared: what the kernels plant must be the same bit by bit for every split of the prompt.

    python3 -m benchmarks.gpu.planting planting.json [--seconds 120] [--smoke]
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from saccade.methods.policy import Policy
from saccade.selection.index import KeySizes, Views
from saccade.text.history import TokenHistory
from saccade.types import Intake, KVView, ModelShape, Rows, Selection

from .caches import Heads, disordered
from .timing import Captured, Deadline, arguments, elapsed, kernels_of, write

PAGE, LAYERS, ROWS, CONTEXT = 16, 32, 8, 131_072
SLICES = (2048, 4096, 8192)
POLICY, TOKENS = "lychee_cluster:budget=2048", "token_clusters:budget=2048"
AHEAD = 100_000_000
"""Cycles of the device, some 50 ms: longer than launching takes."""
LEVELS = (0, 0, 0, 4, 4, 4, 3, 2)


class Planting:
    """Rows in a cache that all layers share, which is as good for time; and one index for all of them."""

    def __init__(self, rows: int, context: int, layers: int, device: torch.device, policy: str = POLICY) -> None:
        heads = Heads()
        generator = torch.Generator(device).manual_seed(0)
        pages = -(-context // PAGE)
        self.k = torch.randn(
            (rows * pages, PAGE, heads.kv, heads.dim), dtype=torch.bfloat16, device=device, generator=generator
        )
        self.table = disordered(rows, pages, pages, generator)
        self.device, self.context, self.known = device, context, dict[int, int]()
        plan = Policy.from_spec(policy).plan(ModelShape(layers, heads.query, heads.kv, heads.dim))
        history = TokenHistory(LEVELS)
        ids = torch.randint(len(LEVELS), (rows + 1, context), device=device, generator=generator)
        history.record(0, context, rows + 1, ids, None)
        keys = KeySizes(heads.kv, heads.dim, torch.bfloat16, device)
        index: Any = plan.new_slots(keys, rows + 1, longest=context, text=history, fixed=True)
        assert plan.selector is not None and index is not None, "it has an index"
        self.selector, self.index = plan.selector, index
        self.queries = torch.randn(
            (rows, heads.query, heads.dim), dtype=torch.bfloat16, device=device, generator=generator
        )

    def rows(self, chosen: Sequence[int], length: int | None = None) -> Rows:
        where = torch.tensor(chosen).to(self.device, non_blocking=True)
        lengths = torch.full((len(chosen),), length or self.context, dtype=torch.int32, device=self.device)
        bounds = ((0, length or self.context),) * len(chosen)
        return Rows(self.table.index_select(0, where), torch.zeros_like(lengths), lengths, self.context, bounds)

    def seen(self, chosen: Sequence[int]) -> Mapping[int, KVView]:
        rows = self.rows(chosen)
        return {layer: KVView(self.k, self.k, rows) for layer in self.index.layers}

    def take_in(self, stops: Mapping[int, int]) -> float:
        """Milliseconds of a step's intake: rows, and up to where their text is looked at."""
        self._wait()
        start = time.perf_counter()
        self._bring(stops)
        self._wait()
        return 1e3 * (time.perf_counter() - start)

    def launched_ahead(self, stops: Mapping[int, int]) -> float:
        """The same by the device's clock, while it was busy until all of it was launched."""
        self._wait()
        return elapsed(lambda: self._bring(stops), self.device, ahead=AHEAD)

    def _bring(self, stops: Mapping[int, int]) -> None:
        new = [Intake(row, 0, min(self.known.get(row, 0), stop), stop) for row, stop in stops.items()]
        self.index.take_in(new, Views(tuple(self.index.layers), self.seen))
        self.known |= stops

    def clear(self, row: int) -> None:
        self.index.clear(row)
        self.known.pop(row, None)

    def search(self, rows: int) -> float:
        """Milliseconds of one layer's search for some rows."""
        captured = Captured([self.searching(rows)] * 20, self.device)
        return statistics.median(captured.milliseconds() for _ in range(9))

    def searching(self, rows: int, length: int | None = None) -> Callable[[], Selection]:
        """One layer's search for some rows, of which so many tokens were taken in; None: all."""
        slots, layer = [*range(rows)], next(iter(self.index.layers.values()))
        places = torch.tensor(slots, dtype=torch.int32).to(self.device)
        kv = KVView(self.k, self.k, self.rows(slots, length))

        def search() -> Selection:
            self.index.place(slots, places)
            return self.selector.select(self.queries[:rows], kv, layer, None, 1.0)

        return search

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def slices(made: Planting, size: int, row: int) -> dict[str, Any]:
    """A whole prompt in slices of some tokens."""
    made.clear(row)
    stops = [min(stop + size, made.context) for stop in range(0, made.context, size)]
    times = [made.take_in({row: stop}) for stop in stops]
    made.clear(row)
    ahead = [made.launched_ahead({row: stop}) for stop in stops]
    return {
        "total_ms": sum(times),
        "median_ms": statistics.median(times),
        "most_ms": max(times),
        "device_median_ms": statistics.median(ahead),
        "slices": len(times),
    }


def buffers(made: Planting, rows: int, stop: int, steps: int) -> dict[str, Any]:
    """Full buffers of some rows at once, which stand at `stop`."""
    times = [made.take_in(dict.fromkeys(range(rows), stop + 128 * (step + 1))) for step in range(steps)]
    return {"rows": rows, "median_ms": statistics.median(times), "most_ms": max(times)}


@contextmanager
def plain() -> Iterator[None]:
    """Plain torch instead of kernels, as it was before there were any."""
    with patch("saccade.kernels.spherical_kmeans.api.choose", lambda *_, **__: "reference"):
        yield


def tokens(made: Planting, sizes: Sequence[int], found: dict[str, Any], save: Callable[[], None]) -> None:
    """Clusters of tokens: a prompt in slices by kernels, then by plain torch; a buffer; and whether sets are equal."""
    trees = made.index.trees

    def held() -> list[torch.Tensor]:
        return [one[:, 0].clone() for one in (trees.labels, trees.means, trees.spreads, trees.sizes)]

    planted, step = list[list[torch.Tensor]](), 128
    for size in sizes:
        found[f"kernels_{size}"] = slices(made, size, 0)
        planted.append(held())
    found["equal_in_every_split"] = all(all(map(torch.equal, one, planted[0])) for one in planted)
    # The buffer that completes a group, which is planted anew, and one that completes nothing.
    for name, stop in (("group", made.context), ("buffer", made.context - 2048 + step)):
        made.take_in({0: stop - step})
        found[f"{name}_ms"] = made.take_in({0: stop})
    if made.device.type == "cuda":
        made.clear(0)
        found["launches"] = kernels_of(lambda: made.take_in({0: sizes[-1]}), 1)
    save()
    with plain():
        made.clear(0)
        made.take_in({0: sizes[-1]})
        found[f"torch_{sizes[-1]}"] = slices(made, sizes[-1], 0)
        found["equal_labels"] = (trees.labels[:, 0] == planted[0][0]).float().mean().item()


def main() -> None:
    given = arguments(__doc__, 120).parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, context, layers, sizes = (2, 4096, 3, (1024,)) if given.smoke else (ROWS, CONTEXT, LAYERS, SLICES)
    deadline, results = Deadline(given.seconds), dict[str, Any](policy=POLICY, context=context, layers=layers)
    made = Planting(1, context, layers, device, TOKENS)
    # Kernels are compiled.
    made.take_in({0: 1024})
    results["tokens"] = {}
    tokens(made, sizes, results["tokens"], lambda: write(given.file, results))
    write(given.file, results)
    made = Planting(rows, context, layers, device)
    results["index_gib_per_row"] = round(made.index.nbytes / (rows + 1) / 2**30, 3)
    # Kernels are compiled.
    made.take_in({0: 1024})
    results["slices"] = {}
    for size in sizes:
        results["slices"][size] = slices(made, size, 0)
        write(given.file, results)
    results["buffers"] = []
    standing = context - 128 * 12
    for count in (1, 2, 4, rows):
        if deadline.left > 5 and count <= rows:
            made.take_in(dict.fromkeys(range(count), standing))
            results["buffers"].append(buffers(made, count, standing, 10))
            write(given.file, results)
    results["search_ms"] = {count: made.search(count) for count in (1, rows)}
    write(given.file, results)


if __name__ == "__main__":
    main()
