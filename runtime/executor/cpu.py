"""Runs a CPU program: opens the library of the best instruction-set level and calls it once for each step."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ... import environment
from ...errors import BundleError, UsageError
from ..bundle import Bundle
from ..memory import address_of, allocate, available_bytes, available_cpus
from ..pool_size import PoolSize
from ..program import CPU_LEVELS, MAX_THREADS, CpuProgram, check_abi
from .abi import Model, StepArgs
from .base import HostLogits, Int32, Logits, StepBatch

logger = logging.getLogger("llmc.runtime")

_STEP_ERRORS = {1: "too many tokens", 2: "bad phase", 3: "a token id out of range"}
_opened: dict[str, ctypes.CDLL] = {}  # by SHA-256 of the bytes; a library is never closed
_self_tests: dict[int, int] = {}  # by handle -> outcome; a process tests a library once


class CpuExecutor:
    """An `Executor` over the C interface of docs/bundle.md."""

    def __init__(
        self, bundle: Bundle, *, pool: PoolSize, max_num_seqs: int, num_threads: int | None, level: str | None
    ) -> None:
        """Open and test the library and map the memory, with slots for `max_num_seqs` running requests and one sequence more.

        `level` forces an instruction-set level.

        Raises BundleError, CapacityError, and UsageError for a level that cannot be used here.
        """
        program = bundle.program
        assert isinstance(program, CpuProgram)
        self._bundle = bundle  # keeps the weights mapped
        self._library, self.level = open_best_library(bundle, level)
        self.num_threads = min(num_threads or environment.NUM_THREADS.get() or available_cpus(), MAX_THREADS)
        self.num_slots = max_num_seqs + 1
        slot_bytes = self.num_slots * program.kv_cache.bytes_per_slot
        self.num_kv_blocks = pool.on_host(max(available_bytes() // 2 - slot_bytes, 0))
        self.max_logit_rows = program.max_tokens
        self._program = program
        self._arena = allocate(program.arena_bytes, "arena")
        self._kv_pool = allocate(self.num_kv_blocks * program.kv_cache.bytes_per_block, "KV pool")
        self._kv_slots = allocate(slot_bytes, "slots of sequences")
        self._model = Model(
            arena=address_of(self._arena),
            kv_pool=address_of(self._kv_pool),
            kv_slots=address_of(self._kv_slots),
            max_tokens=program.max_tokens,
            num_threads=self.num_threads,
        )
        self._weights: ctypes.Array[ctypes.c_void_p] | None = None
        self._logits = np.empty((0, program.vocab_size), np.float32)

    @property
    def description(self) -> str:
        """Such as ``cpu (avx512, 8 threads)``."""
        return f"cpu ({self.level}, {self.num_threads} thread{'s' if self.num_threads > 1 else ''})"

    def bind_weights(self) -> None:
        """Take the weights from the bundle, once their hash is known; raises BundleError. Before the first step."""
        addresses = self._bundle.weight_addresses()
        self._weights = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
        self._model.weights = ctypes.cast(self._weights, ctypes.c_void_p)

    def step(self, batch: StepBatch) -> Logits:
        """Compute the batch; raises BundleError if the program refuses it."""
        num_tokens, num_seqs, num_rows = len(batch.token_ids), len(batch.context_len), len(batch.logit_rows)
        if batch.slots.max(initial=0) >= self.num_slots:
            raise AssertionError(f"a step names slot {batch.slots.max()}, but there are {self.num_slots}")
        if num_rows > len(self._logits):
            self._logits = np.empty((num_rows, self._program.vocab_size), np.float32)
        args = StepArgs(
            phase=self._program.phase_for(num_tokens, single_token=num_tokens == num_seqs),
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            max_blocks=batch.block_table.shape[1],
            num_logit_rows=num_rows,
            token_ids=batch.token_ids.ctypes.data,
            positions=batch.positions.ctypes.data,
            query_start=batch.query_start.ctypes.data,
            context_len=batch.context_len.ctypes.data,
            block_table=batch.block_table.ctypes.data,
            logit_rows=batch.logit_rows.ctypes.data,
            slots=batch.slots.ctypes.data,
            slot_start=batch.slot_start.ctypes.data,
            logits=self._logits.ctypes.data,
        )
        code = self._library.llmc_step(ctypes.byref(self._model), ctypes.byref(args))
        if code:
            raise BundleError(
                f"the {self.level} program refused a step of {num_tokens} tokens: code {code} "
                f"({_STEP_ERRORS.get(code, 'unknown')}); compile the bundle again, and report it if it recurs"
            )
        return HostLogits(self._logits[:num_rows])

    def sample(self, logits: Logits, sampling: npt.NDArray[np.void]) -> Int32:
        """One token id for each row of `logits`; `sampling` has one `SAMPLING_DTYPE` record for each row."""
        values = logits.numpy()
        token_ids = np.empty(len(values), np.int32)
        code = self._library.llmc_sample(
            values.ctypes.data,
            len(values),
            self._program.vocab_size,
            sampling.ctypes.data,
            self.num_threads,
            token_ids.ctypes.data,
            None,
        )
        if code:
            raise BundleError(f"the {self.level} program refused to sample {len(values)} rows: code {code}")
        return token_ids

    def close(self) -> None:
        """Free the memory. No other method may be called after it."""
        self._model = Model()
        self._weights = None
        self._arena.close()
        self._kv_pool.close()
        self._kv_slots.close()
        self._logits = self._logits[:0].copy()


def open_best_library(bundle: Bundle, forced: str | None) -> tuple[ctypes.CDLL, str]:
    """The library to use and its level: the best that this machine has and whose self test passes."""
    program = bundle.program
    assert isinstance(program, CpuProgram)
    portable = _open(bundle, program.libraries["portable"])
    highest = portable.llmc_cpu_level()
    if not 0 <= highest < len(CPU_LEVELS):
        raise BundleError(f"{bundle.root}: llmc_cpu_level returned {highest}, expected 0 to {len(CPU_LEVELS) - 1}")
    levels = [level for level in reversed(CPU_LEVELS[: highest + 1]) if level in program.libraries]
    if forced is not None:
        if forced not in levels:
            raise UsageError(f"level {forced!r} cannot be used; this machine and bundle have {', '.join(levels)}")
        levels = [forced]
    failures: list[str] = []
    for level in levels:
        library = portable if level == "portable" else _open(bundle, program.libraries[level])
        outcome = _self_test(portable, library)
        if outcome == 0:
            if failures:
                logger.warning("using the %s kernels: %s", level, "; ".join(failures))
            return library, level
        failures.append(f"{level} " + ("raised SIGILL" if outcome == -1 else f"failed its self test {outcome}"))
    raise BundleError(f"{bundle.root}: no library of target {bundle.entry.name!r} works here: {'; '.join(failures)}")


def _open(bundle: Bundle, file: str) -> ctypes.CDLL:
    path, data = bundle.beside_program(file)
    try:
        library = _load_library(path, data)
        library.llmc_abi_version.argtypes = ()
        library.llmc_cpu_level.argtypes = ()
        library.llmc_self_test.argtypes = ()
        library.llmc_guarded_call.argtypes = (ctypes.c_void_p,)
        library.llmc_step.argtypes = (ctypes.POINTER(Model), ctypes.POINTER(StepArgs))
        library.llmc_sample.argtypes = (
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
    except (OSError, AttributeError) as error:
        raise BundleError(f"{path}: cannot be opened as a program library: {' '.join(str(error).split())}") from None
    check_abi(library.llmc_abi_version(), str(path))
    return library


def _load_library(path: Path, data: bytes) -> ctypes.CDLL:
    """Load the very bytes that were checked, under a name of their own.

    The loader returns what it already has for a name it knows, so a bundle that was compiled again at the same path would run
    the old code on the new weights. Nothing can be swapped between check and load, either.
    """
    digest = hashlib.sha256(data).hexdigest()
    if digest not in _opened:
        mode = os.RTLD_NOW | os.RTLD_LOCAL
        if not hasattr(os, "memfd_create"):  # not Linux
            return ctypes.CDLL(str(path), mode=mode)
        file = os.memfd_create(path.name)  # stays open: its number is the library's name
        try:
            os.write(file, data)
            _opened[digest] = ctypes.CDLL(f"/proc/self/fd/{file}", mode=mode)
        except OSError:
            os.close(file)
            raise
    return _opened[digest]


def _self_test(portable: ctypes.CDLL, library: ctypes.CDLL) -> int:
    if library._handle not in _self_tests:
        _self_tests[library._handle] = portable.llmc_guarded_call(ctypes.cast(library.llmc_self_test, ctypes.c_void_p))
    return _self_tests[library._handle]
