"""What drafts choose through the index that all requests share, against one of each row that is planted at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from saccade.adapters.vllm.worker.fed import RequestFeed
from saccade.adapters.vllm.worker.requests import RequestRow
from saccade.adapters.vllm.worker.worker import serving_of
from saccade.selection.index import KeySizes, Views
from saccade.types import Intake


@contextmanager
def chosen_as_planted(worker: Any, drafts: int, seen: Callable[[], None]) -> Iterator[None]:
    """Compare every row's set in the first layer with an index, over tokens of vLLM's own count of verified ones.

    Which of the last two cycles stand for sure decides how many of them; `seen` is called for each set.
    """
    serving, ids = serving_of(worker.vllm_config), worker.req_states.all_token_ids
    plan, tables = serving.plan, worker.block_tables.block_tables[0].gpu
    kind, layer = type(plan.selector), min(plan.refreshing)
    stock = kind.select

    def alone(selector: Any, q: Any, kv: Any, place: int, stop: int, scale: float) -> list[list[int]]:
        text = RequestFeed(serving.levels, lambda: ids.gpu)
        text.here[0] = RequestRow(), place
        index = plan.new_slots(KeySizes.of(kv), 1, longest=4096, text=text)
        if stop:
            index.take_in([Intake(0, 0, 0, stop)], Views((layer,), lambda _: {layer: kv}))
        return sets(stock(selector, q, kv, index.layers[layer], None, scale))[0]

    def select(selector: Any, q: Any, kv: Any, index: Any, scores: Any, scale: float) -> Any:
        found = stock(selector, q, kv, index, scores, scale)
        if index is not index.owner.layers[layer]:
            return found
        for row, ours in enumerate(sets(found)):
            one, length = kv.picked([row]), int(kv.rows.seq_lens[row])
            blocks = one.rows.page_table[0, : -(-length // kv.page)]
            (place,) = (tables[:, : len(blocks)] == blocks).all(1).nonzero()[:, 0].tolist()
            verified = int(worker.req_states.num_computed_tokens.gpu[place])
            assert verified < length <= verified + drafts, "a draft that follows nothing"
            stops = {selector.stop(sure + 3 * drafts, sure) for sure in range(verified - 2 * drafts, verified + 1)}
            told = f"{length} tokens, of which {verified} are verified"
            assert any(ours == alone(selector, q[row : row + 1], one, place, stop, scale) for stop in stops), told
            assert length - 1 in ours[0] and len(ours[0]) == selector.budget
            seen()
        return found

    with patch.object(kind, "select", select):
        yield


def sets(chosen: Any) -> list[list[list[int]]]:
    """Of every row and head, in order."""
    rows = zip(chosen.ids.tolist(), chosen.counts.tolist(), strict=True)
    return [[sorted(ids[:count]) for ids, count in zip(*row, strict=True)] for row in rows]
