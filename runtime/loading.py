"""Makes an engine from a bundle, with everything slow on its way to the first token done side by side."""

from __future__ import annotations

import logging
from pathlib import Path

from ..errors import LlmcError, UsageError
from .bundle import Bundle, Verify
from .engine import Engine
from .executor import make_executor
from .generation import read_chat_template, read_default_params, read_end_ids, read_tokenizer
from .pool_size import PoolSize
from .prompt import PromptEncoder
from .selection import ExecutorName

logger = logging.getLogger("llmc.runtime")

DEFAULT_MAX_NUM_SEQS = {"cpu": 16, "cuda": 64, "interpreter": 4}


def load(
    path: str | Path,
    *,
    target: str | None = None,
    executor: ExecutorName = "auto",
    num_threads: int | None = None,
    max_num_seqs: int | None = None,
    kv_cache_bytes: int | None = None,
    level: str | None = None,
    verify: Verify = "full",
) -> Engine:
    """Load a bundle; needs neither torch nor transformers.

    `target` and `executor` default to what suits this machine best: a CUDA target whose kernels a device here runs, or
    else the first CPU target; `Engine.target_choice` says which and why. `executor` "cpu" and "cuda" look at such targets
    alone, and "interpreter" runs a GPU target's kernels on the CPU, for tests and debugging: it is thousands of times
    slower and needs llmc[compile].

    `max_num_seqs` is how many requests run at a time, by default 16 on a CPU, 64 on a GPU and 4 interpreted; more wait. `kv_cache_bytes`
    is by default enough for one request of the full context or `max_num_seqs` of 4,096 tokens, whichever is more, within
    half of the available memory of a CPU, of which only what is used is taken, or what a GPU has left after the weights,
    less a tenth. `num_threads` defaults to LLMC_NUM_THREADS and then to the CPUs this process may use; `level` forces an
    instruction-set level of a CPU target. `verify="sizes"` skips the hashes of the files.

    Raises BundleError, UsageError, CapacityError and MissingExtraError.
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
    bundle = Bundle.open(path, target=target, executor=executor, verify=verify, wait=False)
    program, choice = bundle.program, bundle.choice
    assert choice is not None
    logger.info("%s", choice.description)
    if max_num_seqs is None:
        max_num_seqs = DEFAULT_MAX_NUM_SEQS[choice.executor]
    device = make_executor(
        bundle,
        pool=PoolSize.of(program, max_num_seqs=max_num_seqs, kv_cache_bytes=kv_cache_bytes),
        max_num_seqs=max_num_seqs,
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
        device.bind_weights()
        template = read_chat_template(bundle, tokenizer)
        return Engine(
            device,
            PromptEncoder(tokenizer, template, program.vocab_size),
            max_tokens=program.max_tokens,
            context_length=program.context_length,
            max_num_seqs=max_num_seqs,
            end_ids=read_end_ids(bundle, tokenizer),
            default_params=read_default_params(bundle),
            target_choice=choice.description,
        )
    except BaseException:
        device.close()
        raise
