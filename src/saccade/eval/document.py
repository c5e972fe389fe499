"""Long texts: the language reference and the library, which every Python has, packages, and files of the user's.

Nothing is copied into the repository. Topics and modules are held out of training by the CRC-32 of their
name, so the split does not move when Python adds one.
"""

import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from zlib import crc32

from ..errors import DocumentError

_SKIPPED = ("test", "tests", "idlelib", "lib2to3", "pydoc_data", "site-packages", "encodings", "__pycache__")
_PACKAGES = ("torch", "scipy", "matplotlib", "numpy", "transformers")
"""Where text beyond the standard library comes from; transformers last, since its files quote one another."""


def _held_out(name: str, every: int) -> bool:
    return crc32(name.encode()) % every == every - 1


@cache
def language_reference(*, held_out: bool = False) -> str:
    """The topics of `pydoc_data` in alphabetical order; one in three is held out, for evaluation.

    Topics quote one another (`compound` contains `for`), so a paragraph is kept where it appears first,
    and one that a topic held out contains is in no other.
    """
    seen: set[str] = set()
    halves: dict[bool, list[str]] = {True: [], False: []}
    for half in (True, False):
        for name in sorted(topics):
            if _held_out(name, 3) is half:
                for paragraph in topics[name].strip().split("\n\n"):
                    if (identity := " ".join(paragraph.split())) not in seen:
                        seen.add(identity)
                        halves[half].append(paragraph)
    return "\n\n".join(halves[held_out])


@cache
def _files(root: Path) -> tuple[Path, ...]:
    """The modules of a folder in path order. They are thousands, and every text of a run asks."""
    return tuple(path for path in sorted(root.rglob("*.py")) if not {*_SKIPPED} & {*path.relative_to(root).parts})


def library_sources(*, held_out: bool = False, characters: int = 4_000_000) -> str:
    """Sources of the standard library up to about `characters`; one module in ten is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    for path in _files(root):
        if characters > 0 and _held_out(path.relative_to(root).as_posix(), 10) is held_out:
            texts.append(path.read_text(encoding="utf-8", errors="ignore"))
            characters -= len(texts[-1])
    return "\n\n".join(texts)


def package_sources() -> Iterator[str]:
    """Sources of installed packages, file by file, each behind a blank line; nothing trained here has read them."""
    for name in _PACKAGES:
        found = find_spec(name)
        for root in map(Path, (found and found.submodule_search_locations) or ()):
            for path in _files(root):
                yield "\n\n" + path.read_text(encoding="utf-8", errors="ignore")


def read_utf8(path: Path, name: str) -> str:
    """A file of the user's, line ends as they are; or a DocumentError, which calls it `name`."""
    try:
        return decoded(path.read_bytes(), name)
    except OSError as error:
        raise DocumentError(f"{name} cannot be read: {error.strerror}") from None


def decoded(text: bytes, name: str) -> str:
    """UTF-8, or a DocumentError."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{name} is not UTF-8: byte {error.start} cannot be read") from None


def read_document(path: Path) -> str:
    """The text of a document, or a DocumentError: absent, empty or not UTF-8."""
    text = read_utf8(path, f"document {str(path)!r}")
    if not text.strip():
        raise DocumentError(f"document {str(path)!r} is empty")
    return text
