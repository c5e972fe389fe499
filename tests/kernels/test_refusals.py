"""An implementation that cannot take a cache says why and never falls back; nobody's choice is one that can."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from attention_contract import operations
from kernel_caches import Case, make_case
from kernel_checks import fast_attention, refused, with_other_rows
from quantised import small

WIDTHS = "values are 8 wide, keys 16"
WHOLE = "it knows neither rows that are whole"


def narrow_values() -> Case:
    case = make_case(lengths=[9])
    return replace(case, kv=replace(case.kv, v=case.kv.v[..., :8].contiguous()))


def turned(case: Case) -> Case:
    return replace(case, kv=replace(case.kv, v=case.kv.v.transpose(1, 3).contiguous().transpose(1, 3)))


UNFIT: dict[str, tuple[Callable[[], Case], dict[str, str]]] = {
    "strided": (lambda: make_case(layout="strided", lengths=[9]), {"cpu": "strides", "native": "strides"}),
    "narrow columns": (
        lambda: make_case(layout="columns", page=3, lengths=[9, 4]),
        {"cpu": "strides", "native": "strides"},
    ),
    "values as columns": (
        lambda: turned(make_case(layout="columns", page=16, lengths=[9])),
        {"cpu": "strides", "native": "strides"},
    ),
    "quantised": (small, {"cpu": "quantised", "native": "float8_e4m3fn"}),
    "scaled": (
        lambda: replace(case := make_case(lengths=[9]), kv=replace(case.kv, v_scale=torch.ones(2))),
        {"cpu": "quantised", "native": "quantised"},
    ),
    "narrow values": (narrow_values, {"cpu": WIDTHS, "native": WIDTHS, "triton": WIDTHS}),
    "whole rows": (lambda: with_other_rows(make_case(lengths=[9]), [True], [False]), {"cpu": WHOLE, "native": WHOLE}),
    "head dim": (lambda: make_case(lengths=[9], head_dim=24), {"native": "head dim 24"}),
    "half": (lambda: make_case(lengths=[9], dtype=torch.float16), {"native": "float16"}),
    "group": (lambda: make_case(lengths=[9], kv_heads=1, group=33), {"native": "33 query heads"}),
}


@pytest.mark.parametrize("name", UNFIT)
def test_who_cannot_take_a_cache_says_why(name: str) -> None:
    make, reasons = UNFIT[name]
    for operation in operations(make()).values():
        for implementation, words in reasons.items():
            if implementation in (*fast_attention, "triton"):
                refused(f"'{implementation}' cannot take this call: .*{words}", operation, implementation)
        found, wanted = operation("auto"), operation("reference")
        if "cpu" in reasons:
            assert equal(found, wanted)
        else:
            torch.testing.assert_close(found, wanted)


def equal(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(map(equal, one, other))
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)


def test_an_unknown_implementation_is_named() -> None:
    for operation in operations(make_case(lengths=[9])).values():
        refused("unknown implementation 'fast'", operation, "fast")
