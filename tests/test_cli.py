"""The command line as its users see it: output, JSON, and exit status."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import RunningBackend, serving

from radixsvc import bench
from radixsvc.cli import BENCHES, main


@pytest.fixture(scope="module")
def url(tiny_llama: Path) -> Iterator[str]:
    """A service on a thread with a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    with RunningBackend(tiny_llama) as running:
        thread.start()
        context = serving(running.backend)
        address, _ = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(30)
        yield address
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_generate_then_explain_then_stats(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "The cat sleeps", "--max-tokens", "3", "--url", url]) == 0
    assert capsys.readouterr().out.strip("\n")
    assert main(["generate", "The cat sleeps", "--max-tokens", "3", "--json", "--url", url]) == 0
    usage = json.loads(capsys.readouterr().out)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert main(["warm", "The cat", "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] > 0
    assert main(["explain", "The cat eats", "--url", url]) == 0
    assert "prompt tokens are cached" in capsys.readouterr().out
    assert main(["stats", "--url", url]) == 0
    assert "engine.sources.device" in capsys.readouterr().out
    assert main(["tree", "--url", url]) == 0
    assert "tokens" in capsys.readouterr().out


def test_chat_tells_what_came_from_the_cache(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\n\nAnd Italy?\n"))
    assert main(["chat", "--url", url, "--max-tokens", "4", "--system", "Be brief."]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "first token" in line]
    assert len(lines) == 2
    assert " 0 of " in lines[0]
    assert " 0 of " not in lines[1]


def test_nobody_there_is_69(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--url", "http://127.0.0.1:9"]) == 69
    assert "no service answers at 127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n\r\n{}"])
def test_somebody_else_there_is_69(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with listener.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=run)
        thread.start()
        assert main(["stats", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}"]) == 69
        thread.join()
    assert "is it a radixsvc service?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["generate"],
        ["serve", "--no-such"],
        ["simulate", "--disk=5"],
        ["simulate", "--disk=5%"],
        ["bench", "tree", "--page-size=0"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "nonsense"], "bench NAME"),
        (["stats", "--url", "nonsense"], "write it as http://127.0.0.1:8011"),
        (["stats", "--url", "ftp://x"], "write it as http://127.0.0.1:8011"),
        (["generate", "@/nowhere"], "No such file"),
        (["simulate", "--policies", "magic"], "magic"),
        (["simulate", "--trace", "nowhere.jsonl"], "nowhere"),
        (["simulate", "--sessions", "0"], "no requests"),
    ],
)
def test_what_the_parser_lets_through_is_2_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_every_benchmark_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(bench.__file__).parent
    runnable = [f.stem for f in folder.glob("*.py") if "\ndef run(" in f.read_text()]
    assert sorted([*BENCHES, "demo", "simulate"]) == sorted(runnable)
    assert main(["bench", "--help"]) == 0
    assert "tiered" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["bench", "tree", "--help"])
    assert caught.value.code == 0
    assert "--page-size" in capsys.readouterr().out


def test_print_config_has_origins_and_capacity(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(tiny_llama), "--set", "tiers.device.size=1MiB", "--dtype", "float32"]
    assert main(["print-config", *options]) == 0
    out = capsys.readouterr().out
    assert "tiers.device.size" in out
    assert "--set" in out
    assert "default" in out
    assert "device: 0.00 GiB (1MiB)" in out
    assert main(["print-config", "--json", *options]) == 0
    settings = json.loads(capsys.readouterr().out)
    assert settings["tiers.device.size"] == {"value": "1MiB", "origin": "--set"}
    assert settings["server.port"] == {"value": 8011, "origin": "default"}
    assert main(["print-config", *options[:2], "--set", "tiers.device.size=1KiB"]) == 78
    assert "at least 8 are needed" in capsys.readouterr().err


def test_check_config_is_0_or_78(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text("[server]\nport = 1\n")
    assert main(["check-config", "--config", str(tmp_path / "c.toml")]) == 0
    (tmp_path / "c.toml").write_text("[server]\nprot = 1\n")
    assert main(["check-config", "--config", str(tmp_path / "c.toml")]) == 78
    assert "did you mean server.port" in capsys.readouterr().err


def test_doctor_and_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for subject in ("extension", "gpu", "processor", "memory", "pinning", "models"):
        assert subject in out
    (tmp_path / "radixsvc").touch()  # where a folder should be
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["extension"]["mark"], found["models"]["mark"]) == ("ok", "!!")
    assert main(["version"]) == 0
    assert capsys.readouterr().out[0].isdigit()
