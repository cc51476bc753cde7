"""Makes an engine from a bundle, with everything slow on its way to the first token done side by side."""

from __future__ import annotations

from pathlib import Path

from ..errors import CapacityError, LlmcError, UsageError
from . import memory
from .block_pool import blocks_for
from .bundle import Bundle, Verify
from .engine import Engine
from .executor import make_executor
from .generation import read_chat_template, read_default_params, read_end_ids, read_tokenizer
from .program import Program
from .prompt import PromptEncoder

DEFAULT_MAX_NUM_SEQS = 16
_TYPICAL_CONTEXT = 4096


def load(
    path: str | Path,
    *,
    target: str | None = None,
    num_threads: int | None = None,
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
    kv_cache_bytes: int | None = None,
    level: str | None = None,
    verify: Verify = "full",
) -> Engine:
    """Load a bundle; needs neither torch nor transformers.

    `target` defaults to the first in the bundle that this machine can run, `num_threads` to LLMC_NUM_THREADS and then
    to the CPUs this process may use. `max_num_seqs` is how many requests run at a time; more wait. `kv_cache_bytes`
    is reserved but only costs what is used; by default it holds one request of the full context or `max_num_seqs` of
    4,096 tokens, whichever is more, within half of the available memory. `level` forces an instruction-set level of a
    CPU target. `verify="sizes"` skips the hashes of the files.

    Raises BundleError, UsageError and CapacityError.
    """
    for name, value in (
        ("num_threads", num_threads),
        ("max_num_seqs", max_num_seqs),
        ("kv_cache_bytes", kv_cache_bytes),
    ):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UsageError(f"{name}={value!r}: expected a whole number of at least 1")
    if verify not in ("full", "sizes"):
        raise UsageError(f"verify={verify!r}: expected 'full' or 'sizes'")
    # Hashing begins here, in threads; the interpreter is busy with the tokenizer meanwhile.
    bundle = Bundle.open(path, target=target, verify=verify, wait=False)
    program = bundle.program
    executor = make_executor(
        bundle,
        num_kv_blocks=_num_kv_blocks(program, max_num_seqs, kv_cache_bytes),
        num_threads=num_threads,
        level=level,
    )
    try:
        try:
            tokenizer = read_tokenizer(bundle)
        except LlmcError:
            bundle.check()  # a damaged file is the better explanation
            raise
        bundle.check()
        executor.bind_weights()
        template = read_chat_template(bundle, tokenizer)
        return Engine(
            executor,
            PromptEncoder(tokenizer, template, program.vocab_size),
            max_tokens=program.max_tokens,
            context_length=program.context_length,
            max_num_seqs=max_num_seqs,
            end_ids=read_end_ids(bundle, tokenizer),
            default_params=read_default_params(bundle),
        )
    except BaseException:
        executor.close()
        raise


def _num_kv_blocks(program: Program, max_num_seqs: int, kv_cache_bytes: int | None) -> int:
    size = program.kv_cache.bytes_per_block
    if kv_cache_bytes is not None:
        if kv_cache_bytes < size:
            raise CapacityError(f"kv_cache_bytes={kv_cache_bytes} is less than one KV block of {size} bytes")
        return kv_cache_bytes // size
    typical = blocks_for(min(program.context_length, _TYPICAL_CONTEXT))
    wanted = max(blocks_for(program.context_length), typical * max_num_seqs)
    affordable = memory.available_bytes() // 2 // size
    return max(typical, min(wanted, affordable)) if affordable else typical
