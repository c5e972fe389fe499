"""Clusters in order against naive loops over lists, radii against fractions (LycheeCluster, section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import every_index as all_implementations
from kernel_checks import fast_attention, threads
from kernel_checks import index_implementations as implementations
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._cluster_tree import Planted
from saccade.kernels.ordered_clusters.api import ordered_clusters

built = "native" in fast_attention

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


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two are equal where both may hold NaN."""
    return one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))


def expect(found: Planted, call: Call) -> None:
    keys, labels, centroids, parents, tops, lengths = call
    clusters, units = centroids.shape[1], tops.shape[1]
    shapes = [*(tops.shape[:2],) * 3, *(parents.shape,) * 3, labels.shape]
    names = ("unit_radii", "unit_tokens", "unit_offsets", "radii", "numbers", "offsets", "members")
    assert [getattr(found, name).shape for name in names] == shapes
    whole = (found.unit_tokens, found.unit_offsets, found.numbers, found.offsets, found.members)
    assert {tensor.dtype for tensor in whole} == {torch.int64}
    assert {found.radii.dtype, found.unit_radii.dtype} == {torch.float32}
    assert same_bits(found.unit_centroids, tops)
    for problem in range(len(keys)):
        above, label = parents[problem].tolist(), labels[problem].tolist()
        numbers = sorted(range(clusters), key=lambda number: above[number])
        assert found.numbers[problem].tolist() == numbers
        assert same_bits(found.centroids[problem], centroids[problem, numbers])
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
# Widths below, at and beside the number of sums that C adds up side by side.
dims = st.sampled_from((1, 2, 5, 7, 8, 9, 16, 31, 33))
dtypes = st.sampled_from((torch.float32, torch.bfloat16))


@given(sizes, st.integers(0, 3), dims, dtypes, st.integers(0, 2**31), implementations)
def test_against_lists(
    sizes: tuple[int, int, int], problems: int, dim: int, dtype: torch.dtype, seed: int, implementation: str
) -> None:
    call = random_call(sizes, problems, dim, dtype, seed=seed)
    expect(ordered_clusters(*call, implementation=implementation), call)


@given(sizes, st.integers(0, 2**31))
def test_other_dtypes_take_the_reference(sizes: tuple[int, int, int], seed: int) -> None:
    call = random_call(sizes, 2, 8, torch.float16, seed=seed)
    expect(ordered_clusters(*call), call)


@pytest.mark.parametrize("implementation", all_implementations)
def test_nothing_there(implementation: str) -> None:
    keys, labels, centroids, parents, tops, lengths = random_call((9, 4, 2), 2, 8, torch.float32, seed=0)
    labels, parents = torch.full_like(labels, 4), torch.full_like(parents, 2)
    call = (keys * math.nan, labels, centroids, parents, tops, lengths)
    found = ordered_clusters(*call, implementation=implementation)
    expect(found, call)
    assert not torch.cat((found.radii, found.unit_radii, found.unit_tokens, found.unit_offsets, found.offsets), 1).any()
    assert found.members.tolist() == [list(range(8, -1, -1))] * 2


@pytest.mark.parametrize("implementation", all_implementations)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_other_tensors(implementation: str, dtype: torch.dtype) -> None:
    """No input need be contiguous."""
    call = random_call((11, 5, 3), 3, 10, dtype, seed=1)
    spread = [torch.stack((tensor, tensor), dim=-1)[..., 0] for tensor in call]
    assert not any(tensor.is_contiguous() for tensor in spread)
    keys, labels, centroids, parents, tops, lengths = spread
    call = (keys, labels, centroids, parents, tops, lengths)
    expect(ordered_clusters(*call, implementation=implementation), call)


@pytest.mark.parametrize("implementation", all_implementations)
def test_a_broken_key_is_not_hidden(implementation: str) -> None:
    """NaN in a chunk that is there is the radius of what is above it, whatever comes before or behind."""
    keys, labels, centroids, parents, tops, lengths = random_call(
        (6, 2, 2), 1, 8, torch.float32, seed=2, poisoned=False
    )
    labels[:], parents[:] = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([1, 0])
    keys[0, 1, 7] = math.nan
    found = ordered_clusters(keys, labels, centroids, parents, tops, lengths, implementation=implementation)
    assert found.radii.isnan().tolist() == [[False, True]]
    assert found.unit_radii.isnan().tolist() == [[False, True]]


@pytest.mark.skipif(not built, reason="no library was built")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_is_the_reference(count: int, dtype: torch.dtype) -> None:
    """All whole numbers and centroids bit by bit; radii, sums in another order, to one step of float32."""
    shapes = ((128, 64, 8), (128, 64, 8), (77, 39, 7), (300, 100, 64))
    for seed, shape in enumerate(shapes):
        call = random_call(shape, 24, 128, dtype, seed=seed, poisoned=False)
        with threads(count):
            found, wanted = (ordered_clusters(*call, implementation=name) for name in ("native", "reference"))
        for field in fields(Planted):
            one, other = getattr(found, field.name), getattr(wanted, field.name)
            if "radii" in field.name:
                # Neighbouring numbers of float32 that are not negative are neighbours as whole numbers too.
                one, other = one.view(torch.int32), other.contiguous().view(torch.int32)
                assert (one - other).abs().max() <= 1
            else:
                assert one.equal(other)


@pytest.mark.skipif(not built, reason="no library was built")
@pytest.mark.parametrize("wrong", [-1, 6, 2**40])
def test_labels_out_of_range(wrong: int) -> None:
    call = random_call((7, 5, 5), 2, 8, torch.float32, seed=3)
    for place, name in ((1, "labels"), (3, "parents")):
        given = [tensor.clone() for tensor in call]
        given[place].fill_(0)[1, 4] = wrong
        low, high = min(wrong, 0), max(wrong, 0)
        with pytest.raises(KernelError, match=f"^ordered_clusters: {name} must be 0 to 5, got {low} to {high}$"):
            ordered_clusters(*given, implementation="native")


@pytest.mark.parametrize(
    ("place", "replaced", "message"),
    [
        (0, torch.zeros(2, 7, 8, dtype=torch.float64), r"keys must be torch.float32 \[2, 7, 8\] on cpu, got torch.flo"),
        (0, torch.zeros(7, 8), r"keys, centroids and tops must be \[P, S, d\], \[P, L, d\], \[P, U, d\]: \[7, 8\], "),
        (0, torch.zeros(2, 0, 8), "S, L, U and d must be at least 1, got 0, 5, 3 and 8"),
        (1, torch.zeros(2, 7, dtype=torch.int32), r"labels must be torch.int64 \[2, 7\] on cpu, got torch.int32 \[2, "),
        (2, torch.zeros(2, 5, 9), r"centroids must be torch.float32 \[2, 5, 8\] on cpu, got torch.float32 \[2, 5, 9\]"),
        (3, torch.zeros(2, 4, dtype=torch.int64), r"parents must be torch.int64 \[2, 5\] on cpu, got torch.int64 "),
        (4, torch.zeros(2, 3, 8).bfloat16(), r"tops must be torch.float32 \[2, 3, 8\] on cpu, got torch.bfloat16 "),
        (4, torch.zeros(2, 0, 8), "S, L, U and d must be at least 1, got 7, 5, 0 and 8"),
        (5, torch.zeros(2, 7, dtype=torch.int64, device="meta"), r"lengths must be .* on cpu, got .* on meta$"),
    ],
)
def test_errors(place: int, replaced: Tensor, message: str) -> None:
    given = list(random_call((7, 5, 3), 2, 8, torch.float32, seed=4))
    given[place] = replaced
    with pytest.raises(KernelError, match=f"^ordered_clusters: {message}") as caught:
        ordered_clusters(*given)
    assert "\n" not in str(caught.value)


def test_refusals() -> None:
    keys, labels, centroids, parents, tops, lengths = random_call((7, 5, 3), 2, 8, torch.float32, seed=5)
    whole = (keys, labels, centroids.long(), parents, tops.long(), lengths)
    with pytest.raises(KernelError, match=r"centroids must be floating point, got torch.int64$"):
        ordered_clusters(*whole)
    with pytest.raises(KernelError, match=r"unknown implementation 'triton'; use auto, reference or native$"):
        ordered_clusters(keys, labels, centroids, parents, tops, lengths, implementation="triton")
    if built:
        half = (keys, labels, centroids.half(), parents, tops.half(), lengths)
        with pytest.raises(KernelError, match=r"the centroids are torch.float16, not float32 or bfloat16$"):
            ordered_clusters(*half, implementation="native")
