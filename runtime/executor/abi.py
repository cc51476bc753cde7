"""The C structs of a program library, as docs/bundle.md specifies them."""

from __future__ import annotations

import ctypes


class Model(ctypes.Structure):
    """`llmc_model`: what stays the same from step to step."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("arena", ctypes.c_void_p),
        ("kv_pool", ctypes.c_void_p),
        ("kv_slots", ctypes.c_void_p),
        ("max_tokens", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class StepArgs(ctypes.Structure):
    """`llmc_step_args`: one batch."""

    _fields_ = (
        ("phase", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("num_logit_rows", ctypes.c_int32),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("context_len", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("logit_rows", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slot_start", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    )
