"""Files are replaced whole or stay as they were, whatever the disk does."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from saccade.errors import OutputError
from saccade.files import replace_text


def full(*given: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(*given: Any) -> NoReturn:
    raise KeyboardInterrupt


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "saccade.json"
    path.write_text("old")
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_new_text_takes_the_place_of_the_old(old: Path) -> None:
    replace_text(old, "neu: ü\n")
    assert old.read_text(encoding="utf-8") == "neu: ü\n"


def test_a_new_file_is_as_readable_as_any_other(old: Path) -> None:
    plain = old.with_name("plain")
    plain.touch()
    replace_text(old, "new")
    assert old.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    old: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OutputError, match=r"^recipe '.*saccade\.json' cannot be written: No space left on device$"):
        replace_text(old, "new", "recipe")
    assert old.read_text() == "old"
    assert names(old.parent) == [old.name]


def test_the_text_reaches_the_disk_before_it_takes_the_place(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def fsync(file: int) -> None:
        (part,) = set(names(old.parent)) - {old.name}
        seen.append(((old.parent / part).read_text(), old.read_text()))

    monkeypatch.setattr(os, "fsync", fsync)
    replace_text(old, "new")
    assert seen == [("new", "old")]


def test_an_interrupt_leaves_nothing_behind_and_goes_on(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_text(old, "new")
    assert old.read_text() == "old"
    assert names(old.parent) == [old.name]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files, as a small disk does")
def test_a_disk_that_is_really_too_small(old: Path) -> None:
    """Files of this process may have 4,096 bytes: the write itself fails, half of it done."""
    code = f"""
import resource, signal
from saccade.errors import OutputError
from saccade.files import replace_text
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    replace_text({str(old)!r}, "n" * 100_000)
except OutputError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{str(old)!r} cannot be written: File too large\n"
    assert old.read_text() == "old"
    assert names(old.parent) == [old.name]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"nowhere/saccade\.json' cannot be written: No such file"):
        replace_text(tmp_path / "nowhere" / "saccade.json", "new")


def test_a_folder_in_the_files_place(tmp_path: Path) -> None:
    (tmp_path / "saccade.json").mkdir()
    with pytest.raises(OutputError, match="cannot be written: Is a directory"):
        replace_text(tmp_path / "saccade.json", "new")
    assert names(tmp_path) == ["saccade.json"]
