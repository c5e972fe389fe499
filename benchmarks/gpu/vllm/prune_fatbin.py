"""Blanks the device code of other GPUs in a CUDA library: `prune_fatbin.py LIBRARY.so [--arch 90]`, in place.

A library holds a fat binary for every compiled file, a list of entries: machine code of one architecture each, or PTX.
The driver chooses by the entries' headers, which stay as they are, so that no offset changes; payloads of every
architecture but one become zeros, which compress to nothing, and so do names for debuggers. A kernel that exists for
other architectures only fails when it is first called, and so does one of those that are not wanted.
"""

import argparse
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2
SECTIONS = (".nv_fatbin", "__nv_relfatbin")
NAMES = (".symtab", ".strtab")


@dataclass(frozen=True)
class Entry:
    """Code of one architecture, such as 90, at a place in the file."""

    kind: int
    architecture: int
    begin: int
    end: int


def sections(data: bytes | bytearray) -> dict[str, tuple[int, int]]:
    """Offset and size of every section of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        sys.exit("prune_fatbin.py: not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    # Of each header: name, then offset and size in the file.
    headers = [struct.unpack_from("<I20xQQ", data, table + number * size) for number in range(count)]
    found = {}
    for name, offset, length in headers:
        begin = headers[names][1] + name
        found[data[begin : data.index(0, begin)].decode()] = (offset, length)
    return found


def fat_binaries(data: bytes | bytearray, at: int, size: int) -> Iterator[list[Entry]]:
    """The entries of every fat binary in a section."""
    end = at + size
    while at + 16 <= end:
        magic, header, length = struct.unpack_from("<I2xHQ", data, at)
        if magic != MAGIC:
            if any(data[at : at + 8]):
                sys.exit(f"prune_fatbin.py: neither a fat binary nor padding at offset {at:#x}")
            at += 8
            continue
        found, entry, stop = [], at + header, at + header + length
        while entry < stop:
            kind, own, payload = struct.unpack_from("<H2xIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            begin, entry = entry + own, entry + own + payload
            if kind not in (PTX, MACHINE_CODE) or entry > stop:
                sys.exit(f"prune_fatbin.py: an entry of an unknown format before offset {entry:#x}")
            found.append(Entry(kind, architecture, begin, entry))
        yield found
        at = stop


def prune(data: bytearray, architecture: int, unwanted: bytes | None = None) -> tuple[int, int]:
    """Blank in place; bytes of device code that are kept, and that were blanked.

    `unwanted` is an expression: code of one file in which it is found is blanked, too.
    """
    whole = sections(data)
    kept = blanked = 0
    for name in NAMES:
        begin, length = whole.get(name, (0, 0))
        data[begin : begin + length] = bytes(length)
    for name in SECTIONS:
        for entries in fat_binaries(data, *whole.get(name, (0, 0))):
            for entry in entries:
                length = entry.end - entry.begin
                wanted = unwanted is None or not re.search(unwanted, data[entry.begin : entry.end])
                if entry.kind == MACHINE_CODE and entry.architecture == architecture and wanted:
                    kept += length
                else:
                    data[entry.begin : entry.end] = bytes(length)
                    blanked += length
    return kept, blanked


def prune_file(library: Path, architecture: int, unwanted: bytes | None = None) -> None:
    data = bytearray(library.read_bytes())
    kept, blanked = prune(data, architecture, unwanted)
    library.write_bytes(data)
    sys.stderr.write(f"{library.name}: {kept / 1e6:.1f} MB of device code kept, {blanked / 1e6:.1f} MB blanked\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="compute capability times ten (default: 90)")
    given = parser.parse_args()
    prune_file(given.library, given.arch)


if __name__ == "__main__":
    main()
