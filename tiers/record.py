"""The disk tier's files, byte by byte. Numbers are little-endian; CRC32C is Castagnoli's.

`manifest`, a JSON object, written whole under another name and renamed over: `version` of the
format, `generation` (records of another one are void), `slot_bytes`, `header_bytes` of a slot
before its page, and `slots_per_segment`.

`segment-000000.kv` and on: slots, back to back. Slot `p % slots` of segment `p // slots` holds
page `p`. A slot is a header, its size a multiple of 4096, then the page's bytes, then nothing up
to the next multiple of 4096. It is written in one go. The header:

    offset  size  what
         0     8  magic, b"RADIXKV\\0"
         8     4  version of the format, 2
        12     4  CRC32C of the header from byte 16 to its end
        16     8  generation
        24     8  length of the page in bytes
        32     4  CRC32C of the page
        36     4  depth: pages before this one in its sequence
        40     4  length of the blob
        44     4  zero
        48    32  fingerprint of all that the page's bytes depend on beside its tokens
        80    32  digest, SHA-256(parent digest + blob)
       112    32  parent digest
       144     -  blob, the owner's, then zeros

A record counts only if all of it holds: a torn write, a record of other weights or of a flushed
generation, a flipped bit and a slot never written are the same to the tier, a free slot. Nothing is
erased: what was freed or flushed lies there, void, until its slot is written again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tiers.base import Bytes2D, Checksums, Mask, Record
from tiers.copy import row_checksums

BLOCK = 4096  # what direct I/O wants addresses, offsets and lengths to be multiples of
VERSION = 2
CHECKED_FROM = 16
HEADER = np.dtype(
    [
        ("magic", "V8"),
        ("version", "<u4"),
        ("crc", "<u4"),
        ("generation", "<u8"),
        ("page_bytes", "<u8"),
        ("page_crc", "<u4"),
        ("depth", "<u4"),
        ("blob_bytes", "<u4"),
        ("zero", "<u4"),
        ("fingerprint", "V32"),
        ("digest", "V32"),
        ("parent", "V32"),
    ]
)

Header = np.void  # of dtype HEADER
Headers = npt.NDArray[np.void]


class Manifest(msgspec.Struct, frozen=True):
    """What the folder says of its slots."""

    generation: int
    slot_bytes: int
    header_bytes: int
    slots_per_segment: int
    version: int = VERSION

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """None where there is no whole manifest of this version."""
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=cls)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return manifest if manifest.version == VERSION else None

    def write(self, path: Path) -> None:
        """Whole or not at all. Raises OSError."""
        temporary = path.with_suffix(".new")
        with open(temporary, "wb") as file:
            file.write(msgspec.json.encode(self))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def header_bytes(max_blob_bytes: int) -> int:
    """Bytes of a slot before its page."""
    return round_up(HEADER.itemsize + max_blob_bytes)


def round_up(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def common_header(generation: int, page_bytes: int, fingerprint: bytes) -> Header:
    """What all headers of a tier say, and no other's do; the other fields are zero."""
    header: Header = np.zeros(1, HEADER)[0]
    header["magic"], header["version"] = np.void(b"RADIXKV\0"), VERSION
    header["generation"], header["page_bytes"] = generation, page_bytes
    header["fingerprint"] = np.void(fingerprint)
    return header


def fields(headers: Bytes2D) -> Headers:
    """The fixed part of `headers`, [n, header bytes], as a view, [n], with named fields."""
    found: Headers = headers[:, : HEADER.itemsize].view(HEADER)[:, 0]
    return found


def write_headers(
    headers: Bytes2D, common: Header, page_crcs: Checksums, records: Sequence[Record]
) -> None:
    """Fill `headers`, [n, header bytes]. Raises ValueError where a blob is too long."""
    headers[:] = 0
    for header, record in zip(headers, records, strict=True):
        end = HEADER.itemsize + len(record.blob)
        header[HEADER.itemsize : end] = np.frombuffer(record.blob, np.uint8)
    f = fields(headers)
    f[:] = common
    f["page_crc"] = page_crcs
    f["depth"] = [record.depth for record in records]
    f["blob_bytes"] = [len(record.blob) for record in records]
    f["digest"] = np.array([record.digest for record in records], "V32")
    f["parent"] = np.array([record.parent for record in records], "V32")
    f["crc"] = row_checksums(headers[:, CHECKED_FROM:])


def are_ours(headers: Bytes2D, common: Header) -> Mask:
    """Which of `headers`, [n, header bytes], are whole and of the tier whose `common` is given."""
    f = fields(headers)
    ok: Mask = f["crc"] == row_checksums(headers[:, CHECKED_FROM:])
    for name in ("magic", "version", "generation", "page_bytes", "fingerprint"):
        ok &= f[name] == common[name]
    return ok


def read_record(header: npt.NDArray[np.uint8]) -> Record | None:
    """What a header that `are_ours` says; None where its digest is not that of its blob."""
    f = fields(header[None])[0]
    blob = header[HEADER.itemsize :][: int(f["blob_bytes"])].tobytes()
    parent, digest = f["parent"].tobytes(), f["digest"].tobytes()
    if hashlib.sha256(parent + blob).digest() != digest:
        return None
    return Record(digest, parent, int(f["depth"]), blob)
