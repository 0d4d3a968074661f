"""Compiles the CUDA sources for the CPU, once a session and kind, and loads them with ctypes."""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CUDA = HERE.parent.parent / "cuda"
SANITIZERS = {
    "plain": ["-O2"],
    "address": ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-O1", "-g1", "-fsanitize=thread"],
}
FLAGS = ["-std=c++17", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]


def require_compiler() -> None:
    """Skip where the sources cannot be emulated."""
    if platform.machine() != "x86_64":
        pytest.skip("the emulation of CUDA threads switches stacks in x86-64 assembly")
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the CUDA sources for the CPU")


def compile_emulated(kind: str, folder: Path, *flags: str, sources: Path = CUDA) -> Path:
    """The shared library of `sources` under `kind` of SANITIZERS, in `folder`."""
    require_compiler()
    library = folder / f"emulated-{kind}.so"
    command = ["g++", *FLAGS, *SANITIZERS[kind], *flags, f"-I{sources}", f"-I{HERE}"]
    command += [str(HERE / "emulated.cpp"), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return library


@functools.cache
def emulated_library() -> ctypes.CDLL:
    """The kernels, all instances, without sanitizers."""
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(compile_emulated("plain", Path(folder))))


def sanitizer_environment(kind: str) -> dict[str, str]:
    """What a Python process needs to load a library built under `kind`; a skip without it."""
    require_compiler()
    if kind == "plain":
        return {}
    name = {"address": "libasan.so", "thread": "libtsan.so"}[kind]
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"g++ comes without {name}")
    options = {
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=99",
        "TSAN_OPTIONS": "exitcode=98:halt_on_error=1",
    }
    return {"LD_PRELOAD": found, **options}


def launcher(kind: str) -> list[str]:
    """What to start a process of `kind` with.

    ThreadSanitizer cannot place its shadow memory where addresses are randomised too widely.
    """
    fixed = ["setarch", "-R"]
    if kind != "thread" or shutil.which("setarch") is None:
        return []
    allowed = subprocess.run([*fixed, "true"], capture_output=True).returncode == 0
    return fixed if allowed else []
