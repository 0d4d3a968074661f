"""Faults put into copies of the CUDA sources, each switched on at run time, and who notices.

The sources themselves know nothing of it: `inject` replaces one spot of a copy by
`FAULT(n) ? broken : right`. Run as a program, this file tries every fault on a library built so
and prints, as JSON, which run caught it. A fault that nothing notices is a hole in the harness.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from simt.cases import COVERING, WHOLE_MATRIX
from simt.problem import TOLERANCE, Array, Problem, expected, pool_after
from simt.run import FORWARD, RANDOM, REVERSE, Emulated, prepare
from simt.structs import Copy

SECONDS = 900 if WHOLE_MATRIX else 60  # a run that takes longer hangs

# Quick to compile: bfloat16 with head_dim 64. The whole matrix takes all instances.
INSTANCES = () if WHOLE_MATRIX else ("-DRX_ONE_INSTANCE",)
PROBLEMS = (
    Problem((1, 37, 1, 0, 70), (1, 37, 300, 20, 133), padding=2, sinks=True, page_size=8),
    Problem((1, 70), (600, 133), window=21),
    Problem((1,) * 5, (769, 800, 770, 771, 900), 12, 6, groups=(((0, 1, 2, 3, 4), 768),)),
)
NO_FAULT = -1
FAR_PAGES = Problem((1, 40), (70, 90), page_stride=1 << 28)
# Order of threads, late copies. Sanitizers are slow and need one order only.
RUNS = {
    "plain": ((RANDOM, True), (FORWARD, True), (REVERSE, True), (RANDOM, False)),
    "address": ((RANDOM, True),),
    "thread": ((RANDOM, True),),
}


class Fault(NamedTuple):
    file: str
    right: str
    broken: str  # FAULT is true while the fault is on


def unless(statement: str) -> str:
    """The statement left out while the fault is on."""
    return f"if (!FAULT) {{ {statement} }}"


def instead(right: str, broken: str) -> str:
    return f"(FAULT ? ({broken}) : ({right}))"


TILE, DECODE, PREFILL = "attention.cuh", "decode.cu", "prefill.cu"
SYNC = "Team<WARPS>::sync();"
# The values come out right, on a CPU: only a sanitizer sees these.
BY_SANITIZER = {"page ids read past their list": "address", "a word of two writers": "thread"}
FAULTS = {
    "page ids read past their list": Fault(
        TILE,
        "page[i] = position < end ?",
        "if (FAULT) page[i] = c.pages[position >> c.page_shift]; page[i] = position < end ?",
    ),
    "a word of two writers": Fault(DECODE, "if (lane % 4 == 0)", "if (FAULT || lane % 4 == 0)"),
    "missing __syncwarp": Fault(TILE, "__syncwarp();", unless("__syncwarp();")),
    "missing __syncthreads": Fault(TILE, "__syncthreads();", unless("__syncthreads();")),
    "stage refilled while it is read": Fault(
        TILE, f"{SYNC}  // the stage", f"{unless(SYNC)}  // the stage"
    ),
    "tiles reused too early": Fault(TILE, f"{SYNC}  // tiles", f"{unless(SYNC)}  // tiles"),
    "missing wait": Fault(TILE, "cp_async_wait<0>();", unless("cp_async_wait<0>();")),
    "wait for all but one": Fault(
        TILE, "cp_async_wait<0>();", "if (FAULT) cp_async_wait<1>(); else cp_async_wait<0>();"
    ),
    "missing commit": Fault(TILE, "cp_async_commit();", unless("cp_async_commit();")),
    "wrong stage filled": Fault(TILE, "stage ^ 1, c", instead("stage ^ 1", "stage") + ", c"),
    "shared memory overrun": Fault(
        TILE, "&tiles.v[stage][row][dim]", "&tiles.v[stage][FAULT ? row + KEYS : row][dim]"
    ),
    "page of a row that is none": Fault(TILE, "valid = begin +", "valid = FAULT || begin +"),
    "values of unwritten slots": Fault(
        TILE, "row < end;", "row < (FAULT ? (end + 7) / 8 * 8 : end);"
    ),
    "page offset in 32 bits": Fault(
        TILE,
        "(uint64_t)page[i] * c.page_bytes",
        instead("(uint64_t)page[i] * c.page_bytes", "page[i] * c.page_bytes"),
    ),
    "causal mask off by one": Fault(
        TILE, "position > rows[r].last)", "position > rows[r].last + (FAULT ? 1 : 0))"
    ),
    "window off by one": Fault(
        TILE, "position - a.layer.window + 1", "position - a.layer.window + (FAULT ? 0 : 1)"
    ),
    "rows that see nothing": Fault(
        TILE, "max == NEG_INF ? 0 : max", "max == NEG_INF && !FAULT ? 0 : max"
    ),
    "sums not scaled to the new maximum": Fault(
        TILE, "sums.out[i][2 * r] *= shrink;", unless("sums.out[i][2 * r] *= shrink;")
    ),
    "divergent collective": Fault(
        DECODE,
        "const float sum = quad_sum(sums.sum[r]);",
        "if (FAULT && row >= num_rows) continue; const float sum = quad_sum(sums.sum[r]);",
    ),
    "split runs past the context": Fault(
        DECODE,
        "first_seen < (split + 1) * RX_SPLIT ?",
        "!FAULT && first_seen < (split + 1) * RX_SPLIT ?",
    ),
    "merge reads before it is written": Fault(
        DECODE,
        "__syncthreads();\n    if (threadIdx.x < D / 2)",
        unless("__syncthreads();") + "\n    if (threadIdx.x < D / 2)",
    ),
    "splits outside the window merged": Fault(
        DECODE, "begin = span.first / RX_SPLIT", "begin = FAULT ? 0 : span.first / RX_SPLIT"
    ),
    "splits added without their weights": Fault(
        DECODE, "weight * partial[", instead("weight", "1.0f") + " * partial["
    ),
    "sequences of a group mixed up": Fault(
        DECODE,
        "a.batch.cu_seqlens_q[members[member]]",
        "a.batch.cu_seqlens_q[members[FAULT ? 0 : member]]",
    ),
    "grid stride too short": Fault(
        DECODE, "tile += gridDim.x)", "tile += FAULT ? gridDim.x + 1 : gridDim.x)"
    ),
    "barrier that some threads never reach": Fault(
        PREFILL,
        "if (first_row >= num_rows) return;",
        "if (first_row + (FAULT ? (int)threadIdx.x / 2 : 0) >= num_rows) return;",
    ),
    "sink left out": Fault(PREFILL, "if (a.layer.sinks)", "if (a.layer.sinks && !FAULT)"),
    "padded rows appended": Fault(
        "append.cu", "if (seq < 0) return;", unless("if (seq < 0) return;")
    ),
    "misaligned access": Fault(
        "page_copy.cu", "copy.src_stride + within", "copy.src_stride + within + (FAULT ? 8 : 0)"
    ),
    "id list overrun": Fault(
        "page_copy.cu",
        "if (first >= num_chunks) continue;",
        unless("if (first >= num_chunks) continue;"),
    ),
    "more blocks in y than a grid may have": Fault(
        "launch.cuh",
        "return error_text(cudaGetLastError());",
        "if (FAULT) SIMT_LAUNCH(kernel, dim3(1, 65536), dim3(32), shared, stream, args...);"
        " return error_text(cudaGetLastError());",
    ),
}


def inject(sources: Path, folder: Path) -> Path:
    """A copy of `sources` with every fault in it, all switched off."""
    copy = folder / "cuda"
    shutil.copytree(sources, copy)
    switch = "\n#if !defined(__CUDACC__)\ninline int simt_fault = -1;\n#endif\n"
    header = copy / "simt.h"
    header.write_text(
        header.read_text().replace("#include <stdint.h>\n", f"#include <stdint.h>\n{switch}")
    )
    for number, (name, fault) in enumerate(FAULTS.items()):
        path = copy / fault.file
        text = path.read_text()
        if text.count(fault.right) != 1:
            raise AssertionError(f"{name}: {text.count(fault.right)} places in {fault.file}")
        path.write_text(
            text.replace(fault.right, fault.broken.replace("FAULT", f"(simt_fault == {number})"))
        )
    with (copy / "page_copy.cu").open("a") as file:
        file.write('extern "C" void simt_set_fault(int fault) { simt_fault = fault; }\n')
    return copy


def same_bytes(one: Array, other: Array) -> bool:
    return np.array_equal(one.view(np.uint8), other.view(np.uint8))


def attention_is_right(emulated: Emulated, p: Problem, kind: str) -> bool:
    arrays = p.arrays()
    if kind == "address":  # its red zone has to follow the list at once
        arrays.pages = arrays.pages[: arrays.page_indptr[-1]].copy()
    wanted = pool_after(arrays) if not p.page_stride else None
    call = prepare(emulated, arrays)
    call.batch.plan.num_decode += p.padding  # as a captured graph would launch it
    if emulated.attention(call.layer, call.batch):
        return False
    num_tokens = sum(p.q_lens)
    error = np.abs(call.result(emulated)[:num_tokens] - expected(arrays)[:num_tokens])
    near = not np.isnan(error).any() and error.max() < TOLERANCE[p.dtype]
    return near and (wanted is None or same_bytes(arrays.pool, wanted))


def copy_is_right(emulated: Emulated) -> bool:
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 256, (2, 40, 4096), np.uint8)
    # Behind the ids stands one that leads far away.
    ids = np.full((2, 4096 * 8), 1 << 30, np.int32)
    ids[:, :30] = rng.permutation(40)[:30], rng.permutation(40)[:30]
    wanted = dst.copy()
    wanted[ids[1, :30]] = src[ids[0, :30]]
    copy = Copy(
        src=src.ctypes.data, dst=dst.ctypes.data, src_stride=4096, dst_stride=4096, nbytes=4096,
        src_ids=ids[0].ctypes.data, dst_ids=ids[1].ctypes.data, num_pages=30,
    )  # fmt: skip
    return emulated.copy(copy, 1) is None and np.array_equal(dst, wanted)


def all_is_right(emulated: Emulated, kind: str, fault: int) -> bool:
    problems = [*PROBLEMS, FAR_PAGES] if kind == "plain" else [*PROBLEMS]
    if WHOLE_MATRIX and fault == NO_FAULT:
        problems += COVERING.values()
    return copy_is_right(emulated) and all(attention_is_right(emulated, p, kind) for p in problems)


def verdict(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    names = {
        0: "",
        1: "wrong result",
        97: "emulator",
        98: "ThreadSanitizer",
        99: "AddressSanitizer",
    }
    code = os.WEXITSTATUS(status)
    return names.get(code, f"status {code}")


def run_forked(library: ctypes.CDLL, kind: str, fault: int, order: int, late: bool) -> str:
    """What noticed the fault in a process of its own; "" for nothing."""
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        library.simt_set_fault(fault)
        emulated = Emulated(library)
        emulated.configure(order, late, num_sms=1)
        os._exit(0 if all_is_right(emulated, kind, fault) else 1)
    return verdict(os.waitpid(child, 0)[1])


def main(kind: str, path: str, *names: str) -> None:
    """Try the faults `names`, or none with no name; each until a run of `kind` notices."""
    library = ctypes.CDLL(path)
    numbers = list(FAULTS)
    noticed = {}
    for name in names or ("",):
        for order, late in RUNS[kind]:
            fault = numbers.index(name) if name else NO_FAULT
            noticed[name] = run_forked(library, kind, fault, order, late)
            if noticed[name]:
                break
    print(json.dumps(noticed))


if __name__ == "__main__":
    main(*sys.argv[1:])
