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
_HEADER = struct.Struct("<8sIIQQIII4x32s32s32s")
_HEADER_MAGIC = b"RADIXKV\0"
_CHECKED_FROM = 16

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
    return round_up(_HEADER.size + max_blob_bytes)


def round_up(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def page_crc(page: Bytes) -> int:
    """CRC32C of a page's bytes. The GIL is released."""
    return _crc(page)


def encode_header(into: Bytes, header: Header) -> None:
    """Write the header at the start of a slot. Raises ValueError where the blob is too long."""
    digest, parent, depth, blob = header.record
    end = _HEADER.size + len(blob)
    if end > len(into):
        raise ValueError(f"a blob of {len(blob)} bytes does not fit {len(into)} bytes of header")
    fields = (header.generation, header.page_bytes, header.page_crc, depth, len(blob))
    packed = _HEADER.pack(_HEADER_MAGIC, VERSION, 0, *fields, header.fingerprint, digest, parent)
    into[: _HEADER.size] = np.frombuffer(packed, np.uint8)
    into[_HEADER.size : end] = np.frombuffer(blob, np.uint8)
    into[end:] = 0
    crc = _crc(into[_CHECKED_FROM:end])
    into[12:16] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)


def decode_header(data: Bytes) -> Header | None:
    """None where the bytes are not a whole header, or its digest is not that of its blob."""
    fixed = data[: _HEADER.size].tobytes()
    magic, version, crc, *fields, blob_len, fingerprint, digest, parent = _HEADER.unpack(fixed)
    end = _HEADER.size + blob_len
    if magic != _HEADER_MAGIC or version != VERSION or end > len(data):
        return None
    if crc != _crc(data[_CHECKED_FROM:end]):
        return None
    blob = data[_HEADER.size : end].tobytes()
    if hashlib.sha256(parent + blob).digest() != digest:
        return None
    generation, page_bytes, crc_of_page, depth = fields
    record = Record(digest, parent, depth, blob)
    return Header(generation, page_bytes, crc_of_page, fingerprint, record)


def _crc(data: bytes | Bytes) -> int:
    return int(google_crc32c.value(data))
