"""Triton's spherical k-means and means of sets: interpreted, on the cases and loops of the others; and compiled."""

import pytest
import torch
from compiling import compile_kernel, pointers
from kernel_checks import DEVICES
from test_spherical_kmeans import (  # noqa: F401 - of the kernels
    test_against_float64,
    test_means_are_those_of_loops,
    test_no_cluster_is_empty,
    test_opposite_vectors_keep_the_centroid,
)

from saccade.kernels.spherical_kmeans import api, reference, triton
from saccade.selection.clusters.mass_index import alike
from walking import in_turn


@pytest.mark.parametrize(("dtype", "dim"), in_turn([torch.float32, torch.bfloat16], [64, 128]))
def test_planting_is_that_of_the_other_implementations(
    dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole block, one that the sinks cut, a single token and none; keys have a direction in common."""
    chance, sizes = torch.Generator().manual_seed(dim), [(128, 20), (101, 17), (1, 1), (0, 0)]
    keys = (torch.randn(4, 128, dim, generator=chance) + 2 * torch.randn(dim, generator=chance)).to(dtype).float()
    counts, made = torch.tensor(sizes).unbind(1)
    keys *= (torch.arange(128) < counts[:, None])[..., None]
    wanted = alike(keys, counts, 20, made)
    monkeypatch.setattr(api, "choose", lambda *_, **__: "triton")
    labels = alike(keys, counts, 20, made)
    assert labels.equal(wanted)
    # A problem is what it is alone, bit by bit: so an index is equal for every split of the prompt.
    assert alike(keys[1:2], counts[1:2], 20, made[1:2]).equal(labels[1:2])
    for found, expected in zip(
        api.member_means(keys, labels, 20), reference.member_means(keys, wanted, 20), strict=True
    ):
        # Up to 128 numbers of at most 10 are added up, whose order is another.
        assert torch.allclose(found, expected.to(found.dtype), atol=128 * 10 * 2**-24 / 8)


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_nothing_is_spilled(dim: int, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups of 2,048 tokens and 256 clusters."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: divmod(capability, 10))
    kinds = {**dict.fromkeys("vectors centroids found spreads own".split(), "*fp32"), "counts": "*i64", "made": "*i64"}
    kinds |= {**dict.fromkeys(("labels", "sizes"), "*i32"), **dict.fromkeys(("count", "clusters", "sets"), "i32")}
    block, columns, warps = triton.tiles(torch.device("cuda"), dim)
    strips, both = triton.MEMBERS // dim, {"HEAD_DIM": dim, "INNER": dim}
    gather = {**both, "MEANS": True, "PLACES": 2048 // strips, "STRIPS": strips}
    assign, settle = {**both, "VECTORS": block, "CENTROIDS": columns}, {"VECTORS": 2048, "SETS": 1024}
    cases = {"_assign": (assign, warps, 2), "_settle": (settle, 4, 3), "_gather": (gather, 1, 3)}
    for name, (constants, threads, stages) in cases.items():
        signature = {one: kinds[one] for one in getattr(triton, name).arg_names if one in kinds}
        how = {"capability": capability, "warps": threads, "stages": stages}
        made = compile_kernel(triton.__name__, name, signature, constants, pointers(signature), **how)
        assert made.spilled == 0, name
        assert name != "_assign" or "mma" in made.ptx, "products are of tensor cores"
