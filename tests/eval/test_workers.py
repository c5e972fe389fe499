"""Work shared out among processes: the same results in the same order, and no wait for a process that is gone."""

import os
import sys
import time
from multiprocessing import get_context

import pytest

from saccade.errors import SaccadeError
from saccade.eval.workers import shared_out, workers_for

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forked processes")


def test_results_come_in_order_whoever_is_first() -> None:
    meeting = get_context("fork").Barrier(2)

    def work(number: int) -> tuple[int, int]:
        if number < 2:
            meeting.wait(60)  # nobody goes on before both processes have work
            time.sleep(0.05 if number == 0 else 0)
        return number, os.getpid()

    results = list(shared_out(work, 7, 2))
    assert [number for number, _ in results] == list(range(7))
    processes = {process for _, process in results}
    assert os.getpid() not in processes and len(processes) == 2


def test_an_error_is_raised_where_its_result_was_expected() -> None:
    def work(number: int) -> int:
        if number == 2:
            raise SaccadeError("two is too much")
        return number

    results = shared_out(work, 4, 2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(SaccadeError, match="two is too much"):
        next(results)


def test_a_killed_process_is_an_error() -> None:
    def work(number: int) -> int:
        if number == 1:
            os._exit(1)
        return number

    with pytest.raises(SaccadeError, match="killed"):
        list(shared_out(work, 3, 2))


def test_processes_end_with_the_one_that_waits_for_them() -> None:
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work(number: int) -> None:
        sender.send(number)
        time.sleep(120)

    waiting = context.Process(target=lambda: list(shared_out(work, 2, 2)))
    waiting.start()
    sender.close()  # from here on only they can write
    assert {receiver.recv(), receiver.recv()} == {0, 1}
    waiting.kill()
    waiting.join()
    assert receiver.poll(60)
    with pytest.raises(EOFError):
        receiver.recv()


@pytest.mark.parametrize(
    ("change", "workers"), [({}, 4), ({"count": 3}, 3), ({"cores": 1}, 1), ({"threads": 2}, 1), ({"device": "cuda"}, 1)]
)
def test_how_many(change: dict[str, object], workers: int) -> None:
    usual = {"count": 9, "cores": 4, "threads": 1, "device": "cpu"}
    assert workers_for(**{**usual, **change}) == workers  # type: ignore[arg-type]  # names and kinds are those above
