"""What nvcc makes of the CUDA sources: registers, spills, and the instructions that were meant."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from simt.build import CUDA

ARCHS = os.environ.get("RADIXSVC_CUDA_ARCHS", "80 90").split()
MAX_REGISTERS = 255


@pytest.fixture(scope="module", params=["decode", "prefill"])
def compiled(request, tmp_path_factory):
    """A source's machine code, all instances, and what ptxas says of it."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    if ARCHS == ["none"]:
        pytest.skip("RADIXSVC_CUDA_ARCHS is none")
    target = tmp_path_factory.mktemp("cuda") / f"{request.param}.fatbin"
    command = ["nvcc", "-std=c++17", "-O3", "-fatbin", "--threads", "2", "-Xptxas", "-v"]
    for arch in ARCHS:
        command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    source = CUDA / f"{request.param}.cu"
    done = subprocess.run(
        [*command, str(source), "-o", str(target)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target, done.stderr


def test_no_instance_spills(compiled):
    report = compiled[1]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert len(spills) == len(registers) >= 8 * len(ARCHS)
    assert set(spills) == {("0", "0")}
    assert max(registers) <= MAX_REGISTERS


def find_cuobjdump() -> Path | None:
    """The toolkit's, or that of PyPI's nvidia-cuda-cuobjdump; both need nvdisasm beside them."""
    if shutil.which("nvdisasm") is None:
        return None
    found = shutil.which("cuobjdump")
    return Path(found) if found else None


def test_matrices_and_copies_are_single_instructions(compiled):
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("no cuobjdump and nvdisasm on PATH")
    code = subprocess.run(
        [cuobjdump, "-sass", compiled[0]], capture_output=True, text=True, check=True
    ).stdout
    for instruction in (
        "HMMA.16816.F32.BF16",
        "HMMA.16816.F32 ",
        "LDSM.16.M88.4",
        "LDSM.16.MT88.4",
        "LDGSTS.E.BYPASS.128",
    ):
        assert instruction in code
    assert not re.search(r"\b(STL|LDL)\b", code)  # nothing in local memory
