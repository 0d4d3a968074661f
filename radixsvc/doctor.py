"""`radixsvc doctor`: what this machine and this build have, and what to do about the rest."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import torch

from radixsvc.checkpoint import available_memory
from radixsvc.fetch import default_cache_dir

FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")


def examine() -> list[tuple[str, str, str]]:
    """(mark, subject, finding); "!!" is what keeps the service from working, "--" a hint."""
    return [_extension(), _gpu(), _processor(), _memory(), _lock_limit(), _models()]


def _extension() -> tuple[str, str, str]:
    if importlib.util.find_spec("tiers._kernels") is None:
        return "!!", "extension", "not built: run pip install . where there is a C compiler"
    from radixsvc.attention import build_info

    built = build_info()
    cuda = built["cuda_archs"] or "left out (no nvcc when it was built)"
    return "ok", "extension", f"{built['compiler']}, {built['cpu_isa']} in use; CUDA: {cuda}"


def _gpu() -> tuple[str, str, str]:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(0)
        name = torch.cuda.get_device_name(0)
        return "ok", "gpu", f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if torch.version.cuda is None:
        return "--", "gpu", "this torch is a CPU build: install a CUDA build to use a GPU"
    return "--", "gpu", "none, or no driver: the model runs on the CPU"


def _processor() -> tuple[str, str, str]:
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.split())
                break
    found = ", ".join(name for name in FEATURES if name in flags) or "no known vector extension"
    cores = len(os.sched_getaffinity(0))
    dtype = "bfloat16" if flags & {"amx_bf16", "avx512_bf16"} else "float32"
    return "ok", "processor", f"{cores} cores, {found}; default dtype {dtype}"


def _memory() -> tuple[str, str, str]:
    free = available_memory()
    mark = "ok" if free > 2 << 30 else "!!"
    hint = "" if mark == "ok" else ": the default model needs 2 GiB"
    return mark, "memory", f"{free / 2**30:.1f} GiB available{hint}"


def _lock_limit() -> tuple[str, str, str]:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return "ok", "pinning", "no limit on locked memory"
    hint = "a pinned host tier needs ulimit -l unlimited (LimitMEMLOCK=infinity)"
    return "--", "pinning", f"{limit >> 20} MiB can be locked: {hint}"


def _models() -> tuple[str, str, str]:
    folder = default_cache_dir() / "models"
    names = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    root = folder
    while not root.exists():
        root = root.parent
    free = shutil.disk_usage(root).free / 2**30
    if not names:
        return "--", "models", f"{folder} is empty ({free:.1f} GiB free); radixsvc fetch fills it"
    return "ok", "models", f"{folder}: {', '.join(names)}; {free:.1f} GiB free"
