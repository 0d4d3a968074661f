"""What the README shows works as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def test_the_library_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(example, {})
    assert "'a namespace'" in capsys.readouterr().out


def test_the_two_commands_stand_on_lines_of_their_own() -> None:
    """CI takes the second one from here."""
    commands = re.findall(r"^    (pip install .*)$", README, re.MULTILINE)
    assert [c.split(" && ")[1] for c in commands] == ["radixsvc serve", "pytest"]
