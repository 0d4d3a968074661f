"""Inputs and definitions of simt.h's words: what conformance.cu must give."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simt.problem import Array, decode, encode

Words = npt.NDArray[np.uint32]  # [blocks, 32 lanes, words]
BLOCKS = 64


class Op(NamedTuple):
    number: int
    num_in: int
    num_out: int


OPS = {
    "ldmatrix": Op(0, 4, 4),
    "ldmatrix_trans": Op(1, 4, 4),
    "shfl_xor": Op(2, 1, 5),
    "cp_async": Op(3, 8, 4),
    "pack_bf16": Op(4, 2, 1),
    "pack_f16": Op(5, 2, 1),
    "mma_bf16": Op(6, 10, 4),
    "mma_f16": Op(7, 10, 4),
    "exp2": Op(8, 1, 1),
    "once": Op(9, 4, 4),
    "reciprocal": Op(10, 1, 1),
}
EXACT = [n for n in OPS if n not in ("mma_bf16", "mma_f16", "exp2", "reciprocal")]


def inputs(name: str) -> Words:
    """Random bits; finite numbers of moderate size where the word computes."""
    rng = np.random.default_rng(OPS[name].number)
    shape = (BLOCKS, 32, OPS[name].num_in)
    if name in ("exp2", "reciprocal"):
        return (rng.standard_normal(shape) * 20).astype(np.float32).view(np.uint32)
    if name.startswith("mma"):
        dtype = {"mma_bf16": "bfloat16", "mma_f16": "float16"}[name]
        out = np.empty(shape, np.uint32)
        halves = encode(rng.standard_normal((*shape[:2], 12)), dtype)
        out[..., :6] = np.ascontiguousarray(halves).view(np.uint32)
        out[..., 6:] = rng.standard_normal((*shape[:2], 4)).astype(np.float32).view(np.uint32)
        return out
    return rng.integers(0, 1 << 32, shape, np.uint32)


def run(library: ctypes.CDLL, name: str, source: int, target: int, stream: int) -> None:
    """Words of simt.h at addresses the library can reach."""
    error = library.conformance(
        OPS[name].number, ctypes.c_void_p(source), ctypes.c_void_p(target), BLOCKS,
        ctypes.c_void_p(stream),
    )  # fmt: skip
    assert error == 0, f"CUDA error {error}"


def matrices(words: Words) -> Array:
    """[blocks, 4 matrices, 8 rows, 8 columns] as lanes hold their rows."""
    return np.ascontiguousarray(words).view(np.uint16).reshape(BLOCKS, 4, 8, 8)


def fragments(matrix: Array) -> Words:
    """[blocks, 4, 8, 8] as ldmatrix hands it out: lane l has row l / 4, columns 2 (l % 4), + 1."""
    pairs = np.ascontiguousarray(matrix).view(np.uint32).reshape(BLOCKS, 4, 32)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1))


def tile(registers: Words, dtype: str) -> npt.NDArray[np.float64]:
    """[blocks, 32, n] registers of n 8 x 8 tiles as [blocks, n, 8, 8] numbers."""
    item = np.float16 if dtype == "float16" else np.uint16
    pairs = np.ascontiguousarray(registers.transpose(0, 2, 1)).view(item)
    return decode(pairs.reshape(BLOCKS, -1, 8, 8), dtype)


def defined(name: str) -> Array:
    """What the word gives on `inputs`, from its definition: words, or float64 for numbers."""
    words = inputs(name)
    if name == "ldmatrix":
        return fragments(matrices(words))
    if name == "ldmatrix_trans":
        return fragments(matrices(words).swapaxes(2, 3))
    if name == "shfl_xor":
        return np.stack([words[:, np.arange(32) ^ (1 << i), 0] for i in range(5)], 2)
    if name == "cp_async":
        return np.where(words[:, :, 4:5] & 1, words[:, :, :4], 0)[:, np.arange(32) ^ 7]
    if name == "once":
        return words
    numbers = words.view(np.float32)
    if name == "exp2":
        return np.exp2(numbers.astype(np.float64))
    if name == "reciprocal":
        return 1 / numbers.astype(np.float64)
    if name.startswith("pack"):
        dtype = {"pack_bf16": "bfloat16", "pack_f16": "float16"}[name]
        with np.errstate(all="ignore"):
            halves = np.ascontiguousarray(encode(numbers, dtype)).view(np.uint16).copy()
        halves[np.isnan(numbers)] = 0x7FFF
        return halves.view(np.uint32)
    dtype = {"mma_bf16": "bfloat16", "mma_f16": "float16"}[name]
    a, b = tile(words[..., :4], dtype), tile(words[..., 4:6], dtype)
    left = np.block([[a[:, 0], a[:, 2]], [a[:, 1], a[:, 3]]])  # [blocks, 16, 16]
    right = np.concatenate([b[:, 0], b[:, 1]], 2).swapaxes(1, 2)  # b's registers hold columns
    product = (left @ right).reshape(BLOCKS, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4)
    return product.reshape(BLOCKS, 32, 4) + numbers[..., 6:]
