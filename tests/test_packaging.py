"""What `setup.py` builds, and the sentences it ends with where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiers import _kernels

ROOT = Path(__file__).parent.parent


def build(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`setup.py build_ext` into `tmp_path`."""
    folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *folders],
        cwd=ROOT,
        env={**os.environ, "RADIXSVC_CUDA_ARCHS": "none", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="no README.md for the metadata")
def test_no_compiler_is_a_sentence_and_no_traceback(tmp_path: Path) -> None:
    done = build(tmp_path, PATH=str(tmp_path), CC="no-such-cc")
    assert done.returncode == 1
    assert "radixsvc needs a C compiler" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="no README.md for the metadata")
def test_an_unknown_cuda_architecture_is_named(tmp_path: Path) -> None:
    done = build(tmp_path, RADIXSVC_CUDA_ARCHS="hopper")
    assert done.returncode == 1
    assert "RADIXSVC_CUDA_ARCHS is 'hopper'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_extension_serves_every_python_and_works_away_from_its_sources(tmp_path: Path) -> None:
    built = Path(_kernels.__file__)
    assert built.name == "_kernels.abi3.so"
    (tmp_path / "tiers").mkdir()
    shutil.copy(built, tmp_path / "tiers")
    done = subprocess.run(
        [sys.executable, "-c", "from tiers import _kernels; print(_kernels.build_info())"],
        cwd="/",
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert "cpu_isa" in done.stdout, done.stderr
