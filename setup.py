"""Builds `tiers._kernels`, one abi3 extension, from `cuda/`. Everything else is in pyproject.toml.

The C files always build and need only a C compiler. The `.cu` files join them where nvcc is found
(CUDA_HOME, then PATH). Neither torch nor a GPU is needed. Environment:

    CUDA_HOME             the toolkit's folder
    RADIXSVC_CUDA_ARCHS   compute capabilities, "80 90" by default, the last also as PTX;
                          "none" leaves CUDA out
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, PlatformError

SOURCES = Path("cuda")
DEFAULT_ARCHS = "80 90"
# Without these the object file needs libstdc++, which the C link does not bring.
NO_LIBSTDCXX = "-fno-exceptions,-fno-rtti,-fno-threadsafe-statics"


def cuda_archs() -> list[str]:
    """Compute capabilities to build for; empty where CUDA is not wanted."""
    wanted = os.environ.get("RADIXSVC_CUDA_ARCHS", DEFAULT_ARCHS)
    archs = wanted.replace(",", " ").replace(";", " ").split()
    if archs == ["none"]:
        return []
    if not archs or not all(arch.rstrip("af").isdigit() for arch in archs):
        sys.exit(f'RADIXSVC_CUDA_ARCHS is {wanted!r}; it takes "none" or numbers such as "80 90".')
    return archs


def find_toolkit() -> Path | None:
    """The CUDA toolkit's folder: $CUDA_HOME, else the one that holds the nvcc on PATH."""
    home = os.environ.get("CUDA_HOME")
    if home:
        return Path(home) if (Path(home) / "bin" / "nvcc").exists() else None
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    for folder in (Path(nvcc).resolve().parent.parent, Path("/usr/local/cuda")):
        if (folder / "include" / "cuda_runtime_api.h").exists():
            return folder
    return None


def libraries_of(toolkit: Path) -> Path:
    """The folder with libcudart_static.a."""
    for name in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (toolkit / name / "libcudart_static.a").exists():
            return toolkit / name
    sys.exit(f"No libcudart_static.a under {toolkit}. Set RADIXSVC_CUDA_ARCHS=none to do without.")


class BuildKernels(build_ext):
    """Compiles the `.cu` files with nvcc, then lets setuptools compile and link the C files."""

    def build_extension(self, ext: Extension) -> None:
        archs = cuda_archs()
        toolkit = find_toolkit() if archs else None
        cuda_sources = sorted(SOURCES.glob("*.cu"))
        if toolkit and cuda_sources:
            self.add_cuda(ext, toolkit, archs, cuda_sources)
            print(f"radixsvc: building the CUDA kernels for {' '.join(archs)} with {toolkit}")
        else:
            why = "no nvcc found" if archs else "RADIXSVC_CUDA_ARCHS is none"
            print(f"radixsvc: building without CUDA ({why}); the C kernels serve the CPU")
        try:
            super().build_extension(ext)
        except (CCompilerError, PlatformError, FileNotFoundError) as error:
            compiler = (os.environ.get("CC") or "cc").split()[0]
            if shutil.which(compiler) or shutil.which("gcc"):
                raise
            sys.exit(
                "radixsvc needs a C compiler to build its kernels and none was found "
                f"({error}). On Debian or Ubuntu: apt-get install gcc libc6-dev"
            )

    def copy_extensions_to_source(self) -> None:
        """In place: a process that has the old file mapped keeps it; overwriting would kill it."""
        for ext in self.extensions:
            Path(ext.name.replace(".", "/")).parent.joinpath(
                self.get_ext_filename(ext.name.rpartition(".")[2])
            ).unlink(missing_ok=True)
        super().copy_extensions_to_source()

    def add_cuda(
        self, ext: Extension, toolkit: Path, archs: list[str], sources: list[Path]
    ) -> None:
        flags = ["-std=c++17", "-O3", "-lineinfo", "-Wno-deprecated-gpu-targets"]
        flags += ["-Xcompiler", f"-fPIC,-fvisibility=hidden,{NO_LIBSTDCXX}"]
        for arch in archs:
            flags += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
        flags += ["-gencode", f"arch=compute_{archs[-1]},code=compute_{archs[-1]}"]
        folder = Path(self.build_temp) / f"sm_{'_'.join(archs)}"
        folder.mkdir(parents=True, exist_ok=True)
        newest_header = max(path.stat().st_mtime for path in SOURCES.glob("*.*h"))
        for source in sources:
            target = folder / f"{source.name}.o"
            newest = max(source.stat().st_mtime, newest_header)
            if self.force or not target.exists() or target.stat().st_mtime < newest:
                command = [str(toolkit / "bin" / "nvcc"), *flags, "-c", str(source)]
                subprocess.run([*command, "-o", str(target)], check=True)
            ext.extra_objects.append(str(target))
        ext.define_macros.append(("RX_CUDA_ARCHS", f'"{" ".join(archs)}"'))
        ext.include_dirs.append(str(toolkit / "include"))
        ext.extra_link_args += [f"-L{libraries_of(toolkit)}", "-lcudart_static", "-ldl", "-lrt"]


setup(
    ext_modules=[
        Extension(
            "tiers._kernels",
            sources=[str(path) for path in sorted(SOURCES.glob("*.c"))],
            depends=[str(path) for path in sorted(SOURCES.iterdir()) if path.suffix != ".c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread", "-Wl,--exclude-libs,ALL"],
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
