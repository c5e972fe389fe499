"""When dense passes come: after every phase, never cut, and by turns."""

import pytest
from scheduled import HOWS, OFF, TOGETHER, Engine, decoding, passes, phase, prompt

from walking import in_turn


@pytest.mark.parametrize("how", HOWS, ids=" ".join)
@pytest.mark.parametrize(("length", "every"), [(1, 1), (8, 5), (130, 32)])
def test_phase(length: int, every: int, how: dict[str, bool]) -> None:
    engine = Engine(f"quest:budget=16,rectify={every}", **how)
    request = engine.add("a", prompt(length), 80)
    while len(request.output_token_ids) < 79:
        engine.step()
        assert not request.is_prefill_chunk or request.num_computed_tokens < length, "what structured output asks for"
    expected, begun = phase(length, 80, every), 78 + len(engine.under_way)
    assert decoding(engine, "a", length) == expected[:begun]
    passes = sum(count > 1 for _, count in expected[:begun])
    assert engine.scheduler.rectifications == passes
    assert engine.scheduler.rectified_tokens == passes * every
    engine.finish()
    assert decoding(engine, "a", length) == expected


@pytest.mark.parametrize(("budget", "how"), in_turn([5, 6, 8, 16], HOWS))
def test_passes_wait_for_room_and_are_never_cut(budget: int, how: dict[str, bool]) -> None:
    """The smallest budgets hold one pass of 5; six requests are due at once again and again. Either limit counts."""
    seqs = min(budget, 6)
    room = "max_num_batched_tokens" if budget < 8 else "max_num_scheduled_tokens"
    engine = Engine("quest:budget=16,rectify=4", max_num_seqs=seqs, **{room: budget}, **how)
    for index in range(6):
        engine.add(str(index), prompt(7 + index, 50 * index), 30)
    engine.finish()
    for index in range(6):
        assert decoding(engine, str(index), 7 + index) == phase(7 + index, 30, 4)
    assert all(sum(output.num_scheduled_tokens.values()) <= budget for output in engine.outputs)
    waits = sum(len(output.num_scheduled_tokens) < len(engine.worker.steps) for output in engine.outputs)
    assert waits


@pytest.mark.parametrize("how", HOWS, ids=" ".join)
def test_passes_of_a_batch_come_together(how: dict[str, bool]) -> None:
    """Five requests that came at different times: one step in five is mixed, where without it nearly all are."""
    shares = []
    for settings in ({}, TOGETHER):
        engine = Engine("quest:budget=16,rectify=4", max_num_batched_tokens=64, **how, **settings)
        for index in range(5):
            engine.add(str(index), prompt(7 + index, 50 * index), 60)
            engine.step()
        begun = len(engine.outputs)
        engine.finish()
        most = [max(output.num_scheduled_tokens.values(), default=0) for output in engine.outputs[begun:]]
        shares.append(sum(count > 1 for count in most) / len(most))
        for index in range(5):
            again = passes(decoding(engine, str(index), 7 + index), 7 + index)
            assert max(again) == 4 and (settings or set(again) == {4})
    assert shares[0] > 0.8
    assert shares[1] <= 0.25


@pytest.mark.parametrize(("count", "budget"), [(3, 8), (7, 12)])
def test_who_opts_out_or_does_not_fit_does_not_join(count: int, budget: int) -> None:
    """Beside the one whose turn it is and one token for each other fits nobody, or few: no pass is cut in two."""
    engine = Engine("quest:budget=16,rectify=4", max_num_batched_tokens=budget, **TOGETHER)
    engine.add("out", prompt(5, 900), 60, params={"extra_args": OFF})
    for index in range(count):
        engine.add(str(index), prompt(5, 50 * index), 60)
    engine.finish()
    assert passes(decoding(engine, "out", 5), 5) == []
    assert all(sum(output.num_scheduled_tokens.values()) <= budget for output in engine.outputs)
    again = [passes(decoding(engine, str(index), 5), 5) for index in range(count)]
    assert all(set(one) <= {1, 2, 3, 4} and len(one) >= 60 // 5 - 1 for one in again)
    assert engine.scheduler.rectifications == sum(map(len, again))


@pytest.mark.parametrize(("budget", "covered", "first"), [(8, 0, 4), (9, 8, 3), (9, 9, 4)])
def test_who_joins_fits_and_has_decoded_sparsely(budget: int, covered: int, first: int) -> None:
    """The other's turn comes one step later, unless its three tokens just fit and the last of them was sparse."""
    engine = Engine("quest:budget=16,rectify=4", max_num_batched_tokens=budget, covered=covered, **TOGETHER)
    engine.add("0", prompt(30), 20)
    while not engine.worker.steps["0"] or engine.requests["0"].is_prefill_chunk:
        engine.step()
    engine.add("1", prompt(5, 900), 20)
    engine.finish()
    assert passes(decoding(engine, "0", 30), 30)[0] == 4
    assert passes(decoding(engine, "1", 5), 5)[0] == first


@pytest.mark.parametrize(("count", "budget", "least"), [(8, 8, 60 // 3), (6, 12, 60 * 3 // 4)])
def test_nobody_starves(count: int, budget: int, least: int) -> None:
    """Fewer tokens in a step than all would need: who waited longest comes first, the last one makes progress too."""
    engine = Engine("quest:budget=16,rectify=4", max_num_batched_tokens=budget)
    requests = [engine.add(str(index), prompt(5, 50 * index), 60) for index in range(count)]
    while all(len(request.output_token_ids) < 60 for request in requests):
        engine.step()
    assert min(len(request.output_token_ids) for request in requests) >= least
    engine.finish()


def test_dense_neighbours_do_not_keep_a_pass_waiting_for_ever() -> None:
    engine = Engine("quest:budget=16,rectify=4", max_num_batched_tokens=8)
    for index in range(6):
        engine.add(str(index), prompt(5, 50 * index), 400, params={"extra_args": OFF})
    request = engine.add("sparse", prompt(5, 900), 50)
    for _ in range(150):
        engine.step()
    assert len(request.output_token_ids) == 50
    assert decoding(engine, "sparse", 5) == phase(5, 50, 4)


def test_the_order_of_running_requests_is_kept() -> None:
    """vLLM preempts the last one: whose turn it is must not decide about that."""
    engine = Engine("quest:budget=16,rectify=4")
    for index in range(4):
        engine.add(str(index), prompt(5 + index), 60)
        engine.step()
    for _ in range(30):
        engine.step()
        assert [request.request_id for request in engine.scheduler.running] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("how", HOWS[::2], ids=" ".join)
def test_up_to_the_longest_row(how: dict[str, bool]) -> None:
    """Which comes at every place of a phase."""
    engine = Engine("quest:budget=16,rectify=4", max_model_len=40, **how)
    requests = [engine.add(str(length), prompt(length, 50 * length), 100) for length in range(20, 25)]
    engine.finish()
    for request in requests:
        length = request.num_prompt_tokens
        assert request.num_tokens == 40
        assert decoding(engine, request.request_id, length) == phase(length, 40 - length, 4)
