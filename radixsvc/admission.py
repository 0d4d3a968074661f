"""Who calls, what of the cache is theirs, and whether they may come in now.

A namespace is made here, from the configured name of the caller's key, never from what a client
says alone: a `cache_salt` can only divide it further. Parts are framed by their lengths, so that
("a", "bc") and ("ab", "c") stay apart. The name, not the secret, counts: a key can be replaced
by a new one of the same name and finds the cache of the old.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from aiohttp import hdrs, web
from msgspec import Struct

from radixsvc.codec import Encoding, body_encoding, decode
from radixsvc.config import Config
from radixsvc.errors import (
    AuthenticationFailed,
    BodyTooLarge,
    Draining,
    EngineFailed,
    NotFound,
    NotReady,
    PermissionDenied,
    QueueFull,
    RequestTooSlow,
    ServiceError,
    SetupError,
    UnsupportedMediaType,
)
from radixsvc.namespace import namespace_key

if TYPE_CHECKING:
    from radixsvc.metrics import Metrics
    from radixsvc.startup import Backend

T = TypeVar("T")
log = logging.getLogger("radixsvc.http")


@dataclass(frozen=True)
class Caller:
    """The name of the key a request came with, and whether it is an administrator's."""

    name: str
    admin: bool

    def namespace(self, salt: str | None) -> str:
        """The part of the cache that is this caller's."""
        return namespace_key(self.name, salt or "")


ANYONE = Caller("", admin=True)


class KeyRing:
    """API keys as SHA-256 digests. Without any, everyone is an administrator without a name.

    The file has a key a line, `NAME use|admin KEY`, where KEY is the secret itself or
    `sha256:` and its hexadecimal digest. Secrets are long and random, so one hash is enough.
    """

    def __init__(self, keys: dict[bytes, Caller]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    @classmethod
    def load(cls, file: str) -> KeyRing:
        """Read `file`, or systemd's credential "keys" where none is named. SetupError."""
        credentials = os.environ.get("CREDENTIALS_DIRECTORY")
        if not file and credentials and Path(credentials, "keys").exists():
            file = str(Path(credentials, "keys"))
        if not file:
            return cls({})
        try:
            lines = Path(file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"the keys file {file} can't be read: {error}") from None
        keys = {}
        for number, line in enumerate(lines, 1):
            parts = line.split()
            if not parts or parts[0].startswith("#"):
                continue
            if len(parts) != 3 or parts[1] not in ("use", "admin") or len(parts[0]) > 64:
                raise SetupError(
                    f"{file}, line {number}: write NAME use|admin KEY, NAME of up to 64 characters"
                )
            keys[_digest(parts[2])] = Caller(parts[0], parts[1] == "admin")
        if not keys:
            raise SetupError(f"{file} holds no keys: write NAME use|admin KEY, one a line")
        return cls(keys)

    def identify(self, authorization: str | None) -> Caller:
        """The caller behind an `Authorization: Bearer KEY` header. AuthenticationFailed."""
        if not self._keys:
            return ANYONE
        scheme, _, secret = (authorization or "").partition(" ")
        digest = hashlib.sha256(secret.strip().encode(errors="surrogateescape")).digest()
        found = None
        for known, caller in self._keys.items():  # all of them: how long it takes tells nothing
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None or scheme.lower() != "bearer":
            raise AuthenticationFailed("send a valid API key as 'Authorization: Bearer KEY'")
        return found


def _digest(key: str) -> bytes:
    if not key.startswith("sha256:"):
        return hashlib.sha256(key.encode()).digest()
    try:
        digest = bytes.fromhex(key.removeprefix("sha256:"))
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise SetupError("a key after 'sha256:' is 64 hexadecimal digits")
    return digest


@dataclass
class Edge:
    """What every handler needs. `backend` is None until the model is loaded."""

    config: Config
    keys: KeyRing
    metrics: Metrics
    backend: Backend | None = None
    draining: bool = False
    failure: BaseException | None = None
    in_flight: Counter[str] = field(default_factory=Counter)
    on_failure: Callable[[], None] = lambda: None

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one loop that serves; asking asyncio for it is a system call."""
        return asyncio.get_running_loop()

    def fail(self, error: BaseException) -> None:
        """The service can't go on: the process is to end with a status that says so."""
        self.failure = error
        self.on_failure()

    @property
    def ready(self) -> bool:
        """A real forward pass was done, nothing broke since, and we are not leaving."""
        return self.backend is not None and self.backend.engine.ready and not self.draining

    def ready_backend(self) -> Backend:
        """The model and its engine; NotReady or Draining where they take no requests."""
        if self.draining:
            raise Draining("the service is shutting down; use another instance")
        if self.backend is None or not self.backend.engine.ready:
            raise NotReady("the model is still loading; retry in a moment")
        return self.backend

    def enter(self, account: str) -> None:
        """Take one of a key's places among the requests in flight. QueueFull if none is left."""
        limit = self.config.server.max_concurrent
        if limit and self.in_flight[account] >= limit:
            raise QueueFull(f"this key has {limit} requests in flight already")
        self.in_flight[account] += 1

    def leave(self, account: str) -> None:
        self.in_flight[account] -= 1


EDGE = web.AppKey("edge", Edge)


class Call(Struct):
    """One HTTP request: who asks for what, under which id, and how the answer is encoded."""

    request: web.Request
    edge: Edge
    id: str
    caller: Caller
    encoding: Encoding
    _backend: Backend | None = None

    @property
    def backend(self) -> Backend:
        """The model and its engine, which took requests when first asked for."""
        if self._backend is None:
            self._backend = self.edge.ready_backend()
        return self._backend

    def require_admin(self) -> None:
        if not self.caller.admin:
            raise PermissionDenied("this needs a key with the role 'admin'")

    async def read(self, kind: type[T]) -> T:
        """The body as `kind`, within the limits of size, time and nesting, and for our model."""
        model_name = self.backend.model_name  # NotReady before a body is waited for
        headers = self.request.headers
        encoding = body_encoding(headers.get(hdrs.CONTENT_TYPE, ""))
        if headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity":
            raise UnsupportedMediaType("compressed bodies are not taken: send it as it is")
        content = self.request.content
        if content.is_eof() and content.total_bytes <= self.request.client_max_size:
            data = content.read_nowait()  # all there, as most are: no need to wait
        else:
            data = await self._wait_for_body()
        body = decode(data, encoding, kind)
        name = getattr(body, "model", None)
        if name and name != model_name and not self.edge.config.model.any_name:
            self.check_model(name)
        return body

    def check_model(self, name: str) -> None:
        """NotFound where `name` is not our model's."""
        if name != (ours := self.backend.model_name):
            raise NotFound(f"this service has the model {ours!r} alone", "model")

    async def _wait_for_body(self) -> bytes:
        server = self.edge.config.server
        try:
            async with asyncio.timeout(server.read_seconds):
                return await self.request.read()
        except web.HTTPRequestEntityTooLarge:
            raise BodyTooLarge(
                f"the body is larger than {server.max_body}: send less, or raise server.max_body"
            ) from None
        except TimeoutError:
            raise RequestTooSlow(
                f"the body did not arrive within {server.read_seconds:g} s: send it at once, or "
                "raise server.read_seconds"
            ) from None


def as_service_error(error: Exception, id: str) -> ServiceError:
    """What the caller is told of `error`. What nobody foresaw goes to the log."""
    if isinstance(error, ServiceError):
        return error
    log.error("request %s failed", id, exc_info=error)
    return EngineFailed("an internal error ended this request; it has been logged")
