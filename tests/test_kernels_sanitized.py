"""The C kernels under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ["threads.c", "copy_cpu.c", "crc32c.c", *(f"attention_{x}.c" for x in
           ("cpu", "plain", "avx2", "avx512", "amx"))]  # fmt: skip
COMPILER = shutil.which("gcc") or shutil.which("cc")


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_kernels_are_clean_under(sanitizer: str, tmp_path: Path) -> None:
    driver = tmp_path / "driver"
    flags = ["-std=gnu11", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}"]
    flags += ["-fno-sanitize-recover=all"]
    files = [str(ROOT / "cuda" / name) for name in SOURCES]
    built = subprocess.run(
        [str(COMPILER), *flags, str(ROOT / "tests/kernels_driver.c"), *files, "-lm", "-o", driver],
        capture_output=True,
        text=True,
    )
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip("the compiler lacks this sanitizer's library")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(driver)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
