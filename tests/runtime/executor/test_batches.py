"""Taking batches apart and padding them: pure functions over small arrays."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmc.runtime import Bundle
from llmc.runtime.executor.base import StepBatch
from llmc.runtime.executor.batches import bucket_for, bucket_sizes, pad, split, table_width

sequences = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), min_size=1, max_size=9)


def build(shapes: list[tuple[int, int]], rows: list[int]) -> StepBatch:
    """Sequences of `(new tokens, tokens before)`; a token's id is its sequence and place, a block's its sequence and column."""
    parts = [
        ([100 * index + place for place in range(count)], start, [10 * index + column for column in range(4)])
        for index, (count, start) in enumerate(shapes)
    ]
    return StepBatch.build(parts, rows)


def tokens_of(batch: StepBatch) -> list[tuple[int, int, int, list[int]]]:
    """`(id, position, context length, blocks up to it)` of every token, which is all that a kernel can see of it."""
    seen = []
    for index, length in enumerate(batch.context_len.tolist()):
        for token in range(batch.query_start[index], batch.query_start[index + 1]):
            blocks = batch.block_table[index, : -(-length // 16)].tolist()
            seen.append((int(batch.token_ids[token]), int(batch.positions[token]), length, blocks))
    return seen


@given(shapes=sequences, data=st.data())
def test_split_loses_and_mixes_nothing(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    total = sum(count for count, _ in shapes)
    rows = data.draw(st.permutations(range(total)).flatmap(lambda order: st.integers(0, total).map(lambda n: order[:n])))
    batch = build(shapes, rows)
    whole = tokens_of(batch)
    single, rest = split(batch, 8)
    parts = [part for part in (single, rest) if part is not None]
    together = [token for part in parts for token in tokens_of(part.batch)]
    assert sorted(together) == sorted(whole)
    assert sorted(row for part in parts for row in part.rows.tolist()) == list(range(len(rows)))
    for part in parts:
        wanted = [whole[rows[row]] for row in part.rows]
        assert [tokens_of(part.batch)[row] for row in part.batch.logit_rows] == wanted
        for array in (getattr(part.batch, name) for name in StepBatch.__slots__):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
    num_single = sum(count == 1 for count, _ in shapes)
    if single is not None:
        assert len(single.batch.token_ids) == len(single.batch.context_len) == num_single
    if rest is not None and num_single <= 8:
        assert all(np.diff(rest.batch.query_start) > 1)
    assert (single is None) == (num_single == 0 or num_single > 8)


def test_more_single_tokens_than_a_graph_takes_go_with_the_rest() -> None:
    batch = build([(1, 5), (1, 6), (3, 0)], [0, 1, 4])
    single, rest = split(batch, 1)
    assert single is None
    assert rest is not None
    assert rest.batch is batch
    assert split(build([(1, 5)], [0]), 0)[0] is None


@given(starts=st.lists(st.integers(0, 60), min_size=1, max_size=6), extra=st.integers(0, 5), width=st.integers(4, 8))
def test_padding_keeps_the_batch_and_adds_empty_sequences(starts: list[int], extra: int, width: int) -> None:
    batch = build([(1, start) for start in starts], [0])
    size = len(starts) + extra
    padded = pad(batch, size, width)
    assert tokens_of(padded)[: len(starts)] == tokens_of(batch)
    assert padded.block_table.shape == (size, width)
    assert padded.query_start.tolist() == [*padded.logit_rows.tolist(), size] == list(range(size + 1))
    assert padded.context_len[len(starts) :].tolist() == padded.token_ids[len(starts) :].tolist() == [0] * extra
    assert padded.positions[len(starts) :].tolist() == [-1] * extra
    assert (padded.block_table >= -1).all()
    for name in StepBatch.__slots__:
        assert getattr(padded, name).dtype == np.int32


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (8, [1, 2, 4, 8]), (64, [1, 2, 4, 8])]
)
def test_bucket_sizes(gpu_bundle: Path, max_num_seqs: int, sizes: list[int]) -> None:
    program = Bundle.open(gpu_bundle, executor="interpreter").program
    assert bucket_sizes(program, max_num_seqs) == sizes
    assert [bucket_for(count, sizes) for count in range(1, sizes[-1] + 1)] == [
        next(size for size in sizes if size >= count) for count in range(1, sizes[-1] + 1)
    ]


def test_bucket_sizes_end_at_the_phase(toy_bundle: Path, gpu_bundle: Path) -> None:
    program = Bundle.open(toy_bundle).program  # its decode phase takes 32 tokens
    assert bucket_sizes(program, 20) == [1, 2, 4, 8, 16, 32]
    odd = msgspec.structs.replace(program, phases=[msgspec.structs.replace(program.phases[0], max_tokens=6), program.phases[1]])
    assert bucket_sizes(odd, 20) == [1, 2, 4, 6]
    assert bucket_sizes(msgspec.structs.replace(program, phases=program.phases[1:]), 20) == []


def test_table_width() -> None:
    assert [table_width(used, 8192) for used in (1, 64, 65, 256, 257, 8000)] == [64, 64, 256, 256, 1024, 8192]
    assert [table_width(used, 100) for used in (1, 64, 65, 100)] == [64, 64, 100, 100]
    assert table_width(3, 16) == 16
