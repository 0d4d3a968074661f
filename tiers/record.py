"""The disk tier's files, byte by byte. Numbers are little-endian; CRC32C is Castagnoli's.

`manifest`, written whole under another name and renamed over:

    offset  size  what
         0     8  magic, b"RADIXDSK"
         8     4  version of the format, 1
        12     4  CRC32C of bytes [16, 48)
        16     8  generation: records of another one are void
        24     8  bytes of a slot
        32     8  bytes of a slot before its page
        40     8  slots in a segment

`segment-000000.kv` and on: slots, back to back. Slot `p % slots` of segment `p // slots` holds
page `p`. A slot is a header, its size a multiple of 4096, then the page's bytes, then nothing up
to the next multiple of 4096. It is written in one go. The header:

         0     8  magic, b"RADIXKV\\0"
         8     4  version of the format, 1
        12     4  CRC32C of bytes [16, 144 + blob length)
        16     8  generation
        24     8  length of the page in bytes
        32     4  CRC32C of the page
        36     4  depth: pages before this one in its sequence
        40     4  length of the blob
        44     4  zero
        48    32  fingerprint of all that the page's bytes depend on beside its tokens
        80    32  digest, SHA-256(parent digest + blob)
       112    32  parent digest
       144     -  blob, the owner's

A record counts only if all of it holds: a torn write, a record of other weights or of a flushed
generation, a flipped bit and a slot never written are the same to the tier, a free slot.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from tiers.base import Record

BLOCK = 4096  # what direct I/O wants addresses, offsets and lengths to be multiples of
VERSION = 1

_MANIFEST = struct.Struct("<8sII4Q")
_MANIFEST_MAGIC = b"RADIXDSK"
_HEADER_START = b"RADIXKV\0" + VERSION.to_bytes(4, "little")
_HEADER_CHECKED = struct.Struct("<QQIII4x32s32s32s")  # from _CHECKED_FROM to the blob
_CHECKED_FROM = 16
HEADER_BYTES = _CHECKED_FROM + _HEADER_CHECKED.size  # before the blob

Bytes = npt.NDArray[np.uint8]


class Manifest(NamedTuple):
    generation: int
    slot_bytes: int
    header_bytes: int
    slots_per_segment: int

    def encode(self) -> bytes:
        checked = _MANIFEST.pack(b"", 0, 0, *self)[_CHECKED_FROM:]
        return struct.pack("<8sII", _MANIFEST_MAGIC, VERSION, _crc(checked)) + checked

    @classmethod
    def decode(cls, data: bytes) -> Manifest | None:
        """None where the data are not a whole manifest of this version."""
        if len(data) != _MANIFEST.size:
            return None
        magic, version, crc, *fields = _MANIFEST.unpack(data)
        if (magic, version, crc) != (_MANIFEST_MAGIC, VERSION, _crc(data[_CHECKED_FROM:])):
            return None
        return cls(*fields)


class Header(NamedTuple):
    generation: int
    page_bytes: int
    page_crc: int
    fingerprint: bytes
    record: Record


def header_bytes(max_blob_bytes: int) -> int:
    """Bytes of a slot before its page."""
    return round_up(HEADER_BYTES + max_blob_bytes)


def round_up(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def page_crc(page: Bytes) -> int:
    """CRC32C of a page's bytes. The GIL is released."""
    return _crc(page)


def encode_header(into: Bytes, header: Header) -> None:
    """Write the header at the start of a slot. Raises ValueError where the blob is too long."""
    generation, page_bytes, crc_of_page, fingerprint, (digest, parent, depth, blob) = header
    fields = generation, page_bytes, crc_of_page, depth, len(blob), fingerprint, digest, parent
    checked = _HEADER_CHECKED.pack(*fields) + blob
    data = _HEADER_START + _crc(checked).to_bytes(4, "little") + checked
    if len(data) > len(into):
        raise ValueError(f"a blob of {len(blob)} bytes does not fit {len(into)} bytes of header")
    into[: len(data)] = np.frombuffer(data, np.uint8)
    into[len(data) :] = 0


def decode_header(slot: Bytes) -> Header | None:
    """None where the bytes are not a whole header, or its digest is not that of its blob."""
    data = slot.tobytes()
    crc = int.from_bytes(data[12:16], "little")
    fields = _HEADER_CHECKED.unpack_from(data, _CHECKED_FROM)
    generation, page_bytes, crc_of_page, depth, blob_len, fingerprint, digest, parent = fields
    end = HEADER_BYTES + blob_len
    if data[:12] != _HEADER_START or end > len(data) or crc != _crc(data[_CHECKED_FROM:end]):
        return None
    blob = data[HEADER_BYTES:end]
    if hashlib.sha256(parent + blob).digest() != digest:
        return None
    record = Record(digest, parent, depth, blob)
    return Header(generation, page_bytes, crc_of_page, fingerprint, record)


def _crc(data: bytes | Bytes) -> int:
    return int(google_crc32c.value(data))
