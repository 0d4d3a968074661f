"""Keys, roles and namespaces: what one caller may see of another."""

from __future__ import annotations

import hashlib
from pathlib import Path

import aiohttp
import pytest
from serving import RunningBackend, serving

from radixsvc.admission import Caller, KeyRing
from radixsvc.client import ApiError, AsyncClient
from radixsvc.config import load
from radixsvc.errors import AuthenticationFailed, SetupError
from radixsvc.service import refuse_open_door

SECRET = "The code of the safe is four nine seven and nobody else should know it."


@pytest.fixture
def keys(tmp_path: Path) -> KeyRing:
    digest = hashlib.sha256(b"key-b").hexdigest()
    file = tmp_path / "keys"
    file.write_text(
        f"# team keys\nteam-a use key-a\nteam-a use new-key-a\n\nteam-b use sha256:{digest}\n"
        "ops admin key-ops\n"
    )
    return KeyRing.load(str(file))


def test_keys_are_found_by_their_secret_alone(keys: KeyRing) -> None:
    assert keys.identify("Bearer key-a") == keys.identify("bearer new-key-a")
    assert keys.identify("Bearer key-b") == Caller("team-b", admin=False)
    assert keys.identify("Bearer key-ops").admin
    for wrong in (None, "", "Bearer", "Bearer ", "Bearer key-c", "Basic key-a", "key-a"):
        with pytest.raises(AuthenticationFailed):
            keys.identify(wrong)


def test_namespaces_can_not_be_made_to_meet() -> None:
    pairs = [("a", "bc"), ("ab", "c"), ("", "abc"), ("abc", ""), ("1:a", ""), ("", "1:a")]
    assert len({Caller(name, False).namespace(salt) for name, salt in pairs}) == len(pairs)


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "a use\n", "a king key\n", "a use k extra\n", "a use sha256:12\n"]
)
def test_wrong_key_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(SetupError) as caught:
        KeyRing.load(str(tmp_path / "keys"))
    assert " k " not in str(caught.value)


def test_a_systemd_credential_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("a use k\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert len(KeyRing.load("")) == 1


def test_a_public_address_needs_keys_or_a_word(keys: KeyRing) -> None:
    none = KeyRing({})
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        refuse_open_door(load(sets=[f"server.host={host}"]).config, none)
    for host in ("0.0.0.0", "::", "10.0.0.1", ""):
        config = load(sets=[f"server.host={host}"]).config
        with pytest.raises(SetupError, match="keys_file"):
            refuse_open_door(config, none)
        refuse_open_door(config, keys)
    told = ["server.host=0.0.0.0", "server.public_without_keys=true"]
    refuse_open_door(load(sets=told).config, none)


async def test_no_namespace_sees_what_another_computed(tiny: RunningBackend, keys: KeyRing) -> None:
    async with (
        serving(tiny.backend, keys=keys) as (url, _),
        AsyncClient(url, "key-a") as a,
        AsyncClient(url, "key-b") as b,
        AsyncClient(url, "new-key-a") as rotated,
        AsyncClient(url, "key-ops") as ops,
    ):
        await a.complete(SECRET, max_tokens=1)
        assert (await rotated.match(prompt=SECRET)).cached_tokens > 0
        assert (await a.match(prompt=SECRET, cache_salt="x")).cached_tokens == 0
        for salt in ("", "team-a", "6:team-a", "team-a:"):
            assert (await b.match(prompt=SECRET, cache_salt=salt)).cached_tokens == 0
            told = await b.explain(prompt=SECRET[:20] + " or not", cache_salt=salt)
            assert (told.divergence, told.evicted, told.realigned) == (None, [], None)
        cold = await b.complete(SECRET, max_tokens=1)
        assert cold.usage.radixsvc.device == 0
        assert "team-a" not in (await b.get("/v1/tree"))["text"]
        assert "team-a" in (await ops.get("/v1/tree"))["text"]
        assert (await b.prefix("evict", prompt=SECRET))["evicted_pages"] > 0
        assert (await a.match(prompt=SECRET)).cached_tokens > 0
    tiny.check()


async def test_routes_need_the_role_they_name(tiny: RunningBackend, keys: KeyRing) -> None:
    admin_only = [("GET", "/v1/stats"), ("GET", "/metrics"), ("POST", "/v1/flush")]
    open_to_all = ["/healthz", "/readyz", "/version"]
    async with serving(tiny.backend, keys=keys) as (url, _), aiohttp.ClientSession() as session:

        async def status(method: str, path: str, key: str | None) -> int:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with session.request(method, url + path, headers=headers, json={}) as reply:
                return reply.status

        for method, path in admin_only:
            assert await status(method, path, None) == 401
            assert await status(method, path, "key-a") == 403
            assert await status(method, path, "key-ops") == 200
        for path in ("/v1/models", "/v1/tree", "/v1/nothing"):
            for wrong in ("wrong", "\udcff"):  # the latter is a byte that is no text
                assert await status("GET", path, wrong) == 401
        for path in open_to_all:
            assert await status("GET", path, None) == 200


async def test_without_keys_a_foreign_host_name_is_refused(tiny: RunningBackend) -> None:
    """A web page whose name was made to lead to this machine sends its own name as Host."""
    for sets, status in (((), 403), (("server.public_without_keys=true",), 200)):
        async with serving(tiny.backend, *sets) as (url, _), aiohttp.ClientSession() as session:
            for host, expected in (("evil.example", status), ("localhost:80", 200)):
                async with session.get(url + "/v1/models", headers={"Host": host}) as reply:
                    assert reply.status == expected


async def test_a_key_has_a_limited_number_of_places(tiny: RunningBackend, keys: KeyRing) -> None:
    async with serving(tiny.backend, "server.max_concurrent=1", keys=keys) as (url, edge):
        async with AsyncClient(url, "key-a", retries=0) as a, AsyncClient(url, "key-b") as b:
            stream = a.stream("x", max_tokens=200, ignore_eos=True)
            await anext(stream)
            with pytest.raises(ApiError) as caught:
                await a.complete("y", max_tokens=1)
            assert caught.value.status == 429
            await b.complete("y", max_tokens=1)
            await stream.aclose()  # type: ignore[attr-defined]
        assert edge.in_flight["team-a"] <= 1
