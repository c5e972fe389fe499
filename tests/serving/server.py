"""A real `saccade serve` process on loopback, and what it says of itself."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

OURS = (sys.executable, "-m", "saccade", "serve")
STOCK = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1")
START_SECONDS = 300
"""A start takes 20 to 40 seconds of work; this is for machines where others work too."""
OURS_ALONE = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL")
"""What the tests' own process has in its environment for engines in itself."""


@dataclass(frozen=True)
class Running:
    """A server that answers, on a port of 127.0.0.1; its process has children."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def metrics(self) -> dict[str, float]:
        """Samples on `/metrics` by name, those with a label of ours as `name{value}`."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                policy = sample.labels.get("policy")
                name = sample.name if policy is None else f"{sample.name}{{{policy}}}"
                found[name] = sample.value
        return found

    def idle(self) -> bool:
        now, names = self.metrics(), ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(now[f"vllm:{name}"] for name in names)

    def resident(self) -> int:
        """Bytes in memory that belong to the server's processes alone, cache included."""
        first = psutil.Process(self.process.pid)
        return sum(one.memory_full_info().uss for one in (first, *first.children(recursive=True)))


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether a condition comes true; the statistics of an engine arrive after its answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


@contextmanager
def running(folder: Path, *arguments: str, program: Sequence[str] = OURS, **told: str) -> Iterator[Running]:
    """`saccade serve`, or another server, with these arguments, and `told` in its environment, until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port, log = int(probe.getsockname()[1]), folder / "server.log"
    environment = {name: value for name, value in os.environ.items() if name not in OURS_ALONE}
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
    # oneDNN keeps a matrix product's code for every number of tokens that a step has had, 1024 of them, 20 MiB in each
    # round of load; stock vLLM grows by as much. Its growth would hide ours.
    environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "16"
    # Memory of a block that was freed goes back at once: else a leak fills what a busy moment has left in the heap.
    environment["MALLOC_MMAP_THRESHOLD_"] = environment["MALLOC_TRIM_THRESHOLD_"] = str(2**16)
    environment |= told
    command = [*program, "--port", str(port), *arguments]
    with log.open("wb") as file:
        told_to: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=environment, **told_to)
    server = Running(process, port)
    try:
        assert eventually(lambda: process.poll() is not None or _answers(server), START_SECONDS), log.read_text()
        assert process.poll() is None, log.read_text()
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


def _answers(server: Running) -> bool:
    try:
        server.get("/health")
    except OSError:
        return False
    return True
