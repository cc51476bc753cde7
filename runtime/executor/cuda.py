"""Runs a GPU program on an NVIDIA GPU: a graph for each size of a decode batch, prefill beside it on a stream of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...errors import BundleError
from ..binary import check_binary
from ..bundle import Bundle
from ..pool_size import PoolSize
from ..program import GpuProgram
from .base import SAMPLING_DTYPE, Float32, Int32, Logits, StepBatch
from .batches import Part, bucket_for, pad, split, table_width
from .device_budget import DeviceBudget
from .gpu_device import GpuDevice
from .launch import Memory, plan, plan_step
from .upload import Upload


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the logits of a part of a batch are: `rows[i]`, a row of the whole batch, in row `places[i]` of the buffer."""

    first: int
    count: int  # rows from `first` on that hold logits of this batch
    rows: Int32
    places: Int32


@dataclass(frozen=True, slots=True)
class DeviceLogits:
    """`Logits` of a step, still on the device."""

    executor: CudaExecutor
    step: int
    num_rows: int
    parts: tuple[_Rows, ...]

    def numpy(self) -> Float32:
        """A copy `[R, vocab_size]` in the host's memory."""
        return self.executor.fetch(self)


class CudaExecutor:
    """An `Executor` over a `GpuDevice`.

    Sequences of one token go through a captured graph for the next larger batch size, padded with empty sequences; all
    others through the prefill phase on a second stream, beside it. The program keeps the arena ranges of the two apart. The
    second stream forks from the first and joins it again within a step, so that the first one orders everything.
    """

    def __init__(self, bundle: Bundle, device: GpuDevice, *, pool: PoolSize, max_num_seqs: int) -> None:
        """Load the kernels and allocate all memory; owns `device` from here on, unless this raises.

        Raises BundleError, and CapacityError with the figures if the memory does not suffice.
        """
        program = bundle.program
        assert isinstance(program, GpuProgram)
        self._bundle = bundle
        self._program = program
        self._device = device
        self._graphs: dict[tuple[int, int], int] = {}  # by batch size and width of the block table
        self._step = 0
        files = {name: bundle.manifest.files[name].size for name in bundle.entry.weights}
        self._budget = budget = DeviceBudget.of(program, files, max_num_seqs=max_num_seqs)
        self.max_logit_rows = budget.max_logit_rows
        device.activate()
        what = f"{bundle.root}: target {bundle.entry.name!r} on {device.description}"
        self.num_kv_blocks = budget.kv_blocks(pool, device.free_bytes(), what)
        for name, kernel in program.kernels.items():
            path, binary = bundle.beside_program(kernel.binary)
            check_binary(binary, program.machine, name, str(path))
            device.load(name, kernel, program.warp_size, binary, path)
        self._main, self._side = device.stream(), device.stream()
        self._fork, self._join = device.event(), device.event()
        self._weights = [device.allocate(size, f"weights in {name}") for name, size in files.items()]
        arena = device.allocate(budget.arena_bytes, "arena")
        device.zero(self._main, arena, budget.arena_bytes)  # kernels keep counters there that they return to zero
        self._decode_inputs = Upload(device, budget.decode_input_bytes, "step inputs")
        self._prefill_inputs = Upload(device, budget.prefill_input_bytes, "step inputs")
        self._sampling = Upload(device, SAMPLING_DTYPE.itemsize * budget.num_rows, "sampling parameters")
        self._sampled = device.allocate_host(4 * budget.num_rows)
        self._memory = Memory(
            vocab_size=program.vocab_size,
            arena=arena,
            kv_pool=device.allocate(self.num_kv_blocks * pool.block_bytes, "KV pool"),
            logits=device.allocate(budget.logits_bytes, "logits"),
            sampling=self._sampling.address,
            sampled=device.allocate(4 * budget.num_rows, "sampled ids"),
        )

    @property
    def description(self) -> str:
        """The device's."""
        return self._device.description

    def bind_weights(self) -> None:
        """Copy the weights to the device, once their hash is known; raises BundleError. Before the first step.

        Whole files go straight from their mapping: the driver stages such copies itself, and each byte is read once.
        """
        self._device.activate()
        places = self._bundle.weight_places()
        for address, file in zip(self._weights, self._bundle.weight_files(), strict=True):
            self._device.copy_in(self._main, address, file.address, file.num_bytes)
        self._device.synchronize(self._main)
        self._memory = replace(self._memory, weights=[self._weights[file] + offset for file, offset in places])

    def step(self, batch: StepBatch) -> Logits:
        """Queue the batch; raises BundleError for one larger than the program's or the executor's."""
        num_tokens, num_rows = len(batch.token_ids), len(batch.logit_rows)
        if num_tokens > self._program.max_tokens or num_rows > self.max_logit_rows:
            raise BundleError(
                f"a step of {num_tokens} tokens and {num_rows} rows of logits is more than the {self._program.max_tokens} and "
                f"{self.max_logit_rows} of {self.description}"
            )
        self._device.activate()
        self._step += 1
        parts: list[_Rows] = []
        decode, prefill = split(batch, max(self._budget.buckets, default=0))
        if prefill is not None:
            self._device.record(self._fork, self._main)
        if decode is not None:  # first, so that the device is busy while the many launches of the other are queued
            parts.append(self._decode(decode))
        if prefill is not None:
            parts.append(self._prefill(prefill))
        return DeviceLogits(self, self._step, num_rows, tuple(parts))

    def _decode(self, part: Part) -> _Rows:
        size = bucket_for(len(part.batch.context_len), self._budget.buckets)
        width = table_width(part.batch.block_table.shape[1], self._budget.most_blocks)
        padded = pad(part.batch, size, width)
        addresses = self._decode_inputs.send_batch(self._main, padded)
        if (size, width) not in self._graphs:
            launches = plan_step(self._program, padded, replace(self._memory, inputs=addresses))
            self._graphs[size, width] = self._device.capture(self._main, launches)
        self._device.replay(self._main, self._graphs[size, width])
        # Row i of a padded batch is of sequence i, whichever rows were asked for.
        return _Rows(first=0, count=len(part.batch.context_len), rows=part.rows, places=part.batch.logit_rows)

    def _prefill(self, part: Part) -> _Rows:
        first = self._budget.prefill_row
        self._device.wait(self._side, self._fork)
        addresses = self._prefill_inputs.send_batch(self._side, part.batch)
        memory = replace(self._memory.at_row(first), inputs=addresses)
        self._device.launch(self._side, plan_step(self._program, part.batch, memory))
        self._device.record(self._join, self._side)
        self._device.wait(self._main, self._join)
        count = len(part.rows)
        return _Rows(first=first, count=count, rows=part.rows, places=np.arange(first, first + count, dtype=np.int32))

    def sample(self, logits: Logits, sampling: npt.NDArray[np.void]) -> Int32:
        """One token id for each row of the last step's logits; `sampling` has one `SAMPLING_DTYPE` record for each row."""
        logits = self._current(logits)
        self._device.activate()
        records = self._sampling.begin().view(SAMPLING_DTYPE)
        sampled = self._sampled.view(np.int32)
        for part in logits.parts:
            records[part.first : part.first + part.count] = np.zeros(1, SAMPLING_DTYPE)  # greedy, where nobody asked
            records[part.places] = sampling[part.rows]
        for part in logits.parts:
            if part.count:
                self._sampling.send(self._main, SAMPLING_DTYPE.itemsize * part.first, SAMPLING_DTYPE.itemsize * part.count)
                memory = self._memory.at_row(part.first)
                self._device.launch(self._main, plan([self._program.sampler], memory, {"R": part.count}))
                target = sampled[part.first :].ctypes.data
                self._device.copy_out(self._main, target, memory.sampled, 4 * part.count)
        self._device.synchronize(self._main)
        token_ids = np.empty(logits.num_rows, np.int32)
        for part in logits.parts:
            token_ids[part.rows] = sampled[part.places]
        return token_ids

    def fetch(self, logits: Logits) -> Float32:
        """The logits in the host's memory, `[R, vocab_size]`."""
        logits = self._current(logits)
        self._device.activate()
        values = np.empty((logits.num_rows, self._program.vocab_size), np.float32)
        for part in logits.parts:
            copied = np.empty((part.count, self._program.vocab_size), np.float32)
            address = self._memory.at_row(part.first).logits
            self._device.copy_out(self._main, copied.ctypes.data, address, copied.nbytes)
            self._device.synchronize(self._main)
            values[part.rows] = copied[part.places - part.first]
        return values

    def _current(self, logits: Logits) -> DeviceLogits:
        assert isinstance(logits, DeviceLogits)
        if logits.step != self._step:
            raise AssertionError(f"the logits of step {logits.step} were used after step {self._step}")
        return logits

    def close(self) -> None:
        """Free the memory. No other method may be called after it."""
        self._graphs = {}
        self._device.close()
