"""Clusters in order against naive loops over lists, radii against fractions (LycheeCluster, section 4.3)."""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from saccade.selection.clusters.plant import ordered_clusters
from saccade.selection.clusters.tree import Planted

Call = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Keys, labels, centroids, parents, tops and lengths."""

ABSENT_TOKENS = 10**6
"""Of a chunk that is not there."""


def random_call(
    sizes: tuple[int, int, int], problems: int, dim: int, dtype: torch.dtype, *, seed: int, poisoned: bool = True
) -> Call:
    """Labels as they come, so that some chunks, clusters and units are absent and some nodes have none."""
    chance = torch.Generator().manual_seed(seed)
    chunks, clusters, units = sizes
    labels = torch.randint(0, clusters + 1, (problems, chunks), generator=chance)
    parents = torch.randint(0, units + 1, (problems, clusters), generator=chance)
    keys = torch.randn(problems, chunks, dim, generator=chance)
    centroids = torch.randn(problems, clusters, dim, generator=chance).to(dtype)
    tops = torch.randn(problems, units, dim, generator=chance).to(dtype)
    lengths = torch.randint(1, 17, (problems, chunks), generator=chance)
    if poisoned:
        keys[labels == clusters] = math.nan
        lengths[labels == clusters] = ABSENT_TOKENS
        named = (labels[..., None] == torch.arange(clusters)).any(dim=1)
        centroids[~named] = math.nan
        above = torch.where(named, parents, units)
        tops[~(above[..., None] == torch.arange(units)).any(dim=1)] = math.nan
    return keys, labels, centroids, parents, tops, lengths


def expect_radius(radius: float, center: Tensor, vectors: Sequence[Tensor]) -> None:
    """Not below the largest distance, computed in fractions, and above it by the inflation and a rounding at most."""
    of_center = [Fraction(component) for component in center.double().tolist()] if vectors else []
    squares = [
        sum((Fraction(one) - other) ** 2 for one, other in zip(vector.double().tolist(), of_center, strict=True))
        for vector in vectors
    ]
    exact = max(squares, default=Fraction(0))
    assert exact <= Fraction(radius) ** 2 <= exact * (1 + Fraction(1, 2**22)) ** 2


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two are equal where both may hold NaN."""
    return torch.allclose(one.double(), other.double(), rtol=0, atol=0, equal_nan=True)


def expect(found: Planted, call: Call) -> None:
    keys, labels, centroids, parents, tops, lengths = call
    clusters, units = centroids.shape[1], tops.shape[1]
    shapes = [*(tops.shape[:2],) * 3, *(parents.shape,) * 3, labels.shape]
    names = ("unit_radii", "unit_tokens", "unit_offsets", "radii", "numbers", "offsets", "members")
    assert [getattr(found, name).shape for name in names] == shapes
    whole = (found.unit_tokens, found.unit_offsets, found.numbers, found.offsets, found.members)
    assert {tensor.dtype for tensor in whole} == {torch.int64}
    assert {found.radii.dtype, found.unit_radii.dtype} == {torch.float32}
    assert same(found.unit_centroids, tops)
    for problem in range(len(keys)):
        above, label = parents[problem].tolist(), labels[problem].tolist()
        numbers = sorted(range(clusters), key=lambda number: above[number])
        assert found.numbers[problem].tolist() == numbers
        assert same(found.centroids[problem], centroids[problem, numbers])
        assert found.unit_offsets[problem].tolist() == [sum(other < unit for other in above) for unit in range(units)]
        members: list[int] = []
        for place, number in enumerate(numbers):
            own = [chunk for chunk in reversed(range(len(label))) if label[chunk] == number]
            assert int(found.offsets[problem, place]) == len(members)
            expect_radius(float(found.radii[problem, place]), centroids[problem, number], keys[problem, own].unbind(0))
            members += own
        members += [chunk for chunk in reversed(range(len(label))) if label[chunk] == clusters]
        assert found.members[problem].tolist() == members
        for unit in range(units):
            own = [chunk for chunk, number in enumerate(label) if number < clusters and above[number] == unit]
            assert int(found.unit_tokens[problem, unit]) == sum(lengths[problem, own].tolist())
            expect_radius(float(found.unit_radii[problem, unit]), tops[problem, unit], keys[problem, own].unbind(0))


sizes = st.tuples(st.integers(1, 19), st.integers(1, 9), st.integers(1, 4))
dims = st.sampled_from((1, 2, 5, 7, 8, 9, 16, 31, 33))
dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))


@given(sizes, st.integers(0, 3), dims, dtypes, st.sampled_from((False, False, True)), st.integers(0, 2**31))
def test_against_lists(
    sizes: tuple[int, int, int], problems: int, dim: int, dtype: torch.dtype, nothing: bool, seed: int
) -> None:
    """Nothing at all may be there; and no input need be contiguous."""
    keys, labels, centroids, parents, tops, lengths = random_call(sizes, problems, dim, dtype, seed=seed)
    if nothing:
        keys, labels, parents = keys * math.nan, torch.full_like(labels, sizes[1]), torch.full_like(parents, sizes[2])
    spread = (torch.stack((one, one), dim=-1)[..., 0] for one in (keys, labels, centroids, parents, tops, lengths))
    keys, labels, centroids, parents, tops, lengths = spread
    call = (keys, labels, centroids, parents, tops, lengths)
    found = ordered_clusters(*call)
    expect(found, call)
    held = (found.radii, found.unit_radii, found.unit_tokens, found.unit_offsets, found.offsets)
    assert not nothing or not torch.cat(held, 1).any()


def test_a_broken_key_is_not_hidden() -> None:
    """NaN in a chunk that is there is the radius of what is above it, whatever comes before or behind."""
    keys, labels, centroids, parents, tops, lengths = random_call(
        (6, 2, 2), 1, 8, torch.float32, seed=2, poisoned=False
    )
    labels[:], parents[:] = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([1, 0])
    keys[0, 1, 7] = math.nan
    found = ordered_clusters(keys, labels, centroids, parents, tops, lengths)
    assert found.radii.isnan().tolist() == [[False, True]]
    assert found.unit_radii.isnan().tolist() == [[False, True]]
