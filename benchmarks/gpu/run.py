"""Runs the sections one after the other, each in its own process and within its time, and joins what they write."""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHARES = {"environment": 0.06, "checks": 0.2, "kernels": 0.3, "decode": 0.38, "sanitizer": 0.06}
"""Of the time that is left for all sections asked for; what one leaves over the next ones get."""

NAMED = {"layers": 0.3, "planting": 0.2}
"""Sections that run only if they are asked for, and their shares beside the others."""

GRACE = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sections", default=",".join(SHARES))
    parser.add_argument("--minutes", type=float, default=8.75, help="for everything together")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on any device: to try the scripts themselves")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    sections = given.sections.split(",")
    shares = SHARES | NAMED
    unknown = set(sections) - set(shares)
    if unknown:
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}; there are {', '.join(shares)}")
    end, ended = time.monotonic() + 60 * given.minutes, {}
    for number, section in enumerate(sections):
        seconds = (end - time.monotonic()) * shares[section] / sum(shares[later] for later in sections[number:])
        for old in given.folder.glob(f"{section}.*"):
            old.unlink()
        command = command_of(section, given.folder, seconds, given.smoke)
        started = time.monotonic()
        status = "no such tool" if command is None else bounded(command, seconds, given.folder / f"{section}.log")
        ended[section] = {"status": status, "seconds": round(time.monotonic() - started, 1)}
        sys.stdout.write(f"{section}: {status}, {ended[section]['seconds']} s\n")
        join(given.folder, ended)
    return int(any(end["status"] not in ("passed", "no such tool") for end in ended.values()))


def command_of(section: str, folder: Path, seconds: float, smoke: bool) -> list[str] | None:
    """What a section runs; None where its tool is missing."""
    if section == "checks":
        return [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--maxfail=20",
            # Most of their time is the compiler's, on the host.
            *(["--numprocesses=8"] if importlib.util.find_spec("xdist") else []),
            "tests/gpu",
            f"--junitxml={folder}/checks.xml",
        ]
    if section == "sanitizer":
        tool = sanitizer()
        if tool is None:
            return None
        tests = [sys.executable, "-m", "pytest", "-q", "-x", "tests/gpu/test_sanitized.py"]
        return [tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all", *tests]
    script = [
        sys.executable,
        "-m",
        f"benchmarks.gpu.{section}",
        str(folder / f"{section}.json"),
        "--seconds",
        f"{seconds:.0f}",
    ]
    return [*script, "--smoke"] if smoke else script


def sanitizer() -> str | None:
    found = [Path(folder, "compute-sanitizer") for folder in os.environ.get("PATH", "").split(os.pathsep)]
    found.append(Path("/usr/local/cuda/bin/compute-sanitizer"))
    return next((str(path) for path in found if path.is_file()), None)


def bounded(command: list[str], seconds: float, log: Path) -> str:
    """Run a command and everything it starts for at most so long; say how it ended."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(seconds + GRACE)
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGTERM)
            raise
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return f"stopped after {seconds:.0f} s"
    return "passed" if code == 0 else f"failed with {code}"


def join(folder: Path, ended: dict[str, Any]) -> None:
    """Everything so far in one file, so that nothing is lost when a later section is stopped."""
    joined: dict[str, Any] = {"sections": ended}
    for section, end in ended.items():
        path, log = folder / f"{section}.json", folder / f"{section}.log"
        if path.is_file():
            joined[section] = json.loads(path.read_text())
        if end["status"] != "passed" or section in ("checks", "sanitizer"):
            end["tail"] = log.read_text(errors="replace")[-3000:] if log.is_file() else ""
    (folder / "gpu.json").write_text(json.dumps(joined, indent=1))


if __name__ == "__main__":
    sys.exit(main())
