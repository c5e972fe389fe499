"""What a timing must say about where it was taken."""

from __future__ import annotations

import platform
import statistics
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .kernels._native.library import description
from .kernels._triton.availability import installed


def environment(*, threads: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Machine, versions and the read bandwidth measured now, in GB/s."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "kernels": description() if device.type == "cpu" else _kernels_beside_cpu(device),
        "threads": threads,
        "dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "versions": {"saccade": __version__, **{name: version(name) for name in ("torch", "transformers")}},
        "read_bandwidth_gb_s": round(read_bandwidth(device), 1),
    }


def _kernels_beside_cpu(device: torch.device) -> str:
    return "triton" if device.type == "cuda" and installed() else "torch"


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
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        buffer.sum()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return buffer.nbytes / statistics.median(times[1:]) / 1e9


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
