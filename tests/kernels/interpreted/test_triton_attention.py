"""Triton's decoding attention in the interpreter, rows cut into many parts: what the contract says, and the plan."""

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest
import torch
from attention_contract import *  # noqa: F403 - its tests, of these implementations
from attention_contract import choose, expect_hybrid, expect_sparse, operations
from kernel_caches import int32, make_case
from kernel_checks import expect_attention, expect_dense, refused
from quantised import (
    test_attention_matches_the_oracle,  # noqa: F401
)

from saccade.kernels._triton import plan
from saccade.kernels.dense_decode_scores.api import dense_decode_scores
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.types import Flags, Pooling, Selection, Softmax, Workspace


@pytest.fixture(autouse=True, scope="module")
def _several_parts() -> Iterator[None]:
    """Programs so small, and a machine so large, that short rows are cut into many parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "tuning", lambda *_: plan.Tuning(block=16, warps=4, stages=3, resident=8))
        yield


@pytest.mark.parametrize("parts", [2, 17])
def test_any_number_of_parts(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "split_counts", lambda streams, _: (parts,) * len(streams))
    case = make_case(lengths=[100, 7], padding=7)
    expect_dense(case, None, "triton")
    expect_sparse(case, "kv", 1, 3, 0, "triton")
    expect_hybrid(case, "kv", 4, (True, False), "triton", pooling="max")


@pytest.mark.parametrize("group", [1, 7, 16, 17, 32])
def test_groups_around_the_size_of_a_tile(group: int) -> None:
    case = make_case(layout="buffer", lengths=[40], kv_heads=1, group=group, head_dim=16)
    for pooling in get_args(Pooling):
        expect_dense(case, pooling, "triton")


def test_sixty_four_heads_are_told_apart() -> None:
    """The last one's bit is the sign of the number that holds the flags."""
    case = make_case(layout="buffer", lengths=[20], kv_heads=64, group=1, head_dim=8)
    dense: Flags = tuple(head in (0, 31, 32, 63) for head in range(64))
    scored: Flags = tuple(head in (31, 63) for head in range(64))
    expect_hybrid(case, "kv", 1, dense, "triton", pooling="max", scored=scored)


@pytest.mark.parametrize(("cache", "query"), [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_a_query_wider_or_narrower_than_the_cache(cache: torch.dtype, query: torch.dtype) -> None:
    case = make_case(layout="buffer", lengths=[50], kv_heads=2, group=2, head_dim=16, dtype=cache)
    expect_dense(replace(case, q=(case.q.float() * (1 + 2.0**-14)).to(query)), "max", "triton")


def test_a_call_that_the_kernels_cannot_take_is_refused() -> None:
    case = make_case(lengths=[9], head_dim=8)
    doubled = replace(case.kv, k=case.kv.k.double())
    for wrong, words in (
        (replace(case, q=case.q.double()), "q is torch.float64"),
        (replace(case, kv=doubled), "cache is torch.float64"),
        (replace(case, q=case.q.repeat_interleave(17, dim=1)), "at most 32 on each of 64"),
        (make_case(lengths=[9], head_dim=257), "head dim 257 is more than 256"),
    ):
        for operation in operations(wrong).values():
            refused(words, operation, "triton")


def test_nobody_gets_the_interpreter_unasked() -> None:
    """A layout that only the reference reads on a CPU."""
    case = make_case(layout="strided", lengths=[9], head_dim=8)
    asked = dense_decode_scores(case.q, case.kv, case.softmax, implementation="reference")[0]
    assert torch.equal(dense_decode_scores(case.q, case.kv, case.softmax)[0], asked)


@pytest.mark.parametrize("streams", [((32, 64), (0, 0)), ((56, 2048), (0, 0)), ((4, 2048), (28, 64)), ((1, 1), (1, 9))])
def test_parts_fill_the_machine_and_are_alike(streams: tuple[tuple[int, int], ...]) -> None:
    places = 264
    counts = plan.split_counts(streams, places)
    assert all(1 <= count <= plan.MOST_SPLITS for count in counts)
    spans = [-(-blocks // count) for (number, blocks), count in zip(streams, counts, strict=True) if number]
    assert all(span <= max(spans) for span in spans)
    assert all(count <= max(blocks, 1) for (_, blocks), count in zip(streams, counts, strict=True))
    programs = sum(number * count for (number, _), count in zip(streams, counts, strict=True))
    most = sum(number * min(blocks, plan.MOST_SPLITS) for number, blocks in streams)
    assert programs >= min(most, places) * 0.75
    assert programs <= max(plan.MOST_WAVES * places, sum(number for number, _ in streams))


@pytest.mark.parametrize("rows", [28, 224, 4096])
def test_long_bounds_make_no_more_programs_than_rounds_are_worth(rows: int) -> None:
    """In a CUDA graph the bound is the longest row that may come, and most programs of a short one are for nothing."""
    (parts,) = plan.split_counts(((rows, 8192),), 264)
    assert parts * rows <= max(plan.MOST_WAVES * 264, rows)
    assert (parts + 1) * rows > 264


@pytest.mark.parametrize(
    ("parts", "group", "sets", "sinks"),
    [(1, 2, "kv", False), (2, 5, "all", True), (5, 2, "query", True), (16, 2, "kv", False)],
)
def test_the_last_program_joins_the_parts(
    parts: int, group: int, sets: str, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another launch would, where there is memory to count in, which two launches in turn find as it was."""
    monkeypatch.setattr(plan, "split_counts", lambda streams, _: (parts,) * len(streams))
    case = make_case(layout="paged", lengths=[150, 7], kv_heads=2, group=group, head_dim=24, padding=7)
    selection, tokens = choose(case, sets, 1, 3, 0)
    softmax = Softmax(0.3, torch.linspace(-2, 2, 2 * group) if sinks else None)
    workspace = Workspace.of(2, 2 * group, case.q.device)
    apart = sparse_decode(case.q, case.kv, selection, softmax, implementation="triton")
    for _ in range(2):
        out = sparse_decode(case.q, case.kv, selection, softmax, workspace=workspace, implementation="triton")
        # As `assert_close` has it, which imports all of sympy first.
        assert torch.allclose(out, apart, rtol=1.3e-6, atol=1e-5)
        assert not workspace.turns.any()
    if not sinks:
        expect_attention(out, case, tokens)


def test_too_little_memory_to_count_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "split_counts", lambda streams, _: (2,) * len(streams))
    case = make_case(layout="paged", lengths=[40], kv_heads=1, group=2, head_dim=16)
    selection, _ = choose(case, "kv", 1, 3, 0)
    few = Workspace.of(1, 1, case.q.device)
    given = {"workspace": few, "implementation": "triton"}
    refused("holds 1 numbers, and 2 are needed", sparse_decode, case.q, case.kv, selection, case.softmax, **given)


def test_a_batch_is_planned_as_the_next_that_is_captured() -> None:
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    assert [plan.padded(rows) for rows in range(1, 513)] == [
        next(size for size in sizes if size >= rows) for rows in range(1, 513)
    ]


def test_a_set_of_one_token_far_from_the_others_is_found() -> None:
    """The last id of a long set, in the last part, whose key alone matters."""
    case = make_case(layout="paged", lengths=[90], kv_heads=1, group=1, head_dim=16, style="peaked", padding=7)
    selection = Selection(int32([[[*range(0, 80, 2), 89, *[-1] * 30]]]), int32([[41]]))
    out = sparse_decode(case.q, case.kv, selection, case.softmax, implementation="triton")
    expect_attention(out, case, [[[*range(0, 80, 2), 89]]])
