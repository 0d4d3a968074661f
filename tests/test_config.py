"""Where values come from, what they may be, and what an error says."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixsvc.config import Config, Size, entries, load
from radixsvc.errors import SetupError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def test_later_sources_win_and_are_named(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[server]\nport = 1\n[tiers.host]\nsize = "1GiB"\n[model]\nname = "m"\n')
    environ = {"RADIXSVC_SERVER__PORT": "2", "RADIXSVC_TIERS__HOST__SIZE": "2GiB", "PATH": "x"}
    config, origins = load(str(file), environ, ["server.port=3"])
    assert (config.server.port, config.model.name) == (3, "m")
    assert config.tiers.host.size.resolve(0) == 2 << 30
    assert origins["server.port"] == "--set"
    assert origins["tiers.host.size"] == "env RADIXSVC_TIERS__HOST__SIZE"
    assert origins["model.name"] == str(file)
    assert "server.host" not in origins


def test_a_quoted_name_may_hold_dots(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[quotas."team.a"]\ndevice = "10%"\n')
    config, origins = load(str(file))
    assert config.quotas["team.a"].device.resolve(100) == 10
    assert origins == {"quotas.team.a.device": str(file)}


def test_sizes_have_units_or_are_shares() -> None:
    assert Size("24GiB").resolve(1) == 24 << 30
    assert Size("1.5 kb").resolve(1) == 1500
    assert Size("80%").resolve(1000) == 800
    for wrong in ("24", 24, "", "101%", "3 parsecs", "-1GiB", "GiB", "1e3MiB"):
        with pytest.raises(ValueError, match="unit"):
            Size(wrong)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("tiers.host.siz=1GiB", "tiers.host.siz: there is no such key; did you mean tiers.host"),
        ("serverport=1", "did you mean server.port"),
        ("prompts.a.txt=x", "did you mean prompts.NAME.text"),
        ("tiers.host.size=24", "tiers.host.size: a size needs its unit"),
        ("server.port=66000", "server.port: Expected `int` <= 65535"),
        ("server.port=-1", "server.port: Expected `int` >= 0"),
        ("server.read_seconds=nan", "server.read_seconds"),
        ("model.dtype=int3", "model.dtype: Invalid enum value 'int3'"),
        ("tiers.host=1GiB", "tiers.host: Expected"),
        ("tiers.disk.size=1GiB", "tiers.disk.path has to name a folder"),
        ("prompts.a.system=true", "prompts.a needs either text or file"),
        ("log.level", "write KEY=VALUE"),
    ],
)
def test_a_wrong_setting_is_refused_in_words(setting: str, words: str) -> None:
    with pytest.raises(SetupError) as caught:
        load(sets=[setting])
    assert words in str(caught.value)
    assert caught.value.exit_code == 78


def test_the_origin_of_a_wrong_value_is_named(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[server]\nport = 1\n")
    with pytest.raises(SetupError, match=r"^env RADIXSVC_SERVER__PORT: server\.port"):
        load(str(file), {"RADIXSVC_SERVER__PORT": "many"})


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="No such file"):
        load(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("= 1")
    with pytest.raises(SetupError, match="not TOML"):
        load(str(tmp_path / "bad.toml"))


def test_every_key_can_be_listed_and_set() -> None:
    listed = dict(entries(load(sets=["prompts.a.text=hello"]).config))
    assert listed["prompts.a.text"] == "hello"
    for path, value in entries(Config()):
        if not isinstance(value, bool) and path != "tiers.disk.size":
            load(sets=[f"{path}={value}"])


SHIPPED = sorted({*CONFIGS.glob("*.toml")} - {*CONFIGS.glob("workload-*")})  # those are benchmarks'


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_are_right(file: Path) -> None:
    load(str(file))
