"""The phase of rectification, held against tokens that are decoded one by one."""

from hypothesis import given
from hypothesis import strategies as st

from saccade.plans.rectify import Clean, Phase


def one_by_one(every: int | None, count: int) -> list[bool]:
    """Which of `count` tokens decoded one by one are dense (ReSA, section 2.2)."""
    dense, unclean = [], 0
    for _ in range(count):
        turn = every is not None and unclean == every
        dense.append(turn)
        unclean = 0 if turn else unclean + 1
    return dense


@given(st.one_of(st.none(), st.integers(1, 9)), st.integers(0, 40), st.integers(0, 40))
def test_pieces_break_where_a_dense_pass_begins_and_ends(every: int | None, decoded: int, count: int) -> None:
    phase, dense = Phase(every), one_by_one(every, decoded + count)
    pieces = list(phase.pieces(decoded, count))
    assert sum(pieces) == count and all(size > 0 for size in pieces)
    at = decoded
    for size in pieces:
        kinds = set(dense[at : at + size])
        assert len(kinds) == 1 and (size == 1 or kinds == {False})
        at += size
    unclean = 0
    for number, turn in enumerate(dense):
        assert phase.dense_at(number) == phase.due(unclean) == turn
        unclean = 0 if turn else unclean + 1


def test_a_call_of_several_tokens_is_due_before_it_goes_beyond_the_period() -> None:
    assert not Phase(4).due(2, 2) and Phase(4).due(2, 3)
    assert not Phase(None).due(10**6, 10**6)


STEPS = st.lists(st.tuples(st.sampled_from(["token", "token", "turn", "beside", "back"]), st.integers(1, 9)))


@given(st.integers(1, 5), st.integers(0, 30), st.integers(1, 12), STEPS)
def test_all_below_the_boundary_is_exact(every: int, covered: int, prompt: int, steps: list[tuple[str, int]]) -> None:
    """Slot by slot: exact is what a step wrote whose row saw all tokens, all of them exact."""
    phase, exact = Phase(every), [True] * prompt
    clean = Clean(phase).taken_back(0).after(0, prompt, dense=True)

    def write(start: int, count: int, *, dense: bool) -> None:
        nonlocal clean
        del exact[start:]
        for position in range(start, start + count):
            exact.append(all(exact) and (dense or position < covered))
        clean = clean.after(start, count, dense=dense, covered=dense and start <= covered)

    for kind, size in steps:
        length = len(exact)
        unclean = length - clean.boundary
        if kind == "token":
            turn = phase.due(unclean) and length >= covered
            write(*((clean.boundary, unclean + 1) if turn else (length, 1)), dense=turn)
            assert len(exact) - clean.boundary <= every
        elif kind == "back":
            del exact[max(length - size, 1) :]
            clean = clean.taken_back(len(exact))
        else:
            # A prompt's turn takes along what is unclean; whoever opts out does not.
            start = length if kind == "beside" or length <= covered else clean.boundary
            write(start, length - start + size, dense=True)
            assert kind == "beside" or clean.boundary == len(exact)
        assert clean.boundary <= len(exact) and all(exact[: clean.boundary])
