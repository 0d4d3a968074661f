"""Sanitizers find nothing in the CUDA kernels, and the harness catches every injected fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simt.build import (
    CUDA,
    compile_emulated,
    launcher,
    require_compiler,
    sanitizer_environment,
)
from simt.faults import BY_SANITIZER, FAULTS, INSTANCES, SECONDS, inject

TESTS = Path(__file__).parent


class Faulty:
    """The sources with all faults in them, compiled once a kind."""

    def __init__(self, folder: Path) -> None:
        require_compiler()
        self.folder = folder
        self.sources = inject(CUDA, folder)
        self.libraries: dict[str, Path] = {}

    def run(self, kind: str, *faults: str) -> dict[str, str]:
        """Who noticed each fault ("" for nobody); without faults, what the kernels alone give."""
        environment = sanitizer_environment(kind)
        if kind not in self.libraries:
            self.libraries[kind] = compile_emulated(
                kind, self.folder, *INSTANCES, sources=self.sources
            )
        library = str(self.libraries[kind])
        done = subprocess.run(
            [*launcher(kind), sys.executable, "-m", "simt.faults", kind, library, *faults],
            cwd=TESTS,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=SECONDS * 4,
        )
        if "unexpected memory mapping" in done.stderr:
            pytest.skip("ThreadSanitizer cannot run under this kernel's address layout")
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    return Faulty(tmp_path_factory.mktemp("faulty"))


@pytest.fixture(scope="module")
def noticed(faulty):
    """Who noticed each fault that needs no sanitizer, all tried in one process."""
    return faulty.run("plain", *(name for name in FAULTS if name not in BY_SANITIZER))


@pytest.mark.parametrize("kind", ["plain", "address", "thread"])
def test_the_kernels_alone_pass(faulty, kind):
    assert faulty.run(kind) == {"": ""}


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in BY_SANITIZER])
def test_fault_is_caught(noticed, name):
    assert noticed[name] != ""


@pytest.mark.parametrize("name", BY_SANITIZER)
def test_fault_is_caught_by_a_sanitizer_alone(faulty, name):
    assert faulty.run("plain", name) == {name: ""}
    wanted = {"address": "AddressSanitizer", "thread": "ThreadSanitizer"}[BY_SANITIZER[name]]
    assert faulty.run(BY_SANITIZER[name], name) == {name: wanted}
