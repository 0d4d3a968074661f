"""The structs of cuda/kernels.h for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p


class Plan(ctypes.Structure):
    _fields_ = (
        ("words", c_void_p),
        ("num_words", c_int64),
        ("num_decode", c_int32),
        ("num_shared", c_int32),
        ("num_prefill", c_int32),
        ("num_partials", c_int64),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("num_seqs", c_int32),
        ("num_tokens", c_int32),
        ("page_size", c_int32),
        ("cu_seqlens_q", c_void_p),
        ("kv_lens", c_void_p),
        ("page_indptr", c_void_p),
        ("pages", c_void_p),
        ("num_groups", c_int32),
        ("group_indptr", c_void_p),
        ("group_seqs", c_void_p),
        ("group_lens", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("plan", Plan),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("dtype", c_int32),
        ("q_heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("pool", c_void_p),
        ("page_stride", c_int64),
        ("layer_offset", c_int64),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("q_stride", c_int64),
        ("q_head_stride", c_int64),
        ("k_stride", c_int64),
        ("k_head_stride", c_int64),
        ("v_stride", c_int64),
        ("v_head_stride", c_int64),
        ("out_stride", c_int64),
        ("out_head_stride", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int32),
        ("sinks", c_void_p),
    )


class Copy(ctypes.Structure):
    _fields_ = (
        ("src", c_void_p),
        ("dst", c_void_p),
        ("src_stride", c_int64),
        ("dst_stride", c_int64),
        ("nbytes", c_int64),
        ("src_ids", c_void_p),
        ("dst_ids", c_void_p),
        ("num_pages", c_int64),
    )


# The order of the bindings' arguments (tiers/_kernels.pyi).
DEVICE_FIELDS = "num_seqs num_tokens page_size cu_seqlens_q kv_lens page_indptr pages".split()
HOST_FIELDS = [*DEVICE_FIELDS, *"num_groups group_indptr group_seqs group_lens".split()]
LAYER_FIELDS = (
    "dtype q_heads kv_heads head_dim pool page_stride layer_offset q q_stride q_head_stride "
    "k k_stride k_head_stride v v_stride v_head_stride out out_stride out_head_stride "
    "scale softcap window sinks"
).split()
COPY_FIELDS = ("src src_stride src_ids dst dst_stride dst_ids num_pages nbytes").split()
