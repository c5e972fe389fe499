"""Joins vLLM's wheel and what it needs into one archive, without the device code of other GPUs; prepare.sh runs it.

pack.py WHEEL SHA256 SITE FOLDER: SITE holds the packages installed so far and gets vLLM; FOLDER is made, with
vllm.tar.xz in it and a MANIFEST that tells this archive from another.
"""

import hashlib
import lzma
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from prune_fatbin import prune_file

ARCHITECTURE = 90
"""Compute capability 9.0: H100 and H200."""

WITH_KERNELS: dict[str, bytes | None] = {
    "vllm/_C_stable_libtorch.abi3.so": None,
    "vllm/_moe_C_stable_libtorch.abi3.so": None,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": rb"EEELi(96|192|512)EN|EEELi256EN\w+_12float_e4m3_t",
}
"""Libraries, and by which words in names their kernels stay out: values 96, 192 and 512 wide, and 256 in 8 bits."""
LIBRARIES = (*WITH_KERNELS, "vllm/cumem_allocator.abi3.so", "vllm/fs_io_C.abi3.so", "vllm/spinloop.abi3.so")
"""All other libraries stay out: FlashAttention 2, which Hopper does not take, and those of other models and GPUs."""

LEFT_OUT = (
    *(f"vllm/third_party/{name}/" for name in ("deep_gemm", "fmha_sm100", "tml_fa4")),
    # Models that nothing else imports.
    *(f"vllm/models/{name}/" for name in ("beam", "flint", "glm5next", "inkling", "muse_spark")),
)
SERVER = "vllm/vllm-rs"
"""The server's front end in Rust, which nobody starts."""

NEVER_READ = (
    "*.dist-info/RECORD",
    "tvm_ffi/3rdparty/*",
    "tvm_ffi/include/*",
    "vllm/models/*/amd/*",
    "*.pyi",
    "*/swagger-ui*",
)
"""Lists of hashes, a library's sources, models' code for AMD, types, documentation: who looks does without."""


def unpack(wheel: Path, site: Path) -> None:
    """What is wanted of the wheel.

    Raises:
        SystemExit: a library is missing.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        if missing := sorted(set(LIBRARIES) - names):
            sys.exit(f"pack.py: {wheel.name} has no {', '.join(missing)}")
        for name in sorted(names):
            if name in LIBRARIES or not (name.endswith(".so") or name == SERVER or name.startswith(LEFT_OUT)):
                archive.extract(name, site)


def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what differs between two packs of the same files."""
    member.uid = member.gid = 0
    member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member


def pack(site: Path, archive: Path) -> None:
    """Compress what is read of the files below `site`; libraries last and together, within one dictionary."""
    wanted = (
        path
        for path in site.rglob("*")
        if path.is_file() and not any(fnmatch(str(path.relative_to(site)), never) for never in NEVER_READ)
    )
    files = sorted(wanted, key=lambda one: (one.suffix == ".so", one.suffix, one))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 256 << 20}]
    with lzma.open(archive, "wb", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for path in files:
            tar.add(path, path.relative_to(site), filter=plain)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()


def main() -> None:
    wheel, expected, site, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    if sha256(wheel) != expected:
        sys.exit(f"pack.py: {wheel} is not the wheel that this was written for: its SHA-256 is not {expected}")
    unpack(wheel, site)
    for name, unwanted in WITH_KERNELS.items():
        prune_file(site / name, ARCHITECTURE, unwanted)
    folder.mkdir()
    archive = folder / "vllm.tar.xz"
    pack(site, archive)
    (folder / "MANIFEST").write_text(f"{wheel.name}, sm_{ARCHITECTURE}\n{sha256(archive)}\n")


if __name__ == "__main__":
    main()
