"""What keeps a decoding step out of a CUDA graph: every reason, for every policy."""

import pytest

import claims  # noqa: F401  # registers `lazy_clusters`
from saccade.decode.capture import reasons_against_capture
from saccade.methods.policy import Policy
from saccade.types import ModelShape

SHAPE = ModelShape(layers=4, query_heads=4, kv_heads=2, head_dim=8)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dense", []),
        ("resa:rectify=8", []),
        ("resa:rectify=8:verify", ["rectify=8:verify"]),
        ("lychee_cluster", []),
        ("lazy_clusters", ["moves in memory"]),
    ],
)
def test_every_reason_is_named(spec: str, words: list[str]) -> None:
    policy = Policy.from_spec(spec)
    for observers, expected in (([], words), ([object()], [*words, "observers"])):
        reasons = reasons_against_capture(policy.plan(SHAPE), policy.rectify, observers)
        assert len(reasons) == len(expected)
        assert all(word in reason for word, reason in zip(expected, reasons, strict=True))
