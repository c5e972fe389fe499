"""Names that fit: short, no two alike within a run, and never anything else than what the spec says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import saccade
from saccade.report.labels import LONGEST, family, labels, meanings

HEADS = "heads:0+2.1+2.2+4.2+5.1+6.1+6.2+6.3+7.2+7.3+8.2+8.3+9+10.1+11"


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        ("dense", "dense"),
        ("tidal:reselect=7", "tidal:reselect=7"),
        # Three whole layers of four heads, and twelve.
        (f"lychee_decode:roles={HEADS}", "lychee_decode:heads=24 of 48"),
        (f"lychee_decode:budget=16,roles={HEADS}", "lychee_decode:budget=16,heads=24 …"),
        ("lychee_decode:roles=/data/runs/7/roles.json", "lychee_decode:roles=roles.json"),
        ("tidal:reselect=0+1+2+3+4+5+6+7+8+9", "tidal:reselect=0+1+2+3+…6+7+8+9"),
    ],
)
def test_a_label_says_what_has_room(spec: str, label: str) -> None:
    assert labels([spec], kv_heads=4, layers=12) == {spec: label}
    assert meanings({spec: label}) == ([] if label == spec else [f"{label} is {spec}"])


def test_without_the_models_sizes_both_ends_of_a_list_are_kept() -> None:
    (label,) = labels([f"lychee_decode:roles={HEADS}"]).values()
    assert label.startswith("lychee_decode:roles=heads:0+…")


def test_names_that_would_be_the_same_are_numbered() -> None:
    """Two lists of as many heads, and two files of one name."""
    lists = [f"lychee_decode:roles=heads:0+1.{head}" for head in range(4)]
    files = [f"lychee_decode:roles=/{folder}/roles.json" for folder in ("a" * 20, "b" * 20)]
    found = labels([*lists, *files, lists[0]], kv_heads=4, layers=12)
    assert list(found) == [*lists, *files]
    assert [found[spec] for spec in lists[:3]] == [
        "lychee_decode:heads=5 of 48", "lychee_decode:heads=5 of 48 #2", "lychee_decode:heads=5 of 48 #3"
    ]  # fmt: skip
    assert found[files[1]] == "lychee_decode:roles=roles.json #2"


@given(st.lists(st.text(st.sampled_from("abc:=,+1/#…"), min_size=1, max_size=80), max_size=30), st.integers(0, 8))
def test_labels_are_short_and_no_two_alike(tails: list[str], kv_heads: int) -> None:
    specs = [f"tidal:reselect=3,{tail}" for tail in tails]
    found = labels(specs, kv_heads, layers=2)
    assert set(found) == set(specs) and len(set(found.values())) == len(found)
    assert all(0 < len(label) <= LONGEST for label in found.values())


def test_a_family_is_a_spec_without_its_budget() -> None:
    for spec in ("dense", "tidal:reselect=7", "resa:ratio=0.25,min_pages=1"):
        policy = saccade.policy(spec)
        assert family(str(policy)) == str(policy)
        if policy.options.budgeted:
            assert family(str(policy.with_budget(64))) == str(policy)
