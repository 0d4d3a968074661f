"""The disk tier: fixed slots in preallocated files, found again after a restart.

Files and records are described in `tiers.record`. Writes go past the page cache where the file
system allows it. Nothing is synced: what the system lost when the power failed does not pass its
checksums, and a killed process loses nothing that was written.

A tier that can't write (full, read-only, gone) switches itself off and says why; what it holds
stays readable. One folder belongs to one process at a time.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tiers.base import (
    LEDGER_BYTES,
    Bytes2D,
    Footprint,
    Mask,
    Pinning,
    Record,
    StoredPage,
    TierError,
)
from tiers.page import PageIds, PageLedger
from tiers.record import (
    BLOCK,
    Header,
    Manifest,
    decode_header,
    encode_header,
    header_bytes,
    page_crc,
    round_up,
)

log = logging.getLogger(__name__)

SEGMENT_BYTES = 1 << 30
MOST_SEGMENTS = 256  # of a new tier; each is an open file
DIGEST_BYTES = 32
SCAN_THREADS = 8


class DiskTier(PageLedger):
    """As many pages of `page_bytes` as fit `limit_bytes` of disk under `folder`.

    `fingerprint` (32 bytes) names all that a page's bytes depend on beside its tokens; records of
    another one are not seen. `max_blob_bytes` is the most that is stored beside a page. Pages
    found at start are READY, and `take_recovered` hands them to their owner.
    Raises TierError where another process has the folder.
    """

    name = "disk"

    def __init__(
        self,
        folder: Path,
        page_bytes: int,
        limit_bytes: int,
        fingerprint: bytes,
        max_blob_bytes: int,
        pinning: Pinning | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.page_bytes = page_bytes
        self.payload_offset = header_bytes(max_blob_bytes)
        self.slot_bytes = self.payload_offset + round_up(page_bytes)
        self.counters: Counter[str] = Counter()
        self.off_reason: str | None = None
        self.staging_is_pinned = True
        self.generation = 0
        self._folder = folder
        self._fingerprint = fingerprint
        self._pinning = pinning
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}
        self._lost_files: list[int] = []  # deleted under us; someone may still be reading them
        self._staging: list[Bytes2D] = []
        self._lock_file = -1
        num_pages = max(0, limit_bytes - 2 * BLOCK) // self.slot_bytes
        slots = max(1, max(segment_bytes, limit_bytes // MOST_SEGMENTS) // self.slot_bytes)
        self._slots = min(slots, max(1, num_pages))
        try:
            num_pages = self._open_folder(num_pages)
        except OSError as error:
            self._switch_off(error)
            num_pages = 0
        super().__init__(num_pages)
        self._digests = np.zeros((num_pages, DIGEST_BYTES), np.uint8)
        self._recovered = self._scan()

    @property
    def writable(self) -> bool:
        """False once the tier has switched itself off, for the reason in `off_reason`."""
        return self.off_reason is None

    def take_recovered(self) -> list[StoredPage]:
        """The pages found at start, each after its parent; the caller owns them from now on."""
        recovered, self._recovered = self._recovered, []
        return recovered

    def staging(self, n: int) -> Bytes2D:
        """Memory for `n` slots, aligned for direct I/O and page-locked for the GPU's copies."""
        memory = np.frombuffer(mmap.mmap(-1, n * self.slot_bytes), np.uint8)
        if self._pinning is not None and not self._pinning.pin(memory.ctypes.data, memory.nbytes):
            self.staging_is_pinned = False
            log.warning("disk tier: page-locking its staging memory was refused; copies are slower")
        batch = memory.reshape(n, self.slot_bytes)
        with self._lock:
            self._staging.append(batch)
        return batch

    def write(
        self, pages: PageIds, records: Sequence[Record], batch: Bytes2D, generation: int
    ) -> Mask:
        """Write records, their page bytes already in `batch`; which pages are wholly written."""
        ok = np.zeros(len(pages), np.bool_)
        if not self.writable:
            return ok
        for slot, record in zip(batch, records, strict=True):
            crc = page_crc(slot[self.payload_offset : self.payload_offset + self.page_bytes])
            header = Header(generation, self.page_bytes, crc, self._fingerprint, record)
            encode_header(slot[: self.payload_offset], header)
        for lo, hi, segment, offset in self._runs(pages):
            data = batch[lo:hi]
            try:
                if os.pwrite(self._file(segment, create=True), data.data, offset) != data.nbytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self._switch_off(error)
                break
            digests = b"".join(record.digest for record in records[lo:hi])
            self._digests[pages[lo:hi]] = np.frombuffer(digests, np.uint8).reshape(hi - lo, -1)
            ok[lo:hi] = True
        self._count("written", int(ok.sum()))
        return ok

    def read(self, pages: PageIds, batch: Bytes2D) -> Mask:
        """Read records into `batch` and verify them; which pages are what was stored there."""
        ok = np.zeros(len(pages), np.bool_)
        for lo, hi, segment, offset in self._runs(pages):
            data = batch[lo:hi]
            try:
                got = os.preadv(self._file(segment, create=False), [data.data], offset)
            except OSError as error:
                self._count("read_errors", hi - lo)
                log.warning("disk tier: reading failed: %s", error)
                continue
            for i in range(lo, min(hi, lo + got // self.slot_bytes)):
                ok[i] = self._is_as_stored(int(pages[i]), batch[i])
        self._count("read", int(ok.sum()))
        self._count("bad", int((~ok).sum()))
        return ok

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

    def poll(self) -> None:
        """Nothing becomes ready in the background."""

    def footprint(self) -> Footprint:
        """Files, and in host memory the ledger, the digests and the staging memory."""
        host = self.num_pages * (LEDGER_BYTES + DIGEST_BYTES)
        host += sum(batch.nbytes for batch in self._staging)
        return Footprint(host=host, disk=self.num_pages * self.slot_bytes + 2 * BLOCK)

    def close(self) -> None:
        """Close the files and let go of the folder. No worker may be at it any more."""
        if self._pinning is not None and self.staging_is_pinned:
            for batch in self._staging:
                self._pinning.unpin(batch.ctypes.data)
        for file in [*self._files.values(), *self._lost_files, self._lock_file]:
            if file >= 0:
                os.close(file)
        self._files.clear()
        self._lost_files.clear()
        self._lock_file = -1

    def _is_as_stored(self, page: int, slot: Bytes2D) -> bool:
        header = decode_header(slot[: self.payload_offset])
        return (
            header is not None
            and header.record.digest == self._digests[page].tobytes()
            and self._is_ours(header)
            and header.page_crc
            == page_crc(slot[self.payload_offset : self.payload_offset + self.page_bytes])
        )

    def _is_ours(self, header: Header) -> bool:
        ours = (self.generation, self.page_bytes, self._fingerprint)
        return ours == (header.generation, header.page_bytes, header.fingerprint)

    def _runs(self, pages: PageIds) -> Iterator[tuple[int, int, int, int]]:
        """(lo, hi, segment, offset): pages[lo:hi] are neighbours there, one call reads them."""
        lo = 0
        for hi in range(1, len(pages) + 1):
            if hi == len(pages) or pages[hi] != pages[hi - 1] + 1 or pages[hi] % self._slots == 0:
                segment, slot = divmod(int(pages[lo]), self._slots)
                yield lo, hi, segment, slot * self.slot_bytes
                lo = hi

    def _count(self, name: str, n: int) -> None:
        with self._lock:
            self.counters[name] += n

    def _switch_off(self, error: OSError) -> None:
        with self._lock:
            if self.off_reason is None:
                self.off_reason = f"{error.strerror or error} ({self._folder})"
                self.counters["switched_off"] += 1
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
        for path in self._folder.glob("segment-*.kv"):
            if path.name not in {self._path(i).name for i in range(num_segments)}:
                path.unlink()  # the limit is less than it was
        for segment in range(num_segments):
            slots = min(self._slots, num_pages - segment * self._slots)
            try:
                self._files[segment] = self._open_segment(segment, slots * self.slot_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not segment:
                    raise
                log.warning("disk tier: space for %d of %d pages", segment * self._slots, num_pages)
                return segment * self._slots
        return num_pages

    def _read_manifest(self, num_pages: int) -> None:
        path = self._folder / "manifest"
        found = Manifest.decode(path.read_bytes()) if path.exists() else None
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
        temporary = self._folder / "manifest.new"
        with open(temporary, "wb") as file:
            file.write(manifest.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._folder / "manifest")

    def _path(self, segment: int) -> Path:
        return self._folder / f"segment-{segment:06}.kv"

    def _open_segment(self, segment: int, nbytes: int) -> int:
        path = self._path(segment)
        is_new = not path.exists()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            file = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            file = os.open(path, flags, 0o600)  # a file system without direct I/O
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

    def _file(self, segment: int, create: bool) -> int:
        """The segment's file; one that was deleted is let go of, and made anew for a write."""
        with self._lock:
            file = self._files.get(segment)
            if file is not None and not os.fstat(file).st_nlink:
                log.warning("disk tier: %s was deleted", self._path(segment))
                self.counters["segments_lost"] += 1
                self._lost_files.append(self._files.pop(segment))
                file = None
            if file is None and create:
                slots = min(self._slots, self.num_pages - segment * self._slots)
                file = self._files[segment] = self._open_segment(segment, slots * self.slot_bytes)
            if file is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return file

    # Finding pages again

    def _scan(self) -> list[StoredPage]:
        """What the files hold, parents first; the rest of the slots is free."""
        pages = self.allocate(self.num_pages)
        with ThreadPoolExecutor(SCAN_THREADS) as pool:
            parts = np.array_split(pages, SCAN_THREADS * 4)
            found = [stored for part in pool.map(self._scan_headers, parts) for stored in part]
        kept: dict[bytes, StoredPage] = {}
        for stored in sorted(found, key=lambda stored: stored.record.depth):
            record = stored.record
            parent = kept.get(record.parent)
            in_place = parent is not None and parent.record.depth + 1 == record.depth
            if record.depth == 0 or in_place:
                kept[record.digest] = stored
        recovered = list(kept.values())
        found_pages = np.array([stored.page for stored in recovered], np.int32)
        for stored in recovered:
            self._digests[stored.page] = np.frombuffer(stored.record.digest, np.uint8)
        self.publish(found_pages)
        self.free(np.setdiff1d(pages, found_pages))
        self.counters["recovered"] = len(recovered)
        self.counters["orphaned"] = len(found) - len(recovered)
        return recovered

    def _scan_headers(self, pages: PageIds) -> list[StoredPage]:
        found = []
        data = np.frombuffer(mmap.mmap(-1, self.payload_offset), np.uint8)
        for page in pages.tolist():
            segment, slot = divmod(page, self._slots)
            try:
                got = os.preadv(self._files[segment], [data.data], slot * self.slot_bytes)
            except OSError as error:
                log.warning("disk tier: reading page %d at start failed: %s", page, error)
                continue
            header = decode_header(data) if got == len(data) else None
            if header is not None and self._is_ours(header):
                found.append(StoredPage(page, header.record))
        return found
