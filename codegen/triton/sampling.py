"""The kernel that picks tokens: temperature, min-p, top-k and top-p of each row, without sorting, and a counter-based draw."""

from __future__ import annotations

from ...errors import TargetError
from .kernel import ONE, Extent, Kernel, Parameter

_BLOCK = 4096  # logits of a step of a program's loops over the vocabulary
_ODD_BLOCK = 2048  # rows that start anywhere load value by value, and each such load keeps its address in registers
_MAX_CHUNKS = 1023  # the kernel counts a lane's logits in 10 bits


def sample_kernel(vocab: int) -> Kernel:
    """One token for each row of logits, a program a row.

    Parameters: logits f32 `[R, vocab]`; settings_f32, settings_i32 and settings_i64, all three the address of R records of 32 bytes
    (f32 temperature, i32 top_k, f32 top_p, f32 min_p, u64 seed, u64 offset); token_ids i32 `[R]`; num_rows.

    The numbers mean what they do in the CPU's `llmc_sample`, and the same Philox number makes the same draw: temperature 0 (or
    top_k 1) takes the first of the largest logits; min_p keeps tokens of at least that share of the largest probability, top_k the
    first of those in the ranking (0 is off), top_p the fewest that have that share of what is left. Equal logits rank by index.
    """
    block = min(_ODD_BLOCK if vocab % 2 else _BLOCK, 1 << max(vocab - 1, 15).bit_length())
    chunks = -(-vocab // block)
    if not 0 < chunks <= _MAX_CHUNKS:
        raise TargetError(f"sampling: a vocabulary of {vocab} tokens, expected 1 to {_MAX_CHUNKS * block}")
    return Kernel(
        name=f"sample_v{vocab}",
        template="sample",
        settings={"vocab": vocab, "block": block, "chunks": 1 << max(chunks - 1, 1).bit_length()},
        parameters=(
            Parameter(name="logits", type="*fp32"),
            Parameter(name="settings_f32", type="*fp32"),
            Parameter(name="settings_i32", type="*i32"),
            Parameter(name="settings_i64", type="*i64"),
            Parameter(name="token_ids", type="*i32"),
            Parameter(name="num_rows", type="i32"),
        ),
        grid=(Extent(symbol="R"), ONE, ONE),
        num_warps=min(max(block // 128, 1), 16),
    )
