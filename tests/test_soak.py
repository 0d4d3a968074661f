"""Many random requests at once, cancels, faults of every tier, and no page to spare.

Namespaces share a text and differ by a secret. Every answer must be what a cold run gives, no
sequence may hold two secrets, and at the end every page is back. RADIXSVC_SOAK=100000 is the long
form: so many requests instead of the suite's.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from known_model import EngineUnderTest, expected

from radixsvc.cache import Lower, namespace_key
from radixsvc.completion import FinishReason
from radixsvc.residency import TierPolicy
from tiers.base import Bytes2D, Chain, Checksums, Mask, Record, Tier
from tiers.copy import CpuStream, compute_fence
from tiers.device import DeviceTier
from tiers.disk import NO_CHECKSUM, DiskTier
from tiers.host import HostTier
from tiers.mover import Mover
from tiers.page import PageIds
from tiers.ticket import Ticket

NUM_REQUESTS = int(os.environ.get("RADIXSVC_SOAK", "2000"))
AT_ONCE = 12
DEVICE_PAGES, HOST_PAGES, DISK_PAGES = 64, 48, 64
SLOT_BYTES = 8192
WEIGHTS = b"w" * 32


class FaultyDisk(DiskTier):
    """Loses some of what it is to write or read, and lets bits rot."""

    def __init__(self, folder: Path, page_bytes: int, rng: random.Random) -> None:
        super().__init__(folder, page_bytes, (DISK_PAGES + 1) * SLOT_BYTES, WEIGHTS, 512)
        self.rng = rng
        self.faults: Counter[str] = Counter()

    def fails(self, kind: str, share: float) -> bool:
        fails = self.rng.random() < share
        self.faults[kind] += fails
        return fails

    def write(
        self, pages: PageIds, records: Sequence[Record], batch: Bytes2D, page_crcs: Checksums,
        generation: int,
    ) -> Mask:  # fmt: skip
        ok = super().write(pages, records, batch, page_crcs, generation)
        for i, page in enumerate(pages.tolist()):
            if self.fails("write", 0.02):
                ok[i] = False
            elif self.fails("rot", 0.02):
                segment, slot = divmod(page, self._slots)
                at = slot * SLOT_BYTES + self.payload_offset + self.rng.randrange(self.page_bytes)
                with (self._folder / f"segment-{segment:06}.kv").open("r+b") as file:
                    file.seek(at)
                    [byte] = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte ^ 1 << self.rng.randrange(8)]))
        return ok

    def read(self, pages: PageIds, batch: Bytes2D) -> npt.NDArray[np.int64]:
        crcs = super().read(pages, batch)
        for i in range(len(pages)):
            if self.fails("read", 0.2):  # few are read: a short run is to meet some
                crcs[i] = NO_CHECKSUM
        return crcs


class FaultyMover(Mover):
    """Refuses now and then."""

    rng: random.Random

    def submit(
        self, source: Tier, source_pages: PageIds, target: Tier, target_pages: PageIds,
        chain: Chain | None = None,
    ) -> Ticket | None:  # fmt: skip
        if self.rng.random() < 0.03:
            return None
        return super().submit(source, source_pages, target, target_pages, chain)


def faulty_tiers(folder: Path, seed: int, write: str, device: DeviceTier) -> Lower:
    host = HostTier(device.page_bytes, HOST_PAGES)
    disk = FaultyDisk(folder, device.page_bytes, random.Random(seed))
    streams = CpuStream("promote"), CpuStream("demote")
    mover = FaultyMover([device, host], disk, *streams, compute_fence(device.device))
    mover.rng = random.Random(seed)
    policy = TierPolicy(write=write, through_after=1, disk_after=1, promote="always")  # type: ignore
    return Lower(mover, host, disk, WEIGHTS, policy)


class Soak:
    """Clients of six namespaces. A secret is eight tokens that occur in no other prompt."""

    def __init__(self, t: EngineUnderTest, seed: int) -> None:
        self.t = t
        self.rng = random.Random(seed)
        draw = np.random.default_rng(seed)
        self.secrets = [draw.integers(1, 97, 8).tolist() for _ in range(6)]
        self.texts = [draw.integers(1, 97, 48).tolist() for _ in range(5)]
        self.canaries = [bytes(secret) for secret in self.secrets]
        self.ends: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        t.model.before_step = self.look

    def look(self, sequences: list[list[int]]) -> None:
        for sequence in sequences:
            held = bytes(sequence)
            assert sum(canary in held for canary in self.canaries) <= 1

    async def client(self, turns: int) -> None:
        for _ in range(turns):
            await self.request()

    async def request(self) -> None:
        rng = self.rng
        who = rng.randrange(6)
        text = rng.choice(self.texts)
        common = text[: rng.choice([0, 4, 16])]
        prompt = common + self.secrets[who] + text[: rng.randint(0, 48)]
        prompt += [rng.randint(1, 96) for _ in range(rng.randint(0, 5))]
        request = self.t.submit(prompt, rng.randint(1, 8), namespace_key(f"team {who}"))
        cancel_after = rng.randint(0, 3) if rng.random() < 0.15 else None
        if cancel_after == 0:
            self.t.engine.cancel(request.id)
        answer: list[int] = []
        async for chunk in request.stream:
            answer += chunk.tokens
            if (end := chunk.end) is None:
                if cancel_after is not None and len(answer) >= cancel_after:
                    self.t.engine.cancel(request.id)
                continue
            assert answer == expected(prompt, len(answer))
            assert end.reason is not FinishReason.ERROR
            if end.reason is FinishReason.LENGTH:
                assert len(answer) == request.params.max_tokens
            found = end.usage.sources
            assert found.cached + found.computed == len(prompt)
            self.ends[end.reason.value] += 1
            self.sources.update({"device": found.device, "host": found.host, "disk": found.disk})

    async def watch(self) -> None:
        """Ownership, again and again while requests run."""
        while True:
            await asyncio.sleep(0.05)
            await asyncio.wrap_future(self.t.engine.call(lambda cache: cache.check()))


@pytest.mark.parametrize("write", ["back", "through"])
async def test_soak(tmp_path: Path, write: str) -> None:
    def build_lower(device: DeviceTier) -> Lower:
        return faulty_tiers(tmp_path, 5, write, device)

    with EngineUnderTest(DEVICE_PAGES, build_lower=build_lower) as t:
        soak = Soak(t, seed=5)
        watching = asyncio.create_task(soak.watch())
        await asyncio.gather(*(soak.client(NUM_REQUESTS // 2 // AT_ONCE) for _ in range(AT_ONCE)))
        watching.cancel()
        assert t.engine.failed is None
        assert soak.ends["length"] > soak.ends["cancelled"] > 0
        assert min(soak.sources[name] for name in ("device", "host", "disk")) > 0
        await t.settled()
        while t.engine.call(lambda cache: cache.is_moving).result(10):
            await asyncio.sleep(0.01)
        t.check()
        stats = t.engine.call(lambda cache: cache.stats()).result(10)
        assert stats.num_leases == 0
        assert t.lower is not None
        disk = t.lower.disk
        assert isinstance(disk, FaultyDisk)
        assert stats.lost_pages > 0
        assert min(disk.faults[kind] for kind in ("write", "rot", "read")) > 0
        t.engine.call(lambda cache: cache.flush()).result(10)
        t.check()
        for tier in (t.device, t.lower.host, disk):
            assert tier is not None
            assert tier.count()["free"] == tier.num_pages
        print(soak.ends, soak.sources, disk.faults, t.engine.stats().preemptions)
