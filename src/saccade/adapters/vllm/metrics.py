"""Figures `saccade_*` on vLLM's own `/metrics`, by prometheus_client's multi-process mode; and their reader.

vLLM's statistics object has no field for a plugin. In multi-process mode every process keeps its figures in files of
one folder, and `/metrics` adds up what lies in the folder: it is all that has to be shared. Its name has to be in the
environment before prometheus_client is imported. `saccade serve` sees to that; who starts vLLM by hand has to, or
nothing is exported.
"""

import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from functools import cache
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any
from urllib.request import urlopen

from torch import Tensor

from ...decode.counters import Counters
from ...decode.recall import MeanRecall, RecallObserver
from ...errors import ServingError
from ...recipes.acceptance import Acceptance

logger = logging.getLogger("vllm.saccade")

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that names the folder."""

PLACED = ("policy", "position")
"""Labels of drafts; their positions in a cycle begin at 0, as vLLM's do."""

KINDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "tokens_decoded": (
        "Counter",
        "Tokens decoded under the policy; the first of an answer, which the prompt gives, is not among them",
        (),
    ),
    "tokens_attended": ("Counter", "Cached tokens that decoding attended to, mean over layers and heads", ()),
    "tokens_skipped": ("Counter", "Cached tokens that decoding did not attend to, mean over layers and heads", ()),
    "share_attended": ("Gauge", "Share of the cached tokens that decoding attended to, since the start", ()),
    "requests": ("Counter", "Requests by the policy that they decode with; off: opted out, dense", ("policy",)),
    "attention_recall": (
        "Summary",
        "Softmax mass of dense attention on the sets of heads with a set, of the tokens in which it was measured",
        (),
    ),
    "attention_recall_with_dense": ("Summary", "The same as a mean over all heads, with dense heads as 1", ()),
    "rectifications": ("Counter", "Dense passes over tokens that sparse steps had decoded", ()),
    "rectified_tokens": ("Counter", "Tokens that dense passes ran again", ()),
    "drafted_tokens": ("Counter", "Tokens drafted under the policy that a dense pass has verified", PLACED),
    "accepted_tokens": ("Counter", "Drafted tokens that the dense pass has kept", PLACED),
    "cycles": ("Counter", "Steps of drafts that adapt, by how many each row has, 0 included", ("drafts",)),
    "preemptions": ("Counter", "Requests that lost their cache and were computed anew, under a rectified policy", ()),
}
"""What is exported: prometheus_client's class, the help text, the labels."""

RECALLS = ("attention_recall", "attention_recall_with_dense")


@contextmanager
def exporting() -> Iterator[str]:
    """Have the servers that are started inside export their figures; gives the folder.

    A folder that the user has named is taken and kept, or a ServingError says that it cannot be made. Any other is
    removed at the end, or by the next server.
    """
    given = os.environ.get(VARIABLE)
    if given:
        try:
            Path(given).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ServingError(f"{VARIABLE}={given!r} is no folder: {error.strerror}") from error
        yield given
        return
    _sweep()
    with TemporaryDirectory(prefix="saccade-metrics-") as folder, Path(folder, "new").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends in whatever way; under its name only once it is held
        Path(folder, "new").rename(Path(folder, "lock"))
        os.environ[VARIABLE] = folder
        try:
            yield folder
        finally:
            del os.environ[VARIABLE]


def _sweep() -> None:
    """Remove the folders of servers that were killed, and nobody else's."""
    for lock in Path(gettempdir()).glob("saccade-metrics-*/lock"):
        with suppress(OSError), lock.open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def leftovers(folder: str) -> int:
    """Files of figures in a folder before its server starts: `/metrics` would add theirs to what is counted."""
    return len(list(Path(folder).glob("*.db")))


@cache
def exported() -> bool:
    """Whether this process's figures are exported; the first call says so in the log if they are not."""
    from prometheus_client.values import ValueClass

    if os.environ.get(VARIABLE) and getattr(ValueClass, "_multiprocess", False):
        return True
    missing = "saccade: no saccade_* figures on /metrics; to have them, name an empty folder in %s before vLLM starts"
    logger.info(missing, VARIABLE)
    return False


@cache
def metric(name: str, *labels: str) -> Any:
    """One of `KINDS`, as `saccade_NAME`, for all engines of this process."""
    import prometheus_client

    kind, text, names = KINDS[name]
    if labels:
        return metric(name).labels(*labels)
    settings = {"multiprocess_mode": "mostrecent"} if kind == "Gauge" else {}
    # In no registry: what is exported lies in the folder, and a second engine of a process is no error.
    return getattr(prometheus_client, kind)(f"saccade_{name}", text, names, registry=None, **settings)


def count(name: str, amount: float = 1, *labels: str) -> None:
    """Add to a counter, if figures are exported."""
    if exported():
        metric(name, *labels).inc(amount)


class StepMetrics:
    """What the steps of one worker report.

    Reading the counters waits for the device they are on. On the host that costs nothing and happens at the end of
    every step (`pause` 0); on an accelerator at most once in `pause` seconds, and once when no step has come for as
    long: nobody says that a batch was the last one.

    `layers` are those that a policy concerns, None: all that are counted. While `starting`, as a
    lossless engine does, no step is counted and no thread reads the device: it would break a capture.
    """

    starting = False

    def __init__(
        self, counters: Counters, recall: RecallObserver | None, pause: float, layers: Sequence[int] | None = None
    ) -> None:
        self._counters, self._recall, self._pause = counters, recall, pause
        self._layers = range(counters.layers) if layers is None else layers
        self._read = self._latest = time.monotonic()
        self._lock, self._waiting = threading.RLock(), False
        self._ours = True
        self._verified: tuple[str, Tensor] | None = None
        self._decoded = self._selecting = self._dense = 0
        self._noted: tuple[Sequence[int], Sequence[int]] = (), ()
        self._measuring = self._measured = self._measured_before = 0
        self._attended_before = self._attended = self._skipped = 0.0
        self._recalled_before = (0.0, 0.0)
        for name in ("tokens_decoded", "tokens_attended", "tokens_skipped", "share_attended"):
            metric(name)
        if recall is not None:
            for name in RECALLS:
                metric(name)

    def step(self, selecting: Sequence[int], dense: Sequence[int]) -> None:
        """Note the tokens that the step to come decodes under the policy, by the lengths of their rows.

        Those of `dense` attend to everything, because the budget covers them or in a dense pass.
        """
        if self.starting:
            return
        self._latest, self._noted = time.monotonic(), (selecting, dense)
        with self._lock:
            if not self._ours or (self._pause and self._latest - self._read >= self._pause):
                self.flush()
            self._decoded += len(selecting) + len(dense)
            self._selecting += sum(selecting)
            self._dense += sum(dense)
            if self._pause and not self._waiting:
                self._wait(self._pause)

    def again(self) -> None:
        """Note a step of the same rows, each a token longer: a graph is replayed, and nobody prepares it."""
        selecting, dense = self._noted
        self.step([length + 1 for length in selecting], [length + 1 for length in dense])

    def verified(self, policy: str, drafts: Tensor) -> None:
        """Note how many drafts a step has verified and kept, by their position: int `[2, k]` on the device."""
        if self.starting:
            return
        with self._lock:
            self._verified = policy, drafts if self._verified is None else drafts + self._verified[1]
            # Where no drafts follow, no step of ours reports it.
            if not self._pause:
                self.flush()
            elif not self._waiting:
                self._wait(self._pause)

    def measuring(self, tokens: int) -> None:
        """Note that recall is measured in so many tokens of the step to come; they count once it is through."""
        with self._lock:
            self._measuring += tokens

    def measured(self, tokens: int) -> None:
        """Note that recall was measured in so many tokens of a step before."""
        with self._lock:
            self._measured += tokens

    def disregard(self) -> None:
        """The step to come is nobody's: a warm-up, whose counts are not reported.

        Behind it no look is under way any more: the next step may be captured, and a graph cannot hold that another
        thread waits for the device.
        """
        with self._lock:
            if self._ours:
                self.flush()
            self._ours = self._waiting = False

    def layer_done(self, layer: int) -> None:
        """Note that a layer has attended; the last one ends the step."""
        if layer < self._layers[-1]:
            return
        with self._lock:
            self._measured, self._measuring = self._measured + self._measuring, 0
            if not self._pause and self._ours:
                self.flush()

    def flush(self) -> None:
        """Report the steps before this call."""
        with self._lock:
            if not self._decoded and self._verified is None and self._ours:
                return
            self._read = time.monotonic()
            totals = self._counters.totals()
            attended_in = [totals[layer][0] for layer in self._layers]
            before, self._attended_before = self._attended_before, sum(attended_in) / len(attended_in)
            if self._ours:
                # A sum of means, which rounding may carry past the sum of lengths; counters do not fall.
                attended = min(self._attended_before - before, self._selecting)
                self._attended += attended + self._dense
                self._skipped += self._selecting - attended
                metric("tokens_decoded").inc(self._decoded)
                metric("tokens_attended").inc(attended + self._dense)
                metric("tokens_skipped").inc(self._selecting - attended)
                metric("share_attended").set(self._attended / (self._attended + self._skipped))
            self._flush_recall()
            if self._ours and self._verified is not None:
                policy, drafts = self._verified
                for name, counts in zip(("drafted_tokens", "accepted_tokens"), drafts.tolist(), strict=True):
                    for position, amount in enumerate(counts):
                        metric(name, policy, str(position)).inc(amount)
            self._verified = None
            self._decoded = self._selecting = self._dense = 0
            self._ours = True

    def _wait(self, seconds: float) -> None:
        """Look again after some seconds whether steps still come."""
        self._waiting = True
        timer = threading.Timer(seconds, self._look)
        timer.daemon = True
        timer.start()

    def _look(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            left = self._latest + self._pause - time.monotonic()
            if left > 0:
                self._wait(left)
            else:
                self._waiting = False
                self.flush()

    def _flush_recall(self) -> None:
        if self._recall is None or not self._measured:
            return
        count = self._measured_before + self._measured
        # Layers that nobody has seen are vLLM's, which attend to everything.
        seen, unseen = self._recall.per_layer(), MeanRecall(None, None, 0.0)
        mean = MeanRecall.over([seen[layer] or unseen for layer in self._layers])
        if mean.attention is not None:  # else this rank has no head with a set
            recalled = mean.attention * count, mean.with_dense[0] * count
            for name, total, before in zip(RECALLS, recalled, self._recalled_before, strict=True):
                for _ in range(self._measured):
                    metric(name).observe((total - before) / self._measured)
            self._recalled_before = recalled
        self._measured_before, self._measured = count, 0


def drafts_of(server: str) -> tuple[list[Acceptance], dict[int, int]]:
    """Drafts of every policy that has some verified, and steps by how many drafts a row has, where that adapts.

    `server` is asked once; it is an address such as `http://127.0.0.1:8000`.

    Raises:
        SaccadeError: no address, no answer, no figures of saccade's or none that go together, or no prometheus_client.
    """
    if find_spec("prometheus_client") is None:
        raise ServingError("--server needs prometheus_client: pip install prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    address = server.rstrip("/").removesuffix("/metrics") + "/metrics"
    if not address.startswith(("http://", "https://")):
        raise ServingError(f"--server {server!r} is not valid: an address such as http://127.0.0.1:8000")
    try:
        with urlopen(address, timeout=10) as answer:
            text = answer.read().decode(errors="replace")
    except (OSError, HTTPException, ValueError) as error:
        raise ServingError(f"{address} does not answer: {str(error).strip('<>')}") from None
    samples = list[Any]()
    with suppress(ValueError):
        samples += [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    if not any(one.name.startswith("saccade_") for one in samples):
        raise ServingError(f"{address} has no figures saccade_*: no server of saccade's, or one that exports none")

    def counts(name: str, label: str, **labels: str) -> dict[int, int]:
        """A counter by a label that holds numbers, in their order."""
        own = (one for one in samples if one.name == f"saccade_{name}_total" and labels.items() <= one.labels.items())
        try:
            return dict(sorted((int(one.labels[label]), int(one.value)) for one in own))
        except (KeyError, ValueError, OverflowError):
            raise ServingError(f"{address}: saccade_{name}_total has counts by {label} that are not valid") from None

    models = {one.labels["model_name"] for one in samples if "model_name" in one.labels}
    told = {"version": 1, "model": models.pop() if len(models) == 1 else None, "date": date.today().isoformat()}
    found = []
    for spec in sorted({one.labels.get("policy", "") for one in samples if one.name == "saccade_drafted_tokens_total"}):
        drafted, accepted = (counts(f"{what}_tokens", "position", policy=spec) for what in ("drafted", "accepted"))
        if places := [place for place, count in drafted.items() if count]:
            both = {"drafted": [drafted[one] for one in places], "accepted": [accepted.get(one, 0) for one in places]}
            found.append(Acceptance.from_json(json.dumps({**told, "policy": spec, **both}), address))
    return found, counts("cycles", "drafts")
