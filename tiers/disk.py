"""The disk tier: fixed slots in preallocated files, found again after a restart.

Files and records are described in `tiers.record`. Writes go past the page cache where the file
system allows it. Nothing is synced: what the system lost when the power failed does not pass its
checksums, and a killed process loses nothing that was written.

A tier that can't write (full, read-only, gone) switches itself off and says why; what it holds
stays readable, a file deleted under it too, until the process ends. One folder belongs to one
process at a time.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiers.base import (
    Bytes2D,
    Checksums,
    Mask,
    Record,
    StoredPage,
    Tier,
    TierError,
    huge_memory,
)
from tiers.page import PageIds
from tiers.record import (
    BLOCK,
    Header,
    Manifest,
    are_ours,
    common_header,
    fields,
    header_bytes,
    read_record,
    round_up,
    write_headers,
)

log = logging.getLogger(__name__)

SEGMENT_BYTES = 1 << 30
MOST_SEGMENTS = 256  # of a new tier; each is an open file
SCAN_THREADS = 8
SCAN_PAGES = 256  # at a time
NO_CHECKSUM = -1


class DiskTier(Tier):
    """As many pages of `page_bytes` as fit `limit_bytes` of disk under `folder`.

    `fingerprint` (32 bytes) names all that a page's bytes depend on beside its tokens; records of
    another one are not seen. `max_blob_bytes` is the most that is stored beside a page. Pages
    found at start are READY, and `take_recovered` hands them to their owner, who frees those whose
    parents are missing and the second of two that are the same.
    Raises TierError where another process has the folder.

    `write` and `read` are for the mover's workers. A batch is `n` slots, [n, slot_bytes] uint8,
    each with its page's bytes at `payload_offset`, in memory aligned as direct I/O wants it.
    """

    def __init__(
        self,
        folder: Path,
        page_bytes: int,
        limit_bytes: int,
        fingerprint: bytes,
        max_blob_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.payload_offset = header_bytes(max_blob_bytes)
        self.slot_bytes = self.payload_offset + round_up(page_bytes)
        self.off_reason: str | None = None
        self.generation = 0
        self._folder = folder
        self._fingerprint = fingerprint
        self._files: list[int] = []
        self._lock_file = -1
        num_pages = max(0, limit_bytes - 2 * BLOCK) // self.slot_bytes
        slots = max(1, max(segment_bytes, limit_bytes // MOST_SEGMENTS) // self.slot_bytes)
        self._slots = min(slots, max(1, num_pages))
        try:
            num_pages = self._open_folder(num_pages)
        except OSError as error:
            self._switch_off(error)
            num_pages = 0
        super().__init__("disk", num_pages, page_bytes)
        self._digests = np.zeros(num_pages, "V32")
        self._recovered = self._scan()

    @property
    def writable(self) -> bool:
        """False once the tier has switched itself off, for the reason in `off_reason`."""
        return self.off_reason is None

    def take_recovered(self) -> list[StoredPage]:
        """The pages found at start; the caller owns them from now on."""
        recovered, self._recovered = self._recovered, []
        return recovered

    def write(
        self,
        pages: PageIds,
        records: Sequence[Record],
        batch: Bytes2D,
        page_crcs: Checksums,
        generation: int,
    ) -> Mask:
        """Write records, their page bytes already in `batch`; which pages are wholly written.

        Never raises OSError.
        """
        ok = np.zeros(len(pages), np.bool_)
        if not self.writable:
            return ok
        common = self._common_header(generation)
        write_headers(batch[:, : self.payload_offset], common, page_crcs, records)
        for lo, hi, segment, offset in self._runs(pages):
            data = batch[lo:hi]
            try:
                if not os.fstat(self._files[segment]).st_nlink:
                    raise OSError(errno.ENOENT, f"segment {segment} was deleted; restart to remake")
                if os.pwrite(self._files[segment], data.data, offset) != data.nbytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self._switch_off(error)
                break
            ok[lo:hi] = True
        self._digests[pages] = fields(batch)["digest"]
        return ok

    def read(self, pages: PageIds, batch: Bytes2D) -> npt.NDArray[np.int64]:
        """Read records into `batch`: the CRC32C that each one's page must have to be trusted.

        NO_CHECKSUM for a page whose record isn't what was stored there. Never raises OSError.
        """
        ok = np.zeros(len(pages), np.bool_)
        for lo, hi, segment, offset in self._runs(pages):
            try:
                got = os.preadv(self._files[segment], [batch[lo:hi].data], offset)
            except OSError as error:
                log.warning("disk tier: reading failed: %s", error)
                continue
            ok[lo : min(hi, lo + got // self.slot_bytes)] = True
        headers = batch[:, : self.payload_offset]
        ok &= are_ours(headers, self._common_header(self.generation))
        ok &= fields(headers)["digest"] == self._digests[pages]
        return np.where(ok, fields(headers)["page_crc"].astype(np.int64), NO_CHECKSUM)

    def flush(self) -> None:
        """Void all that is stored. Raises TierError where that won't outlast a restart."""
        self.generation += 1
        try:
            self._write_manifest()
        except OSError as error:
            raise TierError(
                f"disk tier: flushed, but {self._folder} can't be written ({error}): delete its "
                "files before the next start"
            ) from error

    def close(self) -> None:
        """Close the files and let go of the folder. No worker may be at it any more."""
        for file in [*self._files, self._lock_file]:
            if file >= 0:
                os.close(file)
        self._files, self._lock_file = [], -1

    def _common_header(self, generation: int) -> Header:
        return common_header(generation, self.page_bytes, self._fingerprint)

    def _runs(self, pages: PageIds) -> Iterator[tuple[int, int, int, int]]:
        """(lo, hi, segment, offset): pages[lo:hi] are neighbours there, one call reads them."""
        lo = 0
        for hi in range(1, len(pages) + 1):
            if hi == len(pages) or pages[hi] != pages[hi - 1] + 1 or pages[hi] % self._slots == 0:
                segment, slot = divmod(int(pages[lo]), self._slots)
                yield lo, hi, segment, slot * self.slot_bytes
                lo = hi

    def _switch_off(self, error: OSError) -> None:
        if self.off_reason is None:
            self.off_reason = f"{error.strerror or error} ({self._folder})"
            log.error("disk tier: takes no more pages: %s", self.off_reason)

    # Files

    def _open_folder(self, num_pages: int) -> int:
        """Lock it and lay the files out; how many of `num_pages` pages there is space for."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_file = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock_file)
            raise TierError(
                f"disk tier: {self._folder} is in use by another process; give each its own folder"
            ) from error
        self._read_manifest(num_pages)
        num_segments = -(-num_pages // self._slots)
        wanted = [self._folder / f"segment-{segment:06}.kv" for segment in range(num_segments)]
        for path in set(self._folder.glob("segment-*.kv")) - set(wanted):
            path.unlink()  # the limit is less than it was
        for segment, path in enumerate(wanted):
            slots = min(self._slots, num_pages - segment * self._slots)
            try:
                self._files.append(_open_segment(path, slots * self.slot_bytes))
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not segment:
                    raise
                log.warning("disk tier: space for %d of %d pages", segment * self._slots, num_pages)
                return segment * self._slots
        return num_pages

    def _read_manifest(self, num_pages: int) -> None:
        """Take over generation and layout of what is there, or begin anew."""
        found = Manifest.read(self._folder / "manifest")
        if (
            found is None
            or (found.slot_bytes, found.header_bytes) != (self.slot_bytes, self.payload_offset)
            or num_pages > found.slots_per_segment * 4 * MOST_SEGMENTS
        ):
            for segment in self._folder.glob("segment-*.kv"):
                segment.unlink()
            self.generation = time.time_ns()  # no record of a lost manifest is taken for ours
            self._write_manifest()
        else:
            self.generation, self._slots = found.generation, found.slots_per_segment

    def _write_manifest(self) -> None:
        manifest = Manifest(self.generation, self.slot_bytes, self.payload_offset, self._slots)
        manifest.write(self._folder / "manifest")

    # Finding pages again

    def _scan(self) -> list[StoredPage]:
        """What the files hold; the rest of the slots is free."""
        pages = self.allocate(self.num_pages)
        parts = np.split(pages, range(SCAN_PAGES, self.num_pages, SCAN_PAGES))
        with ThreadPoolExecutor(SCAN_THREADS) as pool:
            found = [stored for part in pool.map(self._scan_headers, parts) for stored in part]
        found_pages = np.array([stored.page for stored in found], np.int32)
        self._digests[found_pages] = np.array([stored.record.digest for stored in found], "V32")
        self.publish(found_pages)
        self.free(np.setdiff1d(pages, found_pages))
        return found

    def _scan_headers(self, pages: PageIds) -> list[StoredPage]:
        headers = huge_memory(len(pages) * self.payload_offset).reshape(-1, self.payload_offset)
        for header, page in zip(headers, pages.tolist(), strict=True):
            segment, slot = divmod(page, self._slots)
            try:
                os.preadv(self._files[segment], [header.data], slot * self.slot_bytes)
            except OSError as error:
                log.warning("disk tier: reading page %d at start failed: %s", page, error)
        found = np.flatnonzero(are_ours(headers, self._common_header(self.generation)))
        records = [(i, read_record(headers[i])) for i in found.tolist()]
        return [StoredPage(int(pages[i]), r) for i, r in records if r is not None]


def _open_segment(path: Path, nbytes: int) -> int:
    """A file of that size, its space taken, for direct I/O where the file system has it."""
    is_new = not path.exists()
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        file = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        file = os.open(path, flags, 0o600)
    try:
        os.ftruncate(file, nbytes)
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            os.close(file)
            if is_new:
                path.unlink()
            raise
    return file
