"""`radixsvc doctor`: what this machine and this build have, and what to do about the rest."""

from __future__ import annotations

import importlib.util
import os
import resource
from collections.abc import Iterator

import torch

from radixsvc.architecture import resolve_dtype
from radixsvc.checkpoint import available_memory, disk_space
from radixsvc.fetch import default_cache_dir

GIB = 2**30
MODEL_BYTES = 2 * GIB  # what the default model and a small cache take
MODEL_DISK = 600 << 20  # bytes while it is downloaded and converted


def examine() -> Iterator[tuple[str, str, str]]:
    """(mark, subject, finding); "!!" is what keeps the service from working, "--" a hint."""
    if importlib.util.find_spec("tiers._kernels") is None:
        yield "!!", "extension", "not built: run pip install . where there is a C compiler"
    else:
        from radixsvc.attention import build_info

        built = build_info()
        cuda = built["cuda_archs"] or "left out (no nvcc when it was built)"
        found = f"compiler {built['compiler']}, {built['cpu_isa']} in use; CUDA: {cuda}"
        yield "ok", "extension", found

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(0)
        name = torch.cuda.get_device_name(0)
        yield "ok", "gpu", f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    elif torch.version.cuda is None:
        yield "--", "gpu", "this torch is a CPU build: install a CUDA build to use a GPU"
    else:
        yield "--", "gpu", "none, or no driver: the model runs on the CPU"

    dtype = resolve_dtype(None, torch.device("cpu"))
    cores = len(os.sched_getaffinity(0))
    yield "ok", "processor", f"{cores} cores to use; default dtype {dtype}"

    memory = available_memory()
    if memory > MODEL_BYTES:
        yield "ok", "memory", f"{memory / GIB:.1f} GiB available"
    else:
        yield "!!", "memory", f"{memory / GIB:.1f} GiB available: the default model needs 2 GiB"

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        yield "ok", "pinning", "no limit on locked memory"
    else:
        hint = "a pinned host tier needs ulimit -l unlimited (LimitMEMLOCK=infinity)"
        yield "--", "pinning", f"{limit >> 20} MiB can be locked: {hint}"

    folder = default_cache_dir() / "models"
    names = ", ".join(sorted(path.name for path in folder.glob("*/")))
    room = disk_space(folder)
    home = next(path for path in (folder, *folder.parents) if path.exists())
    if names:
        mark, found = "ok", names
    elif os.access(home, os.W_OK | os.X_OK) and room > MODEL_DISK:
        mark, found = "--", "none yet; radixsvc fetch gets the default one"
    else:
        mark, found = "!!", "none, and no room for one: set XDG_CACHE_HOME to another folder"
    yield mark, "models", f"{folder}: {found}; {room / GIB:.1f} GiB free"
