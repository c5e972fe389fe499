"""Unpacks a pack into a folder, once, and describes the checkout to vLLM as an installed package.

assemble.py PACK FOLDER; assemble.sh runs it.
"""

import hashlib
import re
import shutil
import sys
import tarfile
from pathlib import Path

import tomllib
import torch


def refuse_other_machines() -> None:
    if sys.version_info[:2] != (3, 12):
        sys.exit(f"assemble.py: Python is {sys.version.split()[0]}, and the pack was made for 3.12")
    if not torch.cuda.is_available():
        sys.exit("assemble.py: torch sees no GPU")
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability != (9, 0):
        sys.exit(f"assemble.py: {name} has compute capability {capability}, and the pack was made for (9, 0)")
    sys.stderr.write(f"assemble.py: {name}, torch {torch.__version__}\n")


def unpack(pack: Path, base: Path) -> None:
    """Into `base`/site, unless this very pack lies there already."""
    manifest = (pack / "MANIFEST").read_text()
    unpacked = base / "MANIFEST"
    if unpacked.is_file() and unpacked.read_text() == manifest:
        return
    archive = pack / "vllm.tar.xz"
    if hashlib.sha256(archive.read_bytes()).hexdigest() not in manifest:
        sys.exit(f"assemble.py: {archive} is damaged")
    shutil.rmtree(base, ignore_errors=True)
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(base / "site", filter="data")
    unpacked.write_text(manifest)


def describe(checkout: Path, site: Path) -> None:
    """Write the metadata by which vLLM finds the plugin: the entry points of pyproject.toml."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())
    name, source = project["project"]["name"], checkout / project["tool"]["hatch"]["version"]["path"]
    version = re.findall(r'^__version__ = "(.*)"$', source.read_text(), re.MULTILINE)[0]
    for old in site.glob("saccade*.dist-info"):  # by its former name, too
        shutil.rmtree(old)
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"  # behind a hyphen stands the version
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = {"console_scripts": project["project"]["scripts"], **project["project"]["entry-points"]}
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in of.items()) for group, of in groups.items()
    ]
    (info / "entry_points.txt").write_text("".join(lines))


def main() -> None:
    pack, base = Path(sys.argv[1]), Path(sys.argv[2])
    refuse_other_machines()
    unpack(pack, base)
    describe(Path(), base / "site")


if __name__ == "__main__":
    main()
