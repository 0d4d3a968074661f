"""From a configuration to a running engine: fetch, load, size the tiers, wire them together."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from radixsvc.architecture import ModelInfo, describe
from radixsvc.attention import set_num_threads
from radixsvc.cache import Lower, PrefixCache
from radixsvc.checkpoint import available_memory, disk_space
from radixsvc.config import Config
from radixsvc.engine import Engine, EngineConfig
from radixsvc.errors import SetupError
from radixsvc.fetch import fetch
from radixsvc.model import load_model, measure_num_threads
from radixsvc.node import PAGES, TOKEN_BYTES
from radixsvc.residency import TierPolicy
from radixsvc.scheduler import SchedulerConfig
from radixsvc.tokenizer import Tokenizer
from tiers.base import TierError, pages_within
from tiers.cuda_copy import pinning_for
from tiers.device import DeviceTier
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.mover import open_mover
from tiers.page import PageShape

log = logging.getLogger("radixsvc.startup")

PAGE_METADATA = 128  # bytes of ledger and tree a page takes at most, beside its own
MAX_NAMESPACE_BYTES = 2048  # a key's name and a salt, beside a page's tokens on disk


@dataclass(frozen=True)
class Backend:
    """A model with its engine and tokenizer, as the edge sees it."""

    model_name: str
    engine: Engine
    tokenizer: Tokenizer
    info: ModelInfo
    created: int  # Unix seconds
    lower: Lower | None = None

    def close(self) -> None:
        """Once the engine has stopped: end copies, close files, let go of memory."""
        if self.lower is not None:
            self.lower.close()


def build_backend(config: Config) -> Backend:
    """Everything that answers requests, not started yet. SetupError says why it can't be."""
    path = fetch(config.model.name or None)
    device = pick_device(config.model.device)
    model = load_model(path, config.model.dtype, device)
    if device.type == "cpu":
        set_num_threads(measure_num_threads(model.info.dtype))
    log.info("%s on %s in %s", model.info.name, device, model.info.dtype)
    shape = model.page_shape(config.tiers.device.page_size)
    tier = DeviceTier(shape, num_device_pages(config, shape, device), device)
    lower = build_lower(config, tier, bytes.fromhex(model.info.fingerprint))
    tiers = (tier, lower.host, lower.disk) if lower is not None else (tier,)
    pages = {name: held.num_pages if held else 0 for name, held in zip(PAGES, tiers, strict=False)}
    for name in filter(pages.get, pages):
        log.info("%s", describe_tier(name, config, shape, pages[name]))
    quotas = {
        account: [
            getattr(quota, name).resolve(n * shape.nbytes) // shape.nbytes
            for name, n in pages.items()
        ]
        for account, quota in config.quotas.items()
    }
    cache = PrefixCache(
        tier, shape.page_size, lower=lower, quotas=quotas, enabled=config.cache.enabled
    )
    options = EngineConfig(
        SchedulerConfig(**msgspec.structs.asdict(config.scheduler)),
        {"auto": None, "on": True, "off": False}[config.engine.overlap],
        config.engine.cuda_graphs,
        stream_deadline=config.server.write_seconds,
    )
    engine = Engine(model, tier, cache, options)
    if config.model.max_context:
        engine.max_request_tokens = min(engine.max_request_tokens, config.model.max_context)
    return Backend(model.info.name, engine, Tokenizer(path), model.info, int(time.time()), lower)


def build_lower(config: Config, device: DeviceTier, fingerprint: bytes) -> Lower | None:
    """The tiers below the device and who carries pages there; None where none is asked for."""
    if not config.cache.enabled:
        return None
    tiers = config.tiers
    page_bytes = device.page_bytes
    host_bytes = tiers.host.size.resolve(available_memory())
    disk_bytes = tiers.disk.size.resolve(disk_space(tiers.disk.path))
    host = disk = None
    pinning = pinning_for(device.device)
    try:
        if num_pages := pages_within(host_bytes, page_bytes):
            host = HostTier(page_bytes, num_pages, pinning)
        if disk_bytes:
            blob_bytes = device.shape.page_size * TOKEN_BYTES + MAX_NAMESPACE_BYTES
            folder = Path(tiers.disk.path)
            disk = DiskTier(folder, page_bytes, disk_bytes, fingerprint, blob_bytes)
    except TierError as error:
        raise SetupError(str(error)) from None
    if host is None and disk is None:
        return None
    mover = open_mover(device, host, disk, pinning=pinning)
    mover.probe()
    policy = TierPolicy(
        write=tiers.host.write_policy,
        through_after=tiers.host.through_after,
        disk_after=tiers.disk.after_uses,
        promote=tiers.promote,
    )
    return Lower(mover, host, disk, fingerprint, policy)


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one that torch can use."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SetupError("model.device is cuda, but torch finds no GPU: see radixsvc doctor")
    return device


def num_device_pages(config: Config, shape: PageShape, device: torch.device) -> int:
    """Pages that fit `tiers.device.size`. SetupError where it is too little, or too much."""
    on_gpu = device.type == "cuda"
    available = int(torch.cuda.mem_get_info(device)[0]) if on_gpu else available_memory()
    size = config.tiers.device.size
    wanted = size.resolve(available)
    if wanted > available:
        raise SetupError(
            f"tiers.device.size is {size} and {available / 2**30:.1f} GiB are available: "
            "set it lower, or as a share such as 50%"
        )
    num_pages = wanted // (shape.nbytes + PAGE_METADATA)
    if num_pages < 8:
        raise SetupError(
            f"tiers.device.size is {size}, which holds {num_pages} pages of "
            f"{shape.nbytes / 2**20:.1f} MiB: at least 8 are needed"
        )
    return num_pages


def describe_tier(name: str, config: Config, shape: PageShape, num_pages: int) -> str:
    """What a tier holds, in a line."""
    return (
        f"{name}: {num_pages * shape.nbytes / 2**30:.2f} GiB ({getattr(config.tiers, name).size}), "
        f"{num_pages:,} pages, {num_pages * shape.page_size:,} tokens"
    )


def capacity(config: Config) -> str:
    """What the tiers will hold, about, for a model that is not loaded; a line each."""
    device = pick_device(config.model.device)
    info = describe(fetch(config.model.name or None), config.model.dtype, device)
    tiers, shape = config.tiers, info.page_shape(config.tiers.device.page_size)
    pages = (
        num_device_pages(config, shape, device),
        pages_within(tiers.host.size.resolve(available_memory()), shape.nbytes),
        tiers.disk.size.resolve(disk_space(tiers.disk.path)) // shape.nbytes,
    )
    lines = [f"{info.name}, {info.dtype} on {device}: {shape.nbytes:,} bytes a page"]
    lines += [describe_tier(name, config, shape, n) for name, n in zip(PAGES, pages, strict=True)]
    return "\n".join(lines)
