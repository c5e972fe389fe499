"""What graphs of a rectified engine hold: dense passes of all its rows, unless the user has said something else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from unstarted import made

from saccade.adapters.vllm.server import serve

RECTIFIED = "quest:rectify=8"


def sizes_of(policy: str, *asked: str) -> list[int] | None:
    sizes: list[int] | None = made(*asked, policy=policy).args.cudagraph_capture_sizes
    return sizes


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations have the graphs that vLLM chooses on a GPU."""
    real = serve._made

    def made_on_a_gpu(args: Any) -> Any:
        config = real(args)
        most = 2 * config.scheduler_config.max_num_seqs
        config.compilation_config.cudagraph_capture_sizes = [size for size in (1, 2, 4) if size <= most]
        config.compilation_config.cudagraph_capture_sizes += range(8, min(most, 512) + 1, 8)
        return config

    monkeypatch.setattr(serve, "_made", made_on_a_gpu)


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(
    ("rows", "rest", "held"),
    [
        (1, (), {1, 2, 8, 9}),
        (28, (), {1, 2, 4, *range(8, 249, 8), 252}),
        (100, (), {1, 2, 4, *range(8, 249, 8), *range(256, 513, 16)}),
        (100, ("--max-num-batched-tokens", "300"), {1, 2, 4, *range(8, 249, 8), *range(256, 300, 16), 300}),
    ],
)
def test_a_pass_of_all_rows_is_captured(rows: int, rest: tuple[str, ...], held: set[int]) -> None:
    """Nine tokens a row, up to what vLLM captures by itself or a step holds."""
    sizes = sizes_of(RECTIFIED, "--max-num-seqs", str(rows), *rest)
    assert sizes is not None
    assert sizes == sorted({*sizes})
    assert {*sizes} == held
    assert all(later - size <= 16 for size, later in pairwise(sizes))


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(
    ("policy", "asked", "sizes"),
    [
        ("quest:rectify=1", ("--max-num-seqs", "4"), None),
        (RECTIFIED, ("--max-num-seqs", "256"), None),
        (RECTIFIED, ("--max-num-seqs", "4", "--cudagraph-capture-sizes", "1", "2"), [1, 2]),
        (RECTIFIED, ("--max-num-seqs", "4", "--max-cudagraph-capture-size", "8"), None),
        (RECTIFIED, ("--max-num-seqs", "4", "-cc.cudagraph_capture_sizes", "[1, 2]"), None),
    ],
)
def test_what_suffices_or_was_said_stays(policy: str, asked: tuple[str, ...], sizes: list[int] | None) -> None:
    assert sizes_of(policy, *asked) == sizes


def test_without_graphs_none_is_asked_for() -> None:
    assert sizes_of(RECTIFIED, "--max-num-seqs", "4") is None
