"""Resolving calls to launches: grids by hand, every kind of argument, and the arena's and logits' offsets."""

from __future__ import annotations

import numpy as np
import pytest
from llmc.runtime.executor.base import StepBatch
from llmc.runtime.executor.launch import Launch, Memory, extent, plan, symbols_of
from llmc.runtime.executor.step_inputs import InputLayout
from llmc.runtime.program import Argument, Call, Extent


@pytest.mark.parametrize(
    ("axis", "programs"),
    [
        (Extent(), 1),
        (Extent(factor=7), 7),
        (Extent(symbol="T"), 70),
        (Extent(symbol="T", divisor=16), 5),
        (Extent(symbol="T", divisor=16, factor=3), 15),
        (Extent(symbol="T", divisor=16, factor=3, add_sequences=True), 3 * (5 + 4)),
        (Extent(symbol="R"), 2),
        (Extent(symbol="B", factor=8), 32),
        (Extent(add_sequences=True), 5),
    ],
)
def test_extent(axis: Extent, programs: int) -> None:
    assert extent(axis, {"T": 70, "R": 2, "B": 4}) == programs


def test_every_kind_of_argument() -> None:
    memory = Memory(
        vocab_size=100, weights=[7000, 7100], arena=1000, kv_pool=2000, logits=3000, sampling=4000, sampled=5000,
        inputs={"positions": 6000},
    )  # fmt: skip
    arguments = [
        Argument("arena", 64), Argument("weight", 1), Argument("input", "positions"), Argument("symbol", "max_blocks"),
        Argument("constant", -5), Argument("kv_pool", 0), Argument("logits", 0), Argument("sampling", 0), Argument("sampled", 0),
    ]  # fmt: skip
    call = Call(kernel="k", node="n", grid=[Extent(symbol="T"), Extent(), Extent(factor=2)], arguments=arguments)
    symbols = {"T": 3, "R": 1, "B": 3, "max_blocks": 9}
    assert plan([call], memory, symbols) == [Launch("k", (3, 1, 2), (1064, 7100, 6000, 9, -5, 2000, 3000, 4000, 5000))]
    moved = plan([call], memory.at_row(2), symbols)[0].values
    assert moved[-3:] == (3000 + 2 * 400, 4000 + 2 * 32, 5000 + 2 * 4)


def test_an_empty_grid_is_no_launch() -> None:
    calls = [Call(kernel=name, node=name, grid=[Extent(symbol=symbol), Extent(), Extent()]) for name, symbol in ("aR", "bT")]
    assert [launch.kernel for launch in plan(calls, Memory(vocab_size=1), {"T": 1, "R": 0, "B": 1})] == ["b"]


def test_inputs_are_laid_out_without_overlap() -> None:
    batch = StepBatch.build([([1, 2, 3], 14, [4, 5]), ([9], 40, [6, 7, 8])], [2, 3])
    assert symbols_of(batch) == {"T": 4, "R": 2, "B": 2, "max_blocks": 3}
    layout = InputLayout.of_batch(batch)
    buffer = np.full(layout.num_bytes + 64, 0xCD, np.uint8)
    layout.write(batch, buffer)
    for name, address in layout.addresses(1 << 20).items():
        start = address - (1 << 20)
        assert start % 64 == 0
        values = getattr(batch, name)
        np.testing.assert_array_equal(buffer[start : start + values.nbytes].view(np.int32), values.reshape(-1))
    assert (buffer[layout.num_bytes :] == 0xCD).all()
    assert set(layout.offsets) == set(StepBatch.__slots__) - {"slots", "slot_start"}  # those are of CPU programs
    largest = InputLayout.of(num_tokens=5, num_seqs=3, num_rows=2, max_blocks=4)
    assert largest.num_bytes >= layout.num_bytes
