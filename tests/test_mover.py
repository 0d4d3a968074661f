"""The mover: who owns a page while it moves, whatever comes late, fails, or is taken back."""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from simulated_copies import Event, Machine

from tiers.base import Chain, Pinning, Tier
from tiers.copy import CopyFailed, CpuStream, compute_fence
from tiers.cuda_copy import pinning_for
from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.mover import Mover, open_mover
from tiers.page import InvariantError, OutOfPages, PageIds, PageShape, PageState
from tiers.ticket import Ticket

CPU = torch.device("cpu")
SHAPE = PageShape.uniform(1, 1, 8, 4, "float32")  # 256 bytes: 64 float32
LOADING = PageState.LOADING


class Rig:
    """Tiers and a mover; the device computes on `machine` where there is one."""

    def __init__(
        self, folder: Path, machine: Machine | None = None, device: int = 8, host: int = 8,
        disk: int = 8, **options: object,
    ) -> None:  # fmt: skip
        self.device = DeviceTier(SHAPE, device, CPU)
        self.device.pool.zero_()
        self.host = HostTier(SHAPE.nbytes, host)
        self.disk = DiskTier(folder, SHAPE.nbytes, disk * 8192 + 8192, b"w" * 32, 100)
        self.machine = machine
        streams = [machine.stream() if machine else CpuStream() for _ in range(2)]
        fence: Callable[[], object] = compute_fence(CPU)
        if machine:
            fence = machine.compute.record
        self.tiers: list[Tier] = [self.device, self.host, self.disk]
        self.mover = Mover(
            [self.device, self.host], self.disk, *streams, fence, **options  # type: ignore
        )  # fmt: skip

    def fill(self, values: list[int]) -> PageIds:
        """READY device pages, each full of one value."""
        pages = self.device.allocate(len(values))
        self.device.pool[torch.from_numpy(pages)] = torch.tensor(values).float()[:, None]
        self.device.publish(pages)
        return pages

    def values(self, pages: PageIds) -> list[int]:
        rows = self.device.pool[torch.from_numpy(pages)]
        assert (rows == rows[:, :1]).all()
        return rows[:, 0].int().tolist()

    def send(self, source: Tier, pages: PageIds, target: Tier) -> Ticket:
        there = target.allocate(len(pages), LOADING)
        ticket = self.mover.submit(source, pages, target, there, chain(len(pages)))
        assert ticket is not None
        return ticket

    def finish(self, ticket: Ticket) -> PageIds:
        """Wait for this ticket; the pages that arrived."""
        done: list[Ticket] = []
        while ticket not in done:
            if self.machine:
                self.machine.run()
            done += self.mover.wait(1.0)
        ticket.target.free(ticket.target_pages[~ticket.ok])
        return ticket.target_pages[ticket.ok]

    def carry(self, source: Tier, pages: PageIds, target: Tier) -> PageIds:
        return self.finish(self.send(source, pages, target))

    def check(self) -> None:
        for tier in self.tiers:
            tier.check()

    def close(self) -> None:
        self.mover.close(1.0)
        for tier in self.tiers:
            tier.close()


def chain(n: int, depth: int = 0) -> Chain:
    return Chain(bytes(32), depth, [b"%d" % (depth + i) for i in range(n)])


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_bytes_survive_every_way_down_and_back(rig: Rig) -> None:
    pages = rig.fill([3, 1, 4, 1])
    host = rig.carry(rig.device, pages, rig.host)
    disk = rig.carry(rig.host, host, rig.disk)
    back = rig.carry(rig.disk, disk, rig.device)
    assert rig.values(back) == [3, 1, 4, 1]
    rig.device.free(back)
    rig.host.free(host)
    host = rig.carry(rig.disk, disk[[2, 0]], rig.host)
    assert rig.values(rig.carry(rig.host, host, rig.device)) == [4, 3]
    rig.check()


def test_a_restart_brings_back_what_went_to_disk(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    ticket = rig.send(rig.device, rig.fill([5, 6, 7]), rig.disk)
    rig.finish(ticket)
    digests = [record.digest for record in chain(3).records(3)]
    rig.close()
    rig = Rig(tmp_path)
    found = rig.disk.take_recovered()
    assert [stored.record.digest for stored in found] == digests
    pages = np.array([stored.page for stored in found], np.int32)
    assert rig.values(rig.carry(rig.disk, pages, rig.device)) == [5, 6, 7]
    rig.close()


def test_source_pages_freed_meanwhile_are_not_reused_before_the_copy_is_over(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, Machine(0))
    pages = rig.fill([1, 2])
    ticket = rig.send(rig.device, pages, rig.host)
    rig.device.free(pages)
    assert rig.device.num_free == 6
    with pytest.raises(OutOfPages):
        rig.device.allocate(7)
    rig.finish(ticket)
    assert rig.device.num_free == 8
    rig.check()
    rig.close()


@pytest.mark.parametrize("state", ["WRITING", "LOADING", "FREE"])
def test_only_ready_pages_are_read(rig: Rig, state: str) -> None:
    other = np.array([7], np.int32) if state == "FREE" else rig.device.allocate(1, PageState[state])
    with pytest.raises(InvariantError):
        rig.mover.submit(rig.device, other, rig.host, rig.host.allocate(1, LOADING))
    assert rig.mover.num_outstanding == 0


@pytest.mark.parametrize("pages", [[0], [1], [6], [2, 1]])
def test_only_loading_pages_are_written(rig: Rig, pages: list[int]) -> None:
    """Page 0 is READY, 1 WRITING, 2 LOADING, the others are FREE."""
    ready = rig.fill([1])
    rig.device.allocate(1)
    rig.device.allocate(1, LOADING)
    source = rig.carry(rig.device, ready[[0] * len(pages)], rig.host)
    with pytest.raises(InvariantError):
        rig.mover.submit(rig.host, source, rig.device, np.array(pages, np.int32))
    assert rig.mover.num_outstanding == 0


def test_what_is_loading_is_not_published_before_it_is_there(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Machine(0))
    ticket = rig.send(rig.device, rig.fill([1, 2, 3]), rig.host)
    for _ in range(3):
        assert not rig.mover.poll()
        assert rig.host.count()["loading"] == 3
        assert rig.machine is not None
        rig.machine.step()
    rig.finish(ticket)
    assert rig.host.count()["ready"] == 3
    rig.close()


def offload_rounds(tmp_path: Path, seed: int, name: str, *, fenced: bool) -> bool:
    """A slow writer and an offload of what it writes: whether all bytes came out right."""
    machine = Machine(seed)
    rig = Rig(tmp_path / f"{seed} {fenced}", machine)
    if not fenced:
        reached = Event()
        reached.reached = True
        rig.mover._fence = lambda: reached
    right = True
    for value in range(1, 5):
        pages = rig.device.allocate(4)
        rows = torch.from_numpy(pages).long()
        begun = Event()
        machine.compute.call(lambda rows=rows: rig.device.pool[rows].fill_(0), after=begun)
        machine.compute.call(
            lambda rows=rows, value=value: rig.device.pool.index_fill_(0, rows, float(value))
        )
        rig.device.publish(pages)
        lower = next(tier for tier in rig.tiers if tier.name == name)
        # The simulator alone decides when a host copy runs; a disk worker has a thread of its own.
        late = threading.Timer(0.02 * (name == "disk"), setattr, (begun, "reached", True))
        late.start()
        if name == "host":
            late.join()
        there = rig.carry(rig.device, pages, lower)
        late.join()
        rig.device.free(pages)
        back = rig.carry(lower, there, rig.device)
        right &= rig.values(back) == [value] * 4
        rig.device.free(back)
        lower.free(there)
    rig.close()
    return right


@pytest.mark.parametrize("lower", ["host", "disk"])
def test_a_page_is_not_copied_before_what_writes_it_is_done(tmp_path: Path, lower: str) -> None:
    assert all(offload_rounds(tmp_path, seed, lower, fenced=True) for seed in range(10))
    assert not all(offload_rounds(tmp_path, seed, lower, fenced=False) for seed in range(10))


def test_a_promotion_out_of_pages_its_owner_lets_go_keeps_their_bytes(tmp_path: Path) -> None:
    """A load once re-entered eviction and freed the pages it was reading."""
    for seed in range(10):
        machine = Machine(seed)
        rig = Rig(tmp_path, machine, device=2, host=2)
        host = rig.carry(rig.device, rig.fill([1, 2]), rig.host)
        rig.device.free(np.array([0, 1], np.int32))
        up = rig.send(rig.host, host, rig.device)
        rig.host.free(host)
        with pytest.raises(OutOfPages):
            rig.host.allocate(1)
        back = rig.finish(up)
        down = rig.carry(rig.device, back, rig.host)
        assert rig.values(back) == [1, 2]
        assert len(down) == 2
        rig.close()


def test_cancel_gives_target_pages_back_when_nothing_can_write_them_any_more(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, Machine(1))
    pages = rig.fill([1, 2])
    ticket = rig.send(rig.device, pages, rig.host)
    rig.mover.cancel(ticket)
    rig.mover.cancel(ticket)
    assert rig.host.num_free == 6
    assert rig.machine is not None
    rig.machine.run()
    assert rig.mover.poll() == []
    assert (rig.host.num_free, rig.device.readers.sum()) == (8, 0)
    late = rig.send(rig.device, pages, rig.host)
    rig.finish(late)
    rig.mover.cancel(late)  # polled before: its pages have their owner
    assert rig.host.count()["ready"] == 2
    rig.close()


def test_a_full_queue_refuses_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.mover.MAX_QUEUED_BYTES", 4 * SHAPE.nbytes)
    rig = Rig(tmp_path, Machine(0))
    pages = rig.fill([0, 1, 2, 3, 4])
    first = rig.send(rig.device, pages, rig.host)  # larger than the bound, but alone
    there = rig.host.allocate(1, LOADING)
    assert rig.mover.submit(rig.device, pages[:1], rig.host, there) is None
    assert rig.device.readers.tolist()[:5] == [1] * 5
    rig.host.free(there)
    rig.finish(first)
    rig.carry(rig.device, pages[:1], rig.host)
    rig.check()
    rig.close()


class Stuck:
    """Makes one of the system's calls hang until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.go, self.reached = threading.Event(), threading.Event()
        real = getattr(os, call)

        def hang(*args: object) -> int:
            self.reached.set()
            self.go.wait()
            return int(real(*args))

        monkeypatch.setattr(os, call, hang)


def test_a_store_that_never_answers_a_write_holds_only_its_own_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("tiers.mover.NUM_WORKERS", 1)
    rig = Rig(tmp_path, clock=lambda: now[0])
    stuck = Stuck(monkeypatch, "pwrite")
    pages = rig.fill([1, 2])
    ticket, behind = rig.send(rig.device, pages, rig.disk), rig.send(rig.device, pages, rig.disk)
    rig.device.free(pages)
    stuck.reached.wait()
    assert rig.mover.poll() == []
    assert rig.device.num_free == 6
    now[0] = 11.0
    assert rig.mover.poll() == [ticket, behind]
    assert not ticket.ok.any()
    rig.disk.free(np.append(ticket.target_pages, behind.target_pages))
    assert rig.device.num_free == 8
    assert rig.disk.num_free == 6  # the slots of the write that may still happen
    assert not rig.mover.available(rig.device, rig.disk)
    assert rig.mover.seconds(rig.disk, rig.device, 1) == math.inf
    stuck.go.set()
    while not rig.mover.available(rig.device, rig.disk):
        rig.mover.poll()
    assert rig.disk.num_free == 8
    rig.carry(rig.device, rig.fill([3]), rig.disk)
    rig.check()
    rig.close()


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_pages_come_back_from_a_read_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    now = [0.0]
    rig = Rig(tmp_path, clock=lambda: now[0])
    disk = rig.carry(rig.device, rig.fill([1, 2]), rig.disk)
    stuck = Stuck(monkeypatch, "preadv")
    ticket = rig.send(rig.disk, disk, rig.device)
    stuck.reached.wait()
    assert rig.device.num_free == 4
    if how == "cancel":
        rig.mover.cancel(ticket)
    else:
        now[0] = 11.0
        assert rig.mover.poll() == [ticket]
        rig.device.free(ticket.target_pages)
    assert rig.device.num_free == 6
    assert not rig.device.states[ticket.target_pages].any()
    fresh = rig.device.allocate(2)
    rig.device.pool[torch.from_numpy(fresh)] = 9.0
    stuck.go.set()
    monkeypatch.undo()
    rig.device.publish(fresh)
    while not rig.mover.available(rig.disk, rig.device):
        rig.mover.poll()
    assert rig.values(rig.carry(rig.disk, disk, rig.device)) == [1, 2]
    assert rig.values(fresh) == [9, 9]
    rig.check()
    rig.close()


def test_of_a_half_bad_load_only_what_was_verified_is_published(rig: Rig, tmp_path: Path) -> None:
    disk = rig.carry(rig.device, rig.fill([1, 2, 3]), rig.disk)
    with open(tmp_path / "segment-000000.kv", "r+b") as file:
        file.seek(8192 + 4096 + 17)
        file.write(b"\xff")
    ticket = rig.send(rig.disk, disk, rig.host)
    arrived = rig.finish(ticket)
    assert ticket.ok.tolist() == [True, False, True]
    assert ticket.bad.tolist() == [False, True, False]
    rig.disk.free(disk[ticket.bad])
    assert rig.values(rig.carry(rig.host, arrived, rig.device)) == [1, 3]
    assert rig.host.num_free == 6
    rig.check()


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_store_that_fails_is_a_miss(rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    pages = rig.fill([1, 2])
    disk = rig.carry(rig.device, pages, rig.disk)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    if call == "preadv":
        assert not len(rig.carry(rig.disk, disk, rig.host))
    else:
        assert not len(rig.carry(rig.device, pages, rig.disk))
        assert not rig.mover.available(rig.device, rig.disk)
        there = rig.disk.allocate(1, LOADING)
        assert rig.mover.submit(rig.device, pages[:1], rig.disk, there, chain(1)) is None
        rig.disk.free(there)
        assert rig.values(rig.carry(rig.disk, disk, rig.device)) == [1, 2]
    rig.check()


def test_a_broken_copy_stream_is_raised_not_served(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.carry(rig.device, rig.fill([1]), rig.host)
    rig.mover._streams[1]._ops.put(lambda: 1 // 0)  # type: ignore[attr-defined]
    rig.send(rig.device, rig.fill([2]), rig.host)
    with pytest.raises(CopyFailed):
        while True:
            rig.mover.poll()


def test_what_is_under_way_to_disk_when_it_is_flushed_is_not_read_again(tmp_path: Path) -> None:
    machine = Machine(0)
    rig = Rig(tmp_path, machine)
    computed = Event()
    machine.compute.call(lambda: None, after=computed)
    down = rig.send(rig.device, rig.fill([1, 2]), rig.disk)
    rig.disk.flush()
    computed.reached = True
    up = rig.send(rig.disk, rig.finish(down), rig.host)
    assert not len(rig.finish(up))
    assert up.bad.all()
    rig.close()
    rig = Rig(tmp_path)
    assert not rig.disk.take_recovered()
    rig.close()


def test_estimates_come_from_what_was_measured_and_what_is_queued(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk=16)
    rig.mover.probe()
    rig.check()
    assert [tier.num_free for tier in rig.tiers] == [8, 8, 16]
    edges = [(a, b) for a in rig.tiers for b in rig.tiers if a is not b]
    assert all(0 < rig.mover.seconds(a, b, 4) < 10 for a, b in edges)
    alone = rig.mover.seconds(rig.device, rig.host, 4)
    assert rig.mover.seconds(rig.device, rig.host, 8) == pytest.approx(2 * alone)
    ticket = rig.send(rig.device, rig.fill([1, 2, 3, 4]), rig.host)
    assert rig.mover.seconds(rig.device, rig.host, 4) == pytest.approx(2 * alone)
    assert rig.mover.seconds(rig.host, rig.device, 4) > 0
    rig.finish(ticket)
    rig.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("page_size", [1, 256])
@pytest.mark.parametrize("pinned", [True, False])
def test_on_a_gpu_bytes_survive_a_slow_writer_and_every_way(
    tmp_path: Path, page_size: int, pinned: bool
) -> None:
    cuda = torch.device("cuda", 0)
    shape = PageShape.uniform(4, 2, 16, page_size, "bfloat16")
    device = DeviceTier(shape, 64, cuda)
    pinning = pinning_for(cuda)
    assert pinning is not None
    if not pinned:
        pinning = Pinning(lambda address, nbytes: False, pinning.unpin)
    host = HostTier(shape.nbytes, 64, pinning)
    disk = DiskTier(tmp_path, shape.nbytes, 16 << 20, b"w" * 32, 100)
    mover = open_mover(device, host, disk, pinning=pinning)
    mover.probe()
    order = np.random.default_rng(0).permutation(32).astype(np.int32)
    for way in ([host], [disk], [host, disk], [disk, host]):
        pages = device.allocate(32)[order]
        expected = torch.randn(32, shape.elems, device=cuda).bfloat16()
        torch.cuda._sleep(10_000_000)
        device.pool[torch.from_numpy(pages).long().to(cuda)] = expected
        device.publish(pages)
        source: Tier = device
        for target in (*way, device):
            there = target.allocate(32, LOADING)[order]
            mover.submit(source, pages, target, there, chain(32))
            assert mover.wait(5.0)[0].ok.all()
            source.free(pages)
            source, pages = target, there
        assert torch.equal(device.pool[torch.from_numpy(pages).long().to(cuda)], expected)
        device.free(pages)
    mover.close()
    disk.close()
    host.close()


@pytest.mark.parametrize("host", [0, 1, 6])
def test_random_moves_frees_cancels_and_failures_keep_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: int
) -> None:
    """Copies complete in any order, the disk fails now and then; what is READY is right."""
    chance = random.Random(host)
    real = {name: getattr(os, name) for name in ("pwrite", "preadv")}

    def flaky(*args: object) -> int:
        if chance.random() < 0.1:
            raise OSError(5, "Input/output error")
        return int(real["preadv"](*args))

    monkeypatch.setattr(os, "preadv", flaky)
    rig = Rig(tmp_path, Machine(host), device=6, host=host, disk=6)
    machine = rig.machine
    assert machine is not None
    held: list[tuple[Tier, int, int]] = []  # (tier, page, value), READY and ours
    moving: dict[Ticket, list[int]] = {}
    for turn in range(1500):
        action = chance.random()
        if action < 0.25 and rig.device.num_free:
            page = rig.device.allocate(1)
            row = torch.from_numpy(page).long()
            machine.compute.call(
                lambda row=row, turn=turn: rig.device.pool.index_fill_(0, row, float(turn))
            )
            rig.device.publish(page)
            held.append((rig.device, int(page[0]), turn))
        elif action < 0.65 and held:
            source, _, _ = chance.choice(held)
            batch = [h for h in held if h[0] is source][: chance.randint(1, 3)]
            target = chance.choice([tier for tier in rig.tiers if tier is not source])
            pages = np.array([page for _, page, _ in batch], np.int32)
            if target.num_free >= len(pages):
                there = target.allocate(len(pages), LOADING)
                ticket = rig.mover.submit(source, pages, target, there, chain(len(pages)))
                if ticket is None:
                    target.free(there)
                else:
                    moving[ticket] = [value for _, _, value in batch]
        elif action < 0.8 and held:
            tier, page, _ = held.pop(chance.randrange(len(held)))
            tier.free(np.array([page], np.int32))
        elif action < 0.83 and moving:
            ticket = chance.choice(list(moving))
            rig.mover.cancel(ticket)
            del moving[ticket]
        machine.run(chance.randint(0, 4))
        for ticket in rig.mover.poll():
            values = moving.pop(ticket)
            for page, value, ok in zip(ticket.target_pages, values, ticket.ok, strict=True):
                if ok:
                    held.append((ticket.target, int(page), value))
                else:
                    ticket.target.free(np.array([page], np.int32))
        rig.check()
        if turn % 10 == 0:
            machine.run()
            for tier, page, value in held:
                if tier is rig.device:
                    assert rig.values(np.array([page], np.int32)) == [value]
    while rig.mover.num_outstanding:
        machine.run()
        rig.mover.wait(0.1)
    rig.check()
    rig.close()
