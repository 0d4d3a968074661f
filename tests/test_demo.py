"""The demonstration runs, and its pictures show what it tells."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from radixsvc.bench import demo


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    demo.run(parser.parse_args(options))
    return capsys.readouterr().out


def test_the_small_tree_shows_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    steps = re.split(r"^\d\. ", printed(capsys, "--no-model"), flags=re.MULTILINE)[1:]
    picture = {step.split("\n")[0]: " ".join(step.split()) for step in steps}
    assert "from cache 14, computed 3" in picture["Prefix match"]
    assert "11 of 14 tokens come from the cache" in picture["Edge split"]
    assert "[you are a kind and patient helper .] 8 tokens" in picture["Edge split"]
    assert "refs 2" in picture["Reference counts"]
    assert "[tree ? in two words] 5 tokens host 2" in picture["Demotion"]
    assert "12 tokens lie on the device and 4 on the host" in picture["Promotion"]
    assert "ghost, last on host" in picture["Eviction"]


def test_the_model_says_where_its_tokens_came_from(
    capsys: pytest.CaptureFixture[str], tiny_llama: Path
) -> None:
    out = printed(capsys, "--model", str(tiny_llama), "--prompt-tokens", "80")
    cells = [[cell.strip() for cell in line.split("|")] for line in out.splitlines()]
    rows = [(row[1], row[2:7]) for row in cells if len(row) > 7 and " ms" in row[7]]
    found = {title: [int(count) for count in counts] for title, counts in rows}
    assert found["cold"] == [80, 0, 0, 0, 80]
    assert found["follow-up turn"] == [108, 87, 0, 0, 21]
    again = [counts for title, counts in rows if title == "follow-up again"]
    assert int(again[0][2]) > 0, "from the host"
    assert int(again[1][3]) > 0, "from disk"
