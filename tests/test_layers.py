"""The one direction of imports: radixsvc -> tiers -> tiers._kernels, edge -> core."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = "scheduler cache tree engine model attention sampler request stream errors fetch tokenizer"
MAY_IMPORT_KERNELS = {
    "tiers/copy.py",
    "tiers/cuda_copy.py",
    "radixsvc/attention.py",
    "radixsvc/fused.py",
    "radixsvc/node.py",
}


def imported_modules(path: Path) -> set[str]:
    """Full names of all modules a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_tiers_never_import_radixsvc() -> None:
    for path in (ROOT / "tiers").glob("*.py"):
        wrong = {n for n in imported_modules(path) if n.split(".")[0] in ("radixsvc", "aiohttp")}
        assert not wrong, f"{path.name} imports {wrong}"


@pytest.mark.parametrize("name", CORE.split())
def test_core_imports_no_edge(name: str) -> None:
    edge = "aiohttp uvloop msgpack radixsvc.service radixsvc.api_openai radixsvc.cli".split()
    wrong = imported_modules(ROOT / "radixsvc" / f"{name}.py") & set(edge)
    assert not wrong


def test_kernels_have_few_importers() -> None:
    for folder in ("tiers", "radixsvc"):
        for path in (ROOT / folder).glob("*.py"):
            if "tiers._kernels" in imported_modules(path):
                assert f"{folder}/{path.name}" in MAY_IMPORT_KERNELS, path


def test_cuda_python_is_not_hidden_by_our_folder() -> None:
    """`cuda/` beside the code must stay a folder without packages: cuda-python's name is `cuda`."""
    subprocess.run(
        [sys.executable, "-c", "import cuda.bindings.runtime"], cwd=ROOT, check=True, timeout=60
    )
    assert not list((ROOT / "cuda").rglob("__init__.py"))
