"""Time on a device: work captured in CUDA graphs, variants in turn, medians; and what the memory itself can do."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], Any]

AHEAD = 1_000_000
"""Cycles that the device is kept busy before it is timed, half a millisecond: more than launching a graph takes."""


class Deadline:
    """Seconds that are left, so that a section ends itself before it is stopped."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


class Captured:
    """Calls that run one after the other as one CUDA graph; on another device they are called.

    Args:
        calls: each on memory of its own, so that together they read more than the caches hold.
        device: where.
    """

    def __init__(self, calls: list[Call], device: torch.device) -> None:
        self.calls, self.device, self._graph = calls, device, None
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for call in calls[:2]:
                    call()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                for call in calls:
                    call()
            self._graph.replay()
            torch.cuda.synchronize()

    def run(self) -> None:
        if self._graph is None:
            for call in self.calls:
                call()
        else:
            self._graph.replay()

    def milliseconds(self) -> float:
        """Of one call."""
        return elapsed(self.run, self.device) / len(self.calls)


def kernels_of(call: Call, times: int) -> dict[str, tuple[float, float]]:
    """Of each CUDA kernel of a call, by name: launches and their microseconds together, means of so many calls."""
    found: dict[str, tuple[float, float]] = {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    for event in profiled.events():
        name = event.name.partition("(")[0][-60:]
        launches, spent = found.get(name, (0.0, 0.0))
        found[name] = launches + 1 / times, spent + event.device_time_total / times
    return {name: (round(launches, 1), round(spent, 2)) for name, (launches, spent) in found.items()}


def elapsed(call: Call, device: torch.device, ahead: int = AHEAD) -> float:
    """Milliseconds of a call by the device's own clock, launched while the device is still busy.

    So the host's share of a launch is not in it, as it is not where steps follow each other without a look at tokens.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(ahead)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def interleaved(variants: dict[str, Captured], *, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Medians and quartiles in milliseconds; every round times each variant once. Fewer rounds where time is short."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    deadline = Deadline(seconds)
    for number in range(rounds):
        if number >= 5 and deadline.left < 0:
            break
        for name, variant in variants.items():
            times[name].append(variant.milliseconds())
    return {name: summary(values) for name, values in times.items()}


def summary(values: list[float]) -> dict[str, float]:
    fast, median, slow = statistics.quantiles(values, n=4, method="inclusive")
    return {"ms": median, "ms_fast": fast, "ms_slow": slow, "samples": len(values)}


def bandwidth(device: torch.device, megabytes: int) -> dict[str, float]:
    """GB/s of copies (bytes read and written) and of reads, the best of two ways each; medians of 10."""
    source = torch.randn(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    # Several results per buffer: a single sum ends in a tail where most of the device waits.
    rows = source.view(1024, -1)
    reads = (Captured([lambda: rows.sum(1)], device), Captured([lambda: rows.amax(1)], device))
    # The driver's own copy reaches two thirds of what a kernel does, at least inside a graph.
    copies = (
        Captured([lambda: target.copy_(source)], device),
        Captured([lambda: torch.neg(source, out=target)], device),
    )

    def rate(work: Captured, size: float) -> float:
        return size / statistics.median(work.milliseconds() for _ in range(10)) / 1e6

    return {
        "copy_gb_s": max(rate(copy, 2 * source.nbytes) for copy in copies),
        "read_gb_s": max(rate(read, source.nbytes) for read in reads),
    }


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of the float64 oracle."""
    return float((got.double() - expected).norm() / expected.norm())


def arguments(said: str | None, seconds: float) -> argparse.ArgumentParser:
    """What every section is given."""
    parser = argparse.ArgumentParser(description=said)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--smoke", action="store_true")
    return parser


def write(path: Path, results: dict[str, Any]) -> None:
    """Whole or not at all, as another process may read it at any time."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(results, indent=1))
    draft.replace(path)


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else ''}"
