"""Where and with what a result was made: versions, processor, kernels, and the bandwidth that bounds a timing."""

import gc
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..kernels._native.library import description
from ..kernels._triton.refusals import installed

MEMORY, GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
"""Where Linux tells what memory there is, and what a container may take of it."""


def versions(*packages: str) -> dict[str, str]:
    """Versions of saccade, Python, torch, transformers and further packages, as they were installed."""
    found = {name: version(name) for name in ("torch", "transformers", *packages)}
    return {"saccade": __version__, "python": platform.python_version(), **found}


def environment(*, threads: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Machine, versions and the read bandwidth measured now, in GB/s: what a timing must say."""
    found = versions()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": processor(),
        "device": device_name(device),
        "kernels": kernels_on(device),
        "threads": threads,
        "dtype": str(dtype).removeprefix("torch."),
        "python": found.pop("python"),
        "versions": found,
        "read_bandwidth_gb_s": round(read_bandwidth(device), 1),
    }


def kernels_on(device: torch.device) -> str:
    """Which kernels `auto` takes on a device, in words."""
    if device.type == "cpu":
        return description()
    return "triton" if device.type == "cuda" and installed() else "torch"


def device_name(device: torch.device) -> str:
    """An accelerator's product name; of other devices their type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def processor() -> str:
    """The processor's name as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def read_bandwidth(device: torch.device, *, megabytes: int = 1024, repeats: int = 5) -> float:
    """GB/s at which a buffer much larger than the caches is summed; median of `repeats`."""
    buffer = torch.ones(megabytes * 2**20 // 4, dtype=torch.float32, device=device)
    return buffer.nbytes / _seconds(buffer.sum, device, repeats) / 1e9


def copy_bandwidth(device: torch.device, *, megabytes: int = 4096, repeats: int = 15) -> float:
    """GB/s read and written together where a buffer much larger than the caches is copied; median of `repeats`."""
    source = torch.ones(megabytes * 2**20 // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device, repeats) / 1e9


def _seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of `repeats` runs, behind one that does not count."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be had on a device, a container's limit counted; None where the system does not say."""
    if device.type == "cuda":
        # What only cycles hold, and what torch keeps for later.
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu" or not MEMORY.is_file():
        return None
    free = 1024 * int(MEMORY.read_text().partition("MemAvailable:")[2].split()[0])
    limit = GROUP / "memory.max"
    if limit.is_file() and (most := limit.read_text().strip()).isdigit():
        # The first figure of all: memory that is no cache of files.
        free = min(free, int(most) - int((GROUP / "memory.stat").read_text().split()[1]))
    return free


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
