"""What `saccade doctor --server` says of a server's drafts, from figures that the workers' own code has exported."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread

import pytest

from commands import invoker
from saccade.adapters.vllm import metrics
from saccade.cli import app
from saccade.errors import PolicyError, ServingError
from saccade.recipes.acceptance import Acceptance

POLICY, MODEL = "quest:budget=64,rectify=8:verify", "Qwen3-8B"
# 100 cycles of one draft, 100 of three; two processes do half of it each.
DRAFTED, ACCEPTED = (200, 100, 100), (180, 90, 72)
EXPORT = """
import os
import sys
import torch
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from saccade.adapters.vllm.metrics import StepMetrics, count
from saccade.decode.counters import Counters
Gauge("vllm:num_requests_running", "theirs", ["engine", "model_name"]).labels("0", {model!r}).set(1)
parent = os.fork()
report = StepMetrics(Counters(2, by_row=True), None, 0.0)
for policy in {policies!r}:
    report.step([90], [])
    report.verified(policy, torch.tensor({drafts!r}) // 2)
    count("cycles", 50, "1"), count("cycles", 50, "3")
parent or os._exit(0)
assert os.wait()[1] == 0
registry = CollectorRegistry()
MultiProcessCollector(registry)
sys.stdout.buffer.write(generate_latest(registry))
"""
Serving = Callable[..., str]


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """An HTTP server on loopback; gives its address once it is told what it serves, or whose drafts."""
    server = HTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    Thread(target=server.serve_forever, daemon=True).start()

    def serve(*policies: str, text: bytes | None = None) -> str:
        if text is None:
            (folder := tmp_path / "figures").mkdir()
            command = [sys.executable, "-c", EXPORT.format(model=MODEL, policies=policies, drafts=(DRAFTED, ACCEPTED))]
            environment = {**os.environ, metrics.VARIABLE: str(folder)}
            text = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
            assert not policies or b"\nsaccade_share_attended 0.0\n" in text, "a share is of all processes"
        (tmp_path / "metrics").write_bytes(text)
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    server.shutdown()
    server.server_close()


def test_drafts_are_told_and_written(serving: Serving, tmp_path: Path) -> None:
    url, file = serving(POLICY), tmp_path / "acceptance.json"
    result = invoker(app)("doctor", "--server", url, "--json", file)
    assert result.exit_code == 0, result.output
    server, drafts, chance, cycles = (line.partition("  ")[2].strip() for line in result.stdout.splitlines()[-4:])
    assert (server, drafts) == (url, f"{POLICY}: 400 verified, 85.5% accepted, 2.00 per drafting cycle")
    # 180 of 200; 90 of 100 reach position 1, as many as were accepted before it; then 72 of 90.
    assert chance == "by position, from 0: 0.900, 1.000, 0.800"
    assert cycles == "steps by drafts of a row: 100 of 1, 100 of 3"
    counts = {"drafted": DRAFTED, "accepted": ACCEPTED}
    one = Acceptance(version=1, policy=POLICY, model=MODEL, date=date.today(), **counts)
    assert Acceptance.read(file) == one
    assert metrics.drafts_of(f"{url}/metrics") == ([one], {1: 100, 3: 100})


def test_nothing_verified_yet_is_said(serving: Serving) -> None:
    url = serving()
    told = invoker(app)("doctor", "--server", url).stdout.splitlines()
    assert told[-2].split() == ["server", url] and "no draft was verified yet" in told[-1]
    for options, words in (
        (("--server", url), f"takes drafts of one policy: {url} has verified those of 0"),
        ((), "is valid only with --server URL"),
    ):
        refused = invoker(app)("doctor", "--json", "a.json", *options)
        assert refused.exit_code == 2 and f"--json a.json {words}\n" in refused.stderr and not refused.stdout


def test_servers_that_tell_nothing(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    other = serving(text=b"<html>")
    for url, words in (
        ("127.0.0.1:8000", "'127.0.0.1:8000' is not valid: an address such as http://127.0.0.1:8000"),
        ("file:///etc", "is not valid"),
        ("http://127.0.0.1:1", "http://127.0.0.1:1/metrics does not answer: .*refused"),
        (f"{other}/elsewhere", "does not answer: HTTP Error 404"),
        (other, "has no figures saccade_"),
    ):
        with pytest.raises(ServingError, match=words) as refused:
            metrics.drafts_of(url)
        assert "\n" not in str(refused.value)
    with pytest.raises(PolicyError, match=f"{other}/metrics: unknown policy 'foresight'"):
        metrics.drafts_of(serving("foresight:verify=8"))
    for name, label, at, count in (("drafted_tokens", "position", 0, "NaN"), ("cycles", "drafts", "x", 1)):
        figures = f'saccade_{name}_total{{policy="tidal",{label}="{at}"}} {count}\n'
        with pytest.raises(ServingError, match=f"saccade_{name}_total has counts by {label} that are not valid"):
            metrics.drafts_of(serving(text=figures.encode()))
    monkeypatch.setattr(metrics, "find_spec", lambda _: None)
    with pytest.raises(ServingError, match="needs prometheus_client: pip install prometheus_client"):
        metrics.drafts_of(other)
