"""Role files and recipes: what is written reads back; what no such file may hold is one line that names it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import saccade
from mangling import RECIPE, ROLE_FILE, Document


def named(part: Document | str) -> str:
    return part if isinstance(part, str) else part.kind.KIND


of_each = pytest.mark.parametrize("document", [ROLE_FILE, RECIPE], ids=named)


def refused(document: Document, path: Path, says: str, words: tuple[str, ...]) -> None:
    with pytest.raises(saccade.PolicyError) as error:
        document.kind.read(path)
    message = str(error.value)
    assert message.startswith(f"{document.kind.KIND} {path}{says}: ")
    assert "\n" not in message and len(message) < 400 + len(str(path))
    assert all(word in message for word in words), message


@of_each
def test_a_valid_file_reads_and_is_written_as_it_was(document: Document, tmp_path: Path) -> None:
    path, again = tmp_path / "any name.json", tmp_path / "again.json"
    path.write_text(json.dumps(document.valid))
    file = document.kind.read(path)
    assert json.loads(file.to_json()) == document.valid
    file.write(again)
    assert document.kind.read(again) == file
    assert {other.name for other in tmp_path.iterdir()} == {path.name, again.name}
    with pytest.raises(saccade.OutputError, match=r"nowhere.*cannot be written: No such file"):
        file.write(tmp_path / "nowhere" / "roles.json")
    with pytest.raises(saccade.PolicyError, match=f"a {document.kind.KIND} names its model's architecture"):
        replace(file, model=replace(file.model, architecture=None)).to_json()


@of_each
@pytest.mark.parametrize("value", [math.nan, object()], ids=["NaN", "an object"])
def test_free_parts_must_be_json(document: Document, value: object) -> None:
    file = document.kind.from_json(json.dumps(document.valid))
    for part in {"found", "scores"} & set(document.valid):
        with pytest.raises(saccade.PolicyError, match=r"found( and scores)? must be JSON without NaN"):
            replace(file, **{part: {"loss": value}}).to_json()


OWN = [(RECIPE, f"no {key}") for key in RECIPE.valid] + [(RECIPE, "an unknown key of the model")]
"""What a recipe might read otherwise than a role file, which is all that is said of a file in one place."""


@pytest.mark.parametrize(("document", "what"), [(ROLE_FILE, what) for what in ROLE_FILE.mangled] + OWN, ids=named)
def test_a_mangled_file_is_refused_in_one_line(document: Document, what: str, tmp_path: Path) -> None:
    text, words = document.mangled[what]
    path = tmp_path / "file.json"
    path.write_text(text)
    refused(document, path, "", words)


@of_each
@given(data=st.data())
def test_no_other_value_but_a_valid_one_gets_through(document: Document, data: st.DataObject) -> None:
    """Whatever stands at one place of a valid file: it reads, or one line says why not."""
    text = data.draw(document.others)
    try:
        document.kind.from_json(text)
    except saccade.PolicyError as error:
        assert str(error).startswith(f"{document.kind.KIND}: ") and len(str(error).splitlines()) == 1  # noqa: PT017


@of_each
def test_a_file_that_cannot_be_read_is_named(document: Document, tmp_path: Path) -> None:
    binary = tmp_path / "file.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, word in ((tmp_path / "no.json", "No such file"), (tmp_path, "directory"), (binary, "utf-8")):
        refused(document, path, " cannot be read", (word,))
