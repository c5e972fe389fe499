"""Compiles the C kernels while a wheel is built, where there is a compiler; without one torch does their work."""

import os
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags  # hatchling brings it

FOLDER = Path("src", "saccade", "kernels", "_native")
SOURCES = (
    "attention.c",
    "chunk_keys.c",
    "kmeans.c",
    "linear.c",
    "mass.c",
    "pool.c",
    "rank_union.c",
    "topk.c",
)
# Not plain ".so": Python would take that for an extension module.
LIBRARY = "libsaccade.so.1"
# No -ffast-math: infinities mean something here.
FLAGS = (
    "-std=gnu11 -O3 -fPIC -shared -fvisibility=hidden -pthread -fno-math-errno -fno-trapping-math -ffp-contract=fast"
)
# Vectors wider than the base target's are passed to inlined functions only: the ABI note does not apply.
QUIET = "-Wno-psabi"
LIBRARIES = "-lm"
SECONDS = 900  # 15 to 40 alone on a core; beside other work several times that
# How a library of macOS begins, on 64 bits; and where it says for which version it was made.
MACH_O, LC_BUILD_VERSION = b"\xcf\xfa\xed\xfe", 0x32


class CompileKernels(BuildHookInterface[Any]):
    """Puts the library beside its sources, where an editable install looks too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / FOLDER
        trouble = compile_library(folder)
        if trouble is not None:
            # One that an earlier build left behind would be of another source.
            (folder / LIBRARY).unlink(missing_ok=True)
            self.app.display_warning(f"saccade: no native kernels, torch is used instead: {trouble}")
            return
        build_data["artifacts"].append(f"/{(FOLDER / LIBRARY).as_posix()}")
        build_data["pure_python"] = False
        # ctypes loads the library: it is bound to a platform, and to no version of Python.
        build_data["tag"] = f"py3-none-{platform_tag((folder / LIBRARY).read_bytes(), platform_tags())}"


def compile_library(folder: Path) -> str | None:
    """Compile to `folder`; what went wrong, or None."""
    if os.name != "posix":
        return f"they are not built on {os.name}"
    compiler = find_compiler()
    if compiler is None:
        return "no C compiler was found (CC, cc, gcc, clang)"
    # Into a new file that replaces the old one at once: a process that has loaded the old one keeps it.
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{LIBRARY}.")
    os.close(handle)
    new = Path(name)
    try:
        sources = [str(folder / source) for source in SOURCES]
        command = [*compiler, *shlex.split(f"{FLAGS} {QUIET}"), *sources, "-o", name, LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            return f"{shlex.join(compiler)} failed: {(done.stderr or done.stdout).strip()[-500:]}"
        new.chmod(0o755)
        new.replace(folder / LIBRARY)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{shlex.join(compiler)} failed: {error}"
    finally:
        new.unlink(missing_ok=True)
    return None


def platform_tag(library: bytes, ours: Iterable[str]) -> str:
    """The oldest platform that loads `library`; `ours`: the tags of this one.

    With glibc it is that of the newest symbol that the library asks for (PEP 600), on macOS the version that the
    library itself names. A plain linux tag, which says nothing of the C library and which indexes refuse, is taken only
    where there is no other.
    """
    here = min(ours, key=lambda tag: tag.startswith("linux_"))
    if library.startswith(MACH_O):
        return re.sub(r"^macosx_\d+_\d+", f"macosx_{macos_version(library)}", here)
    asked = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library)
    if not here.startswith("manylinux_") or not asked:
        return here
    major, minor = max((int(major), int(minor)) for major, minor in asked)
    return re.sub(r"^manylinux_\d+_\d+", f"manylinux_{major}_{minor}", here)


def macos_version(library: bytes) -> str:
    """The oldest macOS that loads a library, as tags write it: the compiler noted it in a load command."""
    place = 32  # behind the header, whose fifth number counts the commands
    for _ in range(struct.unpack_from("<I", library, 16)[0]):
        command, size, _, version = struct.unpack_from("<4I", library, place)
        if command == LC_BUILD_VERSION:
            major, minor = version >> 16, version >> 8 & 255
            return f"{major}_{minor if major == 10 else 0}"  # tags count whole versions from 11 on
        place += size
    raise ValueError(f"{LIBRARY} names no version of macOS; MACOSX_DEPLOYMENT_TARGET of 10.14 or newer makes it do so")


def find_compiler() -> list[str] | None:
    """The command in CC, which may carry options, else the first of the usual names."""
    for candidate in (os.environ.get("CC"), "cc", "gcc", "clang"):
        command = shlex.split(candidate or "")
        if command and shutil.which(command[0]):
            return command
    return None
