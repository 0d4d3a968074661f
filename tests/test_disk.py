"""The disk tier: what comes back is what was written, or it does not come back."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.base import Chain, Record, TierError, huge_memory
from tiers.copy import row_checksums
from tiers.disk import DiskTier
from tiers.page import PageIds, PageState
from tiers.record import Manifest, are_ours, common_header, read_record, write_headers

PAGE = 6000  # not a multiple of a block: the slot is padded
ROOT = bytes(range(32))
WEIGHTS = b"w" * 32
SLOT = 4096 + 8192


def open_tier(folder: Path, num_pages: int = 8, slots: int = 4, **changed: object) -> DiskTier:
    """A tier of `num_pages` pages, `slots` of them a segment."""
    options = {"fingerprint": WEIGHTS, "max_blob_bytes": 100, "page_bytes": PAGE} | changed
    return DiskTier(
        folder,
        limit_bytes=num_pages * SLOT + 8192,
        segment_bytes=slots * SLOT,
        **options,  # type: ignore[arg-type]
    )


def content(page: int) -> np.ndarray:
    return np.random.default_rng(page).integers(0, 256, PAGE, np.uint8)


def chain(n: int, start: int = 0) -> list[Record]:
    return Chain(ROOT, start, [b"tokens %d" % i for i in range(n)]).records(n)


def slots(tier: DiskTier, n: int) -> np.ndarray:
    return huge_memory(n * tier.slot_bytes).reshape(n, tier.slot_bytes)


def store(tier: DiskTier, n: int) -> tuple[PageIds, list[Record]]:
    """Write `n` pages of a sequence; page i holds `content(i)`."""
    pages = tier.allocate(n, PageState.LOADING)
    batch = slots(tier, n)
    for i in range(n):
        batch[i, tier.payload_offset : tier.payload_offset + PAGE] = content(i)
    records = chain(n)
    ok = tier.write(pages, records, batch, page_crcs(tier, batch), tier.generation)
    tier.publish(pages[ok])
    tier.free(pages[~ok])
    return pages[ok], records


def page_crcs(tier: DiskTier, batch: np.ndarray) -> np.ndarray:
    return row_checksums(batch[:, tier.payload_offset : tier.payload_offset + PAGE])


def load(tier: DiskTier, pages: PageIds) -> list[bool]:
    """Which pages verify; those that do are compared with what was written."""
    batch = slots(tier, len(pages))
    ok = tier.read(pages, batch) == page_crcs(tier, batch)
    for i in np.flatnonzero(ok):
        page = batch[i, tier.payload_offset : tier.payload_offset + PAGE]
        assert (page == content(int(i))).all()
    return ok.tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_pages_read_back_equal_also_across_segments_and_out_of_order(folder: Path) -> None:
    tier = open_tier(folder)
    pages, _ = store(tier, 6)
    assert load(tier, pages) == [True] * 6
    batch = slots(tier, 3)
    assert (tier.read(pages[[5, 0, 3]], batch) == page_crcs(tier, batch)).all()
    for row, i in enumerate((5, 0, 3)):
        assert (batch[row, 4096 : 4096 + PAGE] == content(i)).all()
    tier.close()


def test_a_restart_finds_the_same_pages_and_the_same_usage(folder: Path) -> None:
    tier = open_tier(folder)
    pages, records = store(tier, 5)
    used = tier.count()
    tier.close()
    tier = open_tier(folder)
    found = tier.take_recovered()
    assert [stored.record for stored in found] == records
    assert [stored.page for stored in found] == pages.tolist()
    assert tier.count() == used
    tier.check()
    assert load(tier, np.array([stored.page for stored in found], np.int32)) == [True] * 5
    tier.close()


FIELDS = {
    "magic": 0, "version": 8, "header checksum": 12, "generation": 16, "page bytes": 24,
    "page checksum": 32, "depth": 36, "blob length": 40, "fingerprint": 48, "digest": 80,
    "parent": 112, "blob": 144, "first of page": 4096, "last of page": 4096 + PAGE - 1,
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_a_flipped_bit_is_a_miss_and_gone_at_the_next_start(folder: Path, field: str) -> None:
    tier = open_tier(folder)
    pages, _ = store(tier, 3)
    with open(folder / "segment-000000.kv", "r+b") as file:
        file.seek(SLOT + FIELDS[field])
        byte = file.read(1)[0]
        file.seek(SLOT + FIELDS[field])
        file.write(bytes([byte ^ 4]))
    assert load(tier, pages) == [True, False, True]
    tier.close()
    if "of page" not in field:  # pages are verified when they are read
        tier = open_tier(folder)
        assert [stored.record.depth for stored in tier.take_recovered()] == [0, 2]
        tier.close()


OURS = common_header(7, PAGE, WEIGHTS)


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 4095), mask=st.integers(1, 255))
def test_no_flipped_byte_of_a_header_passes(at: int, mask: int) -> None:
    headers = np.zeros((2, 4096), np.uint8)
    records = chain(2)
    write_headers(headers, OURS, np.array([99, 98], np.uint32), records)
    assert [read_record(header) for header in headers] == records
    headers[1, at] ^= mask
    assert are_ours(headers, OURS).tolist() == [True, False]


def test_a_header_of_random_bytes_is_nobody_s() -> None:
    headers = np.random.default_rng(0).integers(0, 256, (200, 4096), np.uint8)
    assert not are_ours(headers, OURS).any()
    headers[:, :12] = np.frombuffer(b"RADIXKV\0" + struct.pack("<I", 2), np.uint8)
    assert not are_ours(headers, OURS).any()


def test_a_blob_too_long_is_refused() -> None:
    record = Record(bytes(32), bytes(32), 0, bytes(4096 - 143))
    with pytest.raises(ValueError):
        write_headers(np.zeros((1, 4096), np.uint8), OURS, np.zeros(1, np.uint32), [record])


def test_a_valid_record_in_another_page_s_slot_is_not_taken_for_it(folder: Path) -> None:
    tier = open_tier(folder)
    pages, _ = store(tier, 2)
    with open(folder / "segment-000000.kv", "r+b") as file:
        record = file.read(SLOT)
        file.write(record)
    assert load(tier, pages) == [True, False]
    tier.close()


@pytest.mark.parametrize("size", [0, 100, SLOT + 4096 + 100])
def test_a_segment_truncated_under_a_running_tier(folder: Path, size: int) -> None:
    tier = open_tier(folder)
    pages, _ = store(tier, 6)
    os.truncate(folder / "segment-000000.kv", size)
    whole = size // SLOT
    assert load(tier, pages) == [i < whole or i >= 4 for i in range(6)]
    tier.free(pages)
    pages, _ = store(tier, 6)
    assert load(tier, pages) == [True] * 6
    tier.close()


def test_a_deleted_segment_is_read_on_not_written_to_and_made_anew_at_the_next_start(
    folder: Path,
) -> None:
    tier = open_tier(folder)
    pages, _ = store(tier, 6)
    (folder / "segment-000000.kv").unlink()
    assert load(tier, pages) == [True] * 6
    tier.free(pages)
    assert not len(store(tier, 6)[0])
    assert "deleted" in (tier.off_reason or "")
    tier.close()
    tier = open_tier(folder)
    assert [stored.page for stored in tier.take_recovered()] == [4, 5]
    assert tier.num_free == 6
    tier.close()


def test_other_weights_and_a_flushed_generation_are_not_seen(folder: Path) -> None:
    tier = open_tier(folder)
    pages, _ = store(tier, 2)
    tier.close()
    tier = open_tier(folder, fingerprint=b"v" * 32)
    assert not tier.take_recovered()
    tier.close()
    tier = open_tier(folder)
    assert len(tier.take_recovered()) == 2
    tier.flush()
    assert load(tier, pages) == [False, False]
    tier.close()
    tier = open_tier(folder)
    assert not tier.take_recovered()
    tier.close()


def test_a_page_size_of_another_model_begins_anew_within_the_limit(folder: Path) -> None:
    tier = open_tier(folder)
    store(tier, 6)
    tier.close()
    tier = open_tier(folder, page_bytes=30_000)
    assert not tier.take_recovered()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8 * SLOT + 8192
    tier.close()


def test_a_lost_manifest_voids_what_was_there(folder: Path) -> None:
    """Its generation is unknown, so a flush might be undone."""
    tier = open_tier(folder)
    store(tier, 2)
    tier.close()
    (folder / "manifest").write_bytes(b"RADIXDSK" + bytes(40))
    tier = open_tier(folder)
    assert not tier.take_recovered()
    tier.close()
    assert Manifest.read(folder / "manifest") is not None


def test_a_limit_that_shrank_is_enforced_on_what_was_there(folder: Path) -> None:
    tier = open_tier(folder, 12)
    store(tier, 11)
    tier.close()
    tier = open_tier(folder, 6)
    assert [stored.page for stored in tier.take_recovered()] == list(range(6))
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 6 * SLOT + 8192
    tier.close()
    tier = open_tier(folder, 12)
    assert len(tier.take_recovered()) == 6
    assert tier.num_free == 6
    tier.close()


def test_one_folder_belongs_to_one_process(folder: Path) -> None:
    tier = open_tier(folder)
    with pytest.raises(TierError, match="another process"):
        open_tier(folder)
    tier.close()
    open_tier(folder).close()


def test_a_limit_below_one_page_is_a_tier_of_none(folder: Path) -> None:
    tier = open_tier(folder, 0)
    assert (tier.num_pages, tier.take_recovered()) == (0, [])
    tier.check()
    tier.close()


def test_a_disk_smaller_than_the_limit_gives_what_it_has(tmpfs: Path) -> None:
    tier = open_tier(tmpfs / "kv", 100)
    assert tier.num_pages == 20  # five segments of 48 KiB fit beside the manifest
    pages, _ = store(tier, 20)
    assert load(tier, pages) == [True] * 20
    tier.close()


def test_a_disk_that_is_full_switches_the_tier_off_and_what_it_holds_is_read_on(
    tmpfs: Path,
) -> None:
    tier = open_tier(tmpfs / "kv", 8)
    pages, _ = store(tier, 8)
    os.truncate(tmpfs / "kv" / "segment-000001.kv", 0)  # its space goes to another
    tier.free(pages[4:])
    with open(tmpfs / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="space"):
        while filler.write(bytes(4096)):
            pass
    assert not len(store(tier, 4)[0])
    assert not tier.writable
    assert tier.off_reason is not None
    assert "space" in tier.off_reason
    assert tier.num_free == 4
    assert load(tier, pages[:4]) == [True] * 4
    tier.close()


def test_a_full_disk_at_start_is_a_tier_switched_off(tmpfs: Path) -> None:
    tier = open_tier(tmpfs / "kv", 100, slots=100)
    assert (tier.num_pages, tier.writable) == (0, False)
    assert not (tmpfs / "kv" / "segment-000000.kv").exists()
    tier.close()


def test_a_read_only_folder_is_a_tier_switched_off(tmpfs: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    tier = open_tier(tmpfs / "kv")
    assert (tier.num_pages, tier.writable) == (0, False)
    assert tier.off_reason is not None
    assert "Read-only" in tier.off_reason
    tier.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.EDQUOT])
def test_errors_of_the_system_are_misses_never_raised(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fail(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    tier = open_tier(folder)
    pages, _ = store(tier, 4)
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", fail)
        assert load(tier, pages) == [False] * 4
    assert load(tier, pages) == [True] * 4
    monkeypatch.setattr(os, "pwrite", fail)
    assert not len(store(tier, 2)[0])
    assert not tier.writable
    tier.check()
    tier.close()


WRITER = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
from pathlib import Path
from test_disk import open_tier, store
tier = open_tier(Path({folder!r}), 64, 16)
print("writing", flush=True)
while True:
    pages, _ = store(tier, 60)
    tier.free(pages)
"""


def test_killed_while_writing_it_serves_only_whole_pages_and_counts_them_all(folder: Path) -> None:
    tests = Path(__file__).parent
    script = WRITER.format(tests=str(tests), root=str(tests.parent), folder=str(folder))
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    last_segment = folder / "segment-000003.kv"
    while not any(last_segment.read_bytes()[:8]):  # the first round of writes came to its end
        pass
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    tier = open_tier(folder, 64, 16)
    found = tier.take_recovered()
    assert [stored.record for stored in found] == chain(60)[: len(found)]
    assert tier.count()["ready"] == len(found)
    ok = load(tier, np.array([stored.page for stored in found], np.int32))
    assert sum(ok) >= len(found) - 1  # the one it was at may be torn
    assert len(found) >= 59
    tier.check()
    tier.close()


def test_digests_are_the_same_in_every_process_and_whole() -> None:
    first, second = Chain(bytes(32), 0, [b"ab", b"c"]).records(2)
    assert first.digest == hashlib.sha256(bytes(32) + b"ab").digest()
    assert second == Record(hashlib.sha256(first.digest + b"c").digest(), first.digest, 1, b"c")
    assert second.digest.hex() == GOLDEN
    assert Chain(first.digest, 1, [b"c"]).records(1) == [second]
    assert Chain(bytes(32), 0, [b"ab", b"c"]).records(1) == [second]


GOLDEN = "48c74e181b28c60c54e4d25a3982df2dda477d4791b3d17d1b26c5e7c1a77a1a"
