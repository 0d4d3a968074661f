"""Bodies in both encodings: one meaning, limits, and nothing but InvalidRequest for rubbish."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixsvc.codec import Encoding, answer_encoding, body_encoding, canonical, decode, token_ids
from radixsvc.errors import InvalidRequest, NotAcceptable, UnsupportedMediaType
from radixsvc.protocol import ChatRequest, CompletionRequest
from radixsvc.toolcalls import template_messages, template_tools

JSON, MSGPACK = Encoding.JSON, Encoding.MSGPACK


def both(value: Any) -> list[tuple[bytes, Encoding]]:
    return [(json.dumps(value).encode(), JSON), (msgpack.packb(value), MSGPACK)]


def test_both_encodings_give_the_same_body() -> None:
    value = {"prompt": "x", "max_tokens": 3, "stop": ["a"], "logit_bias": {"5": 1.5}, "new": {}}
    first, second = (decode(body, kind, CompletionRequest) for body, kind in both(value))
    assert first == second
    assert (first.prompt, first.max_tokens, first.stop) == ("x", 3, ["a"])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop": 5}, "stop"),
        ({"stream_options": 1}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king"}]}, "messages[0].role"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
    ],
)
def test_impossible_values_name_their_field(change: dict[str, Any], param: str) -> None:
    value = {"messages": [{"role": "user", "content": "secret words"}], **change}
    for body, kind in both(value):
        with pytest.raises(InvalidRequest) as caught:
            decode(body, kind, ChatRequest)
        assert str(caught.value.param).startswith(param)
        assert "secret" not in caught.value.message


@given(st.binary(max_size=300))
def test_rubbish_is_refused(body: bytes) -> None:
    for kind in (JSON, MSGPACK):
        with pytest.raises(InvalidRequest):
            decode(body, kind, ChatRequest)


hostile = st.recursive(
    st.sampled_from([None, True, -1, 0, 2**63, float("nan"), float("inf"), "", "x", b"x"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["name", "type", "function", "a"]), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
FIELDS = [*ChatRequest.__struct_fields__, "prompt"]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), hostile, max_size=6))
def test_hostile_values_are_refused_or_understood(value: dict[str, Any]) -> None:
    """Whatever passes the decoder goes through what the handlers do with it before templating."""
    value.setdefault("messages", [{"role": "user", "content": "x"}])
    body = msgpack.packb(value)
    with contextlib.suppress(InvalidRequest):
        chat = decode(body, MSGPACK, ChatRequest)
        json.dumps([template_messages(chat.messages), template_tools(chat.tools or [], True)])
        token_ids(decode(body, MSGPACK, CompletionRequest).prompt, "prompt", 100)


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa5tools\xdc\xff\xff" + b"\x80" * 0xFFFF,
        b"\x81\xa5tools\x92\xdc\xff\xff" + b"\x80" * 0xFFFF + b"\xdc\xff\xff" + b"\x80" * 0xFFFF,
        b"\xc7\xff\x05" + b"x" * 255,
        b"\x81\x91\x01\x02",
    ],
)
def test_msgpack_bombs_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(body, MSGPACK, ChatRequest)


MANY = 60_000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (JSON, b'{"prompt":[' + b"{}," * MANY + b"{}]}"),
        (JSON, b'{"unknown":[' + b"{}," * MANY + b'{}],"prompt":"x"}'),
        (JSON, b'{"prompt":[' + b"[0]," * MANY + b"[]]}"),
        (MSGPACK, b"\x81\xa6prompt\xdd" + (3 * MANY).to_bytes(4, "big") + b"\x80" * 3 * MANY),
        (MSGPACK, b"\x81\xa6prompt\xdd" + MANY.to_bytes(4, "big") + b"\xa2ab" * MANY),
    ],
)
def test_what_a_body_takes_in_memory_is_a_bounded_multiple_of_its_size(
    kind: Encoding, body: bytes
) -> None:
    tracemalloc.start()
    with contextlib.suppress(InvalidRequest):
        token_ids(decode(body, kind, CompletionRequest).prompt, "prompt", 100)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 32 * len(body)


def test_deep_json_is_refused() -> None:
    for inside in (b'{"messages":', b'{"unknown":', b'{"tools":'):
        with pytest.raises(InvalidRequest):
            decode(inside + b"[" * 100_000, JSON, ChatRequest)


def test_token_ids_come_as_array_or_bin() -> None:
    ids = np.array([1, 2, 99], np.int32)
    for value in (ids.tolist(), ids.astype("<i4").tobytes()):
        got = token_ids(value, "prompt", 100)
        assert got.dtype == np.int32
        assert got.tolist() == [1, 2, 99]


@pytest.mark.parametrize(
    "value",
    [[], b"", b"\x01\x02\x03", [100], [-1], [1.5], [True, 2], ["a"], [[1]], [[1], [2, 3]], [2**70],
     [2**40], None, 7, {"a": 1}, (100).to_bytes(4, "little"), b"\xff\xff\xff\xff"],
)  # fmt: skip
def test_what_is_no_list_of_token_ids_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest):
        token_ids(value, "prompt", 100)


def test_the_answer_comes_as_asked() -> None:
    for name in ("vnd.msgpack", "msgpack", "x-msgpack"):
        assert body_encoding(f"application/{name}") is MSGPACK
        assert answer_encoding(f"application/{name};q=1, */*", "") is MSGPACK
        assert answer_encoding("*/*", f"application/{name}") is MSGPACK
    assert answer_encoding("", "application/json") is JSON
    assert answer_encoding("text/event-stream", "application/json") is JSON
    assert answer_encoding("text/plain", "") is JSON  # a probe of /healthz
    assert answer_encoding("application/json", "application/msgpack") is JSON
    for wrong in ("", "text/plain", "application/x-www-form-urlencoded"):
        with pytest.raises(UnsupportedMediaType):
            body_encoding(wrong)
    with pytest.raises(NotAcceptable):
        answer_encoding("image/png", "application/json")


def test_canonical_form_sorts_maps_at_every_depth() -> None:
    value = {"b": [{"d": 1, "c": 2}], "a": 0}
    assert json.dumps(canonical(value, "tools", True)) == '{"a": 0, "b": [{"c": 2, "d": 1}]}'
    assert json.dumps(canonical(value, "tools", False)) == json.dumps(value)
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    for wrong in (deep, [{}] * 70_000, [b"bin"], {b"bin": 1}):
        with pytest.raises(InvalidRequest):
            canonical(wrong, "tools", True)
