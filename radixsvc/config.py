"""Configuration: defaults < TOML file < environment < `--set`, each value with its origin.

    TOML         [tiers.host]  size = "24GiB"
    environment  RADIXSVC_TIERS__HOST__SIZE=24GiB
    --set        tiers.host.size=24GiB

A key that no section has is an error which names its path and the nearest key there is.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from radixsvc.errors import SetupError

ENV_PREFIX = "RADIXSVC_"
UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class Size:
    """An amount of memory: bytes with a unit ("24GiB"), or a share of what there is ("80%")."""

    def __init__(self, text: object) -> None:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|B|[KMGT]I?B)", str(text).upper())
        if not match or (match[2] == "%" and float(match[1]) > 100):
            raise ValueError('a size needs its unit, as in "24GiB", or is a share, as in "80%"')
        self.text = str(text)
        self._number, self._unit = float(match[1]), match[2]

    def resolve(self, available: int) -> int:
        """Bytes, where `available` bytes are what a share is a share of."""
        return int(self._number * (available / 100 if self._unit == "%" else UNITS[self._unit]))

    def __str__(self) -> str:
        return self.text


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the configuration; its fields are the keys."""


class Server(Section, frozen=True):
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8011
    public_without_keys: bool = False  # let other machines in though there are no keys
    keys_file: str = ""  # NAME ROLE KEY a line; a systemd credential named "keys" is found itself
    max_body: Size = Size("4MiB")
    max_prompts: Count = 128  # prompts x n of one request
    max_concurrent: Count = 0  # requests in flight per key name, 0 for no limit
    read_seconds: Seconds = 30.0  # a client sends its body within this
    write_seconds: Seconds = 30.0  # and takes a piece of its answer within this
    request_seconds: Seconds = 0.0  # a request ends within this, 0 for no limit
    drain_seconds: Seconds = 60.0  # for what runs when the service is told to stop


class ModelSection(Section, frozen=True):
    name: str = ""  # a folder, a .gguf file or a hub id; empty: SmolLM2-135M-Instruct
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    max_context: Count = 0  # 0: the model's own
    any_name: bool = True  # answer requests for any `model`, as there is but one
    canonical_tools: bool = True  # sorted, so that their order does not split the tree


class SchedulerSection(Section, frozen=True):
    max_running: Annotated[int, Meta(ge=1)] = 64  # requests in one step
    max_waiting: Count = 1024  # requests; more are told to come back later
    step_seconds: Seconds = 0.25  # a step's length while anything decodes
    max_chunk: Annotated[int, Meta(ge=32)] = 8192  # prompt tokens in one step
    share_running_prefixes: bool = True  # wait for a prefix that another request computes


class EngineSection(Section, frozen=True):
    overlap: Literal["auto", "on", "off"] = "auto"  # of host and device work; auto: on a GPU
    cuda_graphs: bool = True  # a decode step is one launch


class DeviceSection(Section, frozen=True):
    size: Size = Size("30%")  # of the memory that is free once the model is loaded
    page_size: Annotated[int, Meta(ge=1, le=1024)] = 16  # tokens


class HostSection(Section, frozen=True):
    size: Size = Size("0B")
    write_policy: Literal["through", "back", "none"] = "back"  # early, when evicted, never
    through_after: Count = 2  # uses, then a page is copied down early


class DiskSection(Section, frozen=True):
    size: Size = Size("0B")
    path: str = ""  # a folder that no other process uses
    after_uses: Count = 2  # uses that make a page worth writing


class Cache(Section, frozen=True):
    enabled: bool = True  # off: every request computes its whole prompt


class Tiers(Section, frozen=True):
    device: DeviceSection = DeviceSection()
    host: HostSection = HostSection()
    disk: DiskSection = DiskSection()
    promote: Literal["cost", "always", "never"] = "cost"  # load what is cheaper than computing


class Log(Section, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "text", "json", "journald"] = "auto"  # journald under systemd


class Prompt(Section, frozen=True):
    """A named prompt, computed and pinned at start. `system` goes through the chat template."""

    text: str = ""
    file: str = ""
    system: bool = True
    namespace: str = ""  # the name of a key


class Quota(Section, frozen=True):
    """What the namespaces of a key's name may keep."""

    device: Size = Size("100%")  # each a share of its tier, or bytes
    host: Size = Size("100%")
    disk: Size = Size("100%")


class Config(Section, frozen=True):
    server: Server = Server()
    model: ModelSection = ModelSection()
    scheduler: SchedulerSection = SchedulerSection()
    engine: EngineSection = EngineSection()
    cache: Cache = Cache()
    tiers: Tiers = Tiers()
    log: Log = Log()
    prompts: dict[str, Prompt] = {}
    quotas: dict[str, Quota] = {}  # by the name of a key


class Loaded(NamedTuple):
    """A configuration, and for each key that was set where its value is from."""

    config: Config
    origins: dict[str, str]


def load(
    file: str | None = None, environ: Mapping[str, str] | None = None, sets: Sequence[str] = ()
) -> Loaded:
    """Read all sources in their order. SetupError names the key, its origin and the remedy."""
    given = [(file, path, value) for path, value in flatten(_read_toml(file))] if file else []
    for name, text in sorted((environ or {}).items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            path = tuple(name.removeprefix(ENV_PREFIX).lower().split("__"))
            given.append((f"env {name}", path, text))
    for item in sets:
        key, separator, text = item.partition("=")
        if not separator:
            raise SetupError(f"--set {item}: write KEY=VALUE, as in --set tiers.host.size=24GiB")
        given.append(("--set", tuple(key.strip().split(".")), text))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, path, value in given:
        table = values
        for section in path[:-1]:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise SetupError(f"{origin}: {'.'.join(path)}: {section} is a key, not a section")
        table[path[-1]] = value
        origins[".".join(path)] = origin
    try:
        config = msgspec.convert(values, Config, strict=False, dec_hook=lambda kind, x: kind(x))
    except msgspec.ValidationError as error:
        raise _explained(error, origins) from None
    return Loaded(_checked(config), origins)


def entries(config: Config) -> Iterator[tuple[str, Any]]:
    """Every key's path and value, in the order of the sections."""
    for path, value in flatten(msgspec.to_builtins(config, enc_hook=str)):
        yield ".".join(path), value


def flatten(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each value of nested tables, with its path."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from (((key, *path), part) for path, part in flatten(value))
        else:
            yield (key,), value


def _read_toml(file: str) -> dict[str, Any]:
    try:
        with Path(file).open("rb") as handle:
            return tomllib.load(handle)
    except OSError as error:
        raise SetupError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise SetupError(f"{file}: not TOML: {error}") from None


def _explained(error: msgspec.ValidationError, origins: dict[str, str]) -> SetupError:
    words, _, path = str(error).partition(" - at `$.")
    path = path.rstrip("`")
    if unknown := re.search(r"unknown field `(.+)`", words):
        path = f"{path}.{unknown[1]}".lstrip(".")
        example = Config(prompts={"NAME": Prompt()}, quotas={"NAME": Quota()})
        near = difflib.get_close_matches(path, [key for key, _ in entries(example)], 1, 0.0)
        words = f"there is no such key; did you mean {near[0]}?"
    pattern = re.escape(path).replace(re.escape("[...]"), r"\.[^.]+")
    found = [origin for key, origin in origins.items() if re.match(pattern + r"(\.|$)", key)]
    return SetupError(f"{found[0] if found else 'configuration'}: {path}: {words}")


def _checked(config: Config) -> Config:
    """What no single key can say wrong, but two of them together can."""
    disk = config.tiers.disk
    if disk.size.resolve(100) and not disk.path:
        raise SetupError("tiers.disk.size is set: tiers.disk.path has to name a folder for it")
    for name, prompt in config.prompts.items():
        if bool(prompt.text) == bool(prompt.file):
            raise SetupError(f"prompts.{name} needs either text or file")
    return config
