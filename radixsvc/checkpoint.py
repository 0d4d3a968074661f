"""A model's folder: what must lie in it, whether it is whole, and how much room there is for it.

Everything here reads headers and sizes only, so it answers in milliseconds for any model.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixsvc.errors import SetupError

# Each has been compared with transformers' own forward pass: tests/test_model.py.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_neox")

MAX_HEADER = 100 << 20  # the safetensors format's own limit


@dataclass(frozen=True)
class Checkpoint:
    """A folder with config.json and whole safetensors files."""

    path: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    headers: tuple[bytes, ...]  # each file's JSON header, as stored

    @property
    def num_params(self) -> int:
        """Elements in all stored tensors."""
        return sum(
            math.prod(entry["shape"])
            for header in self.headers
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        )

    @property
    def name(self) -> str:
        """The folder's name, or the repository's for a folder of the hub's cache."""
        if self.path.parent.name == "snapshots":
            return self.path.parent.parent.name.removeprefix("models--").replace("--", "/")
        return self.path.name


def read_checkpoint(path: Path) -> Checkpoint:
    """Look a model's folder over. SetupError says which file is missing, broken or cut short."""
    path = Path(os.path.abspath(path))
    if not path.is_dir():
        raise SetupError(
            f"There is no folder {path}. Give --model a folder with safetensors, a .gguf file, "
            "or a model's name on the hub, such as owner/name."
        )
    config_file = path / "config.json"
    if not config_file.is_file():
        raise SetupError(
            f"{path} holds no config.json, so it is not a model's folder.{_hint(path)}"
        )
    try:
        config = json.loads(config_file.read_bytes())
    except ValueError as error:
        raise SetupError(f"{config_file} is not valid JSON ({error}); fetch it again.") from None
    files = _weight_files(path)
    return Checkpoint(path, config, files, tuple(_read_header(file) for file in files))


def require_family(model_type: str, what: str) -> None:
    """SetupError unless models of this type are known to run right on a ragged batch."""
    if model_type not in FAMILIES:
        raise SetupError(
            f"{what} is of the type {model_type!r}, which is not supported. "
            f"Supported are {', '.join(FAMILIES)}."
        )


def _weight_files(path: Path) -> tuple[Path, ...]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise SetupError(f"{index} is broken ({error!r}); fetch it again.") from None
        missing = sorted(name for name in names if not (path / name).is_file())
        if missing:
            absent = ", ".join(missing)
            raise SetupError(f"{path} is only part of a model, without {absent}. Fetch it again.")
        return tuple(path / name for name in sorted(names))
    single = path / "model.safetensors"
    if not single.is_file():
        raise SetupError(f"{path} holds no model.safetensors.{_hint(path)}")
    return (single,)


def _hint(path: Path) -> str:
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        return f" It holds {ggufs[0].name}: give --model that file."
    if any(path.glob("*.bin")):
        return " Weights as .bin files are not read; convert the model to safetensors."
    return ""


def _read_header(file: Path) -> bytes:
    """The JSON header: an 8-byte little-endian length, JSON, then the tensors' bytes."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(MAX_HEADER, size - 8):
            raise SetupError(f"{file} is not a whole safetensors file; fetch it again.")
        header = stream.read(length)
    try:
        entries = json.loads(header)
        ends = [e["data_offsets"][1] for name, e in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SetupError(f"{file} has a broken header ({error!r}); fetch it again.") from None
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        raise SetupError(
            f"{file} has {size:,} bytes where its header says {wanted:,}; fetch it again."
        )
    return header


def available_memory() -> int:
    """Bytes this process may still take: free memory, or what its cgroup leaves if that is less."""
    amount = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                amount = int(line.split()[1]) * 1024
    return min(amount, *_cgroup_room(), amount)


def disk_space(path: Path | str) -> int:
    """Free bytes where `path` is, or will be; 0 for no path."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free if path else 0


def _cgroup_room() -> list[int]:
    """What each cgroup (v2) from this process's own up to the root still allows, where limited."""
    try:
        own = Path("/proc/self/cgroup").read_text().split("::", 1)[1].splitlines()[0]
    except (OSError, IndexError):
        return []
    room = []
    folder = Path("/sys/fs/cgroup") / own.lstrip("/")
    for group in (folder, *folder.parents):
        try:
            limit = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
            cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":  # file pages can be dropped, so they don't count as used
            room.append(int(limit) - used + int(cache.get("inactive_file", 0)))
    return room


def require_memory(needed: int, what: str) -> None:
    """SetupError unless `needed` bytes are available."""
    there = available_memory()
    if needed > there:
        raise SetupError(
            f"{what} needs about {needed / 2**30:.1f} GiB of memory and {there / 2**30:.1f} GiB "
            "are available. Stop other programs, pick --dtype bfloat16, or take a smaller model."
        )
