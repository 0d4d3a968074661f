"""Bytes to typed bodies and back, in either encoding, within limits.

A hostile body can cost memory far beyond its length: an empty map is one byte of msgpack and 64
bytes of Python, so maps and arrays are counted as they are built. Both decoders bound nesting.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgpack
import msgspec
import numpy as np

from radixsvc.completion import Tokens
from radixsvc.errors import InvalidRequest, NotAcceptable, UnsupportedMediaType

T = TypeVar("T")

MSGPACK_TYPES = ("application/vnd.msgpack", "application/msgpack", "application/x-msgpack")
JSON_TYPES = "application/json text/event-stream text/plain application/* text/* */*".split()
SMALL_BODY = 65_536  # bytes; so many can't grow beyond 5 MB
MAX_CONTAINERS = 65_536
MAX_MAP_ITEMS = 4_096
MAX_TEMPLATE_NESTING = 32


class Encoding(StrEnum):
    JSON = "application/json"
    MSGPACK = "application/vnd.msgpack"


@functools.lru_cache(256)
def body_encoding(content_type: str) -> Encoding:
    """Of a Content-Type header; 415 for anything but the two encodings."""
    media = _media(content_type)
    if media in MSGPACK_TYPES:
        return Encoding.MSGPACK
    if media == "application/json":
        return Encoding.JSON
    raise UnsupportedMediaType(
        f"content-type {content_type!r} is not understood: send application/json or "
        f"{MSGPACK_TYPES[0]}"
    )


@functools.lru_cache(256)
def answer_encoding(accept: str, content_type: str) -> Encoding:
    """The first of `accept` that we have; `*/*` or none means: as the body came. Else 406."""
    for item in accept.split(",") if accept.strip() else ["*/*"]:
        media = _media(item)
        if media in MSGPACK_TYPES or (media == "*/*" and _media(content_type) in MSGPACK_TYPES):
            return Encoding.MSGPACK
        if media in JSON_TYPES:
            return Encoding.JSON
    raise NotAcceptable(
        f"nothing in accept {accept!r} is on offer: ask for application/json or {MSGPACK_TYPES[0]}"
    )


def _media(header: str) -> str:
    return header.partition(";")[0].strip().lower()


def encode(value: Any, encoding: Encoding) -> bytes:
    """A struct or plain data as bytes."""
    if encoding is Encoding.MSGPACK:
        return msgspec.msgpack.encode(value)
    return msgspec.json.encode(value)


def decode(body: bytes, encoding: Encoding, kind: type[T]) -> T:
    """`body` as `kind`; InvalidRequest says which field is wrong, never what it held."""
    try:
        if encoding is Encoding.MSGPACK and len(body) > SMALL_BODY:
            return msgspec.convert(_unpack(body), kind)
        key: Any = kind  # a type can be hashed, which type[T] doesn't say
        value: T = _decoder(encoding, key).decode(body)
        return value
    except msgspec.ValidationError as error:
        words, _, path = str(error).partition(" - at `")
        param = path.rstrip("`").removeprefix("$").removeprefix(".").replace("[...]", "")
        if not param and (missing := re.search(r"required field `(\w+)`", words)):
            param = missing[1]
        words = re.sub(r"^Invalid enum value.*", "not one of the values there are", words)
        raise InvalidRequest(f"{param}: {words}" if param else words, param or None) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except (ValueError, msgpack.UnpackException, TypeError, OverflowError):
        raise InvalidRequest(f"the body is not well-formed {encoding}, or over a limit") from None


@functools.cache
def _decoder(encoding: Encoding, kind: Any) -> Any:
    module: Any = msgspec.msgpack if encoding is Encoding.MSGPACK else msgspec.json
    return module.Decoder(kind)


def _unpack(body: bytes) -> Any:
    num_containers = 0

    def count(container: Any) -> Any:
        nonlocal num_containers
        num_containers += 1
        if num_containers > MAX_CONTAINERS:
            raise ValueError("too many maps and arrays")
        return container

    unpacker = msgpack.Unpacker(
        max_buffer_size=len(body) + 1,
        max_map_len=MAX_MAP_ITEMS,
        max_array_len=len(body),
        max_ext_len=0,
        object_hook=count,
        list_hook=count,
    )
    unpacker.feed(body)
    value = unpacker.unpack()
    if unpacker.tell() != len(body):
        raise ValueError("bytes after the end of the body")
    return value


def token_ids(value: Any, param: str, vocab_size: int) -> Tokens:
    """Token ids from an array of integers or a bin of little-endian int32; all within the
    vocabulary, at least one."""
    if not isinstance(value, bytes):
        try:
            ids = np.array(msgspec.convert(value, _ids_type(vocab_size)), np.int32)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{param} should be text or token ids: {error}", param) from None
    elif len(value) % 4:
        raise InvalidRequest(f"{param}: a bin of token ids holds int32", param)
    else:
        unsigned = np.frombuffer(value, np.uint32)  # as such, a negative id is a large one
        if value and int(np.maximum.reduce(unsigned)) >= vocab_size:
            raise InvalidRequest(f"{param}: token ids run from 0 to {vocab_size - 1}", param)
        ids = unsigned.view(np.int32)
    if len(ids) == 0:
        raise InvalidRequest(f"{param} is empty: at least one token is needed", param)
    return ids


@functools.cache
def _ids_type(vocab_size: int) -> Any:
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]


def canonical(value: Any, param: str, sort: bool) -> Any:
    """`value`, its maps by sorted keys if `sort`. InvalidRequest for what a template can't take:
    bins, deep nesting, too many values."""
    return _canonical(value, param, sort, 0, itertools.count())


def _canonical(value: Any, param: str, sort: bool, depth: int, count: Iterator[int]) -> Any:
    if depth > MAX_TEMPLATE_NESTING or next(count) > MAX_CONTAINERS:
        raise InvalidRequest(f"{param} is nested too deeply, or too large", param)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        keys = sorted(value) if sort else list(value)
        return {key: _canonical(value[key], param, sort, depth + 1, count) for key in keys}
    if isinstance(value, list):
        return [_canonical(item, param, sort, depth + 1, count) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise InvalidRequest(f"{param} should hold what JSON can: no bins", param)
