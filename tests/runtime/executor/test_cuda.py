"""The CUDA executor on a fake device, see `FakeDevice`: batches, graphs, streams and rows are real, the GPU is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llmc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmc.errors import BundleError, CapacityError
from llmc.runtime import Bundle, Engine, SamplingParams
from llmc.runtime.devices import CudaDevice, CudaSurvey
from llmc.runtime.executor import SAMPLING_DTYPE, StepBatch
from llmc.runtime.executor.cuda import CudaExecutor
from llmc.runtime.pool_size import PoolSize

MakeDevice = Callable[..., Any]
Numpy = Callable[[Sequence[int]], np.ndarray]
MAIN, SIDE = 0, 1


@pytest.fixture(scope="module")
def bundle(gpu_bundle: Path) -> Bundle:
    return Bundle.open(gpu_bundle, executor="interpreter")


def make(bundle: Bundle, device: Any, max_num_seqs: int = 8) -> CudaExecutor:
    pool = PoolSize.of(bundle.program, max_num_seqs=max_num_seqs, kv_cache_bytes=128 * 40)
    executor = CudaExecutor(bundle, device, pool=pool, max_num_seqs=max_num_seqs)
    executor.bind_weights()
    return executor


@pytest.fixture
def load_fake(
    gpu_bundle: Path, fake_device: MakeDevice, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Engine, Any]]]:
    """`load_fake(seed=1)` -> an engine made by `llmc.load`, which finds a fake GPU, and that."""
    engines = []

    def load(seed: int = 0, **options: Any) -> tuple[Engine, Any]:
        device = fake_device(seed)
        found = CudaSurvey(devices=(CudaDevice(ordinal=0, name="Fake GPU", capability=(9, 0)),))
        monkeypatch.setattr("llmc.runtime.bundle.survey_cuda", lambda: found)
        monkeypatch.setattr("llmc.runtime.executor.cuda_device.CudaDevice", lambda chosen: device)
        engines.append(llmc.load(gpu_bundle, **options))
        return engines[-1], device

    yield load
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_requests_in_any_mixture_get_the_tokens_of_numpy(
    load_fake: Callable[..., tuple[Engine, Any]], gpu_logits: Numpy, seed: int
) -> None:
    """Five prompts for a step of 32 tokens: chunked prefill beside decoding, batches of every size on the way up and down."""
    engine, device = load_fake(seed, kv_cache_bytes=128 * 40)
    prompts = [list(range(3, 3 + length)) for length in (1, 2, 40, 17, 5)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = list(prompt)
        for token_id in output.token_ids:
            assert token_id == int(gpu_logits(ids)[-1].argmax())
            ids.append(token_id)
    kinds = {(entry[0], entry[1]) for entry in device.log}
    assert {("capture", MAIN), ("replay", MAIN), ("launch", SIDE)} <= kinds
    assert engine.target_choice == "target h100-fp8 on Fake GPU (sm_90)"
    assert engine.executor.description == "Fake GPU (sm_90)"


def test_logits_of_long_texts_come_in_pieces(load_fake: Callable[..., tuple[Engine, Any]], gpu_logits: Numpy) -> None:
    engine, _ = load_fake(2)
    ids = list(range(5, 75))
    np.testing.assert_array_equal(engine.logits(ids), gpu_logits(ids))


shapes = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 5]), st.integers(0, 20)), min_size=1, max_size=6)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=shapes, seed=st.integers(0, 1000), data=st.data())
def test_rows_of_logits_and_samples_keep_the_callers_order(
    bundle: Bundle, fake_device: MakeDevice, gpu_logits: Numpy, batch: list[tuple[int, int]], seed: int, data: st.DataObject
) -> None:
    executor = make(bundle, fake_device(seed))
    texts = [[3 + 50 * index + place for place in range(start + count)] for index, (count, start) in enumerate(batch)]
    blocks = [list(range(3 * index, 3 * index + 3)) for index in range(len(batch))]
    for index, (_, start) in enumerate(batch):
        if start:
            executor.step(StepBatch.build([(texts[index][:start], 0, blocks[index])], []))  # no logits, no wait
    parts = [(texts[index][start:], start, blocks[index]) for index, (_, start) in enumerate(batch)]
    expected = np.concatenate([gpu_logits(texts[index])[start:] for index, (_, start) in enumerate(batch)])
    rows = data.draw(st.permutations(range(len(expected))))
    rows = rows[: data.draw(st.integers(0, len(rows)))]
    logits = executor.step(StepBatch.build(parts, rows))
    assert logits.num_rows == len(rows)
    np.testing.assert_array_equal(logits.numpy(), expected[rows])
    records = np.zeros(len(rows), SAMPLING_DTYPE)
    records["seed"], records["offset"] = np.arange(len(rows)) + 11, np.arange(len(rows)) * 3
    records["temperature"] = np.arange(len(rows)) % 2
    best = expected[rows].argmax(axis=1)
    moved = (best + records["seed"].astype(int) + 7 * records["offset"].astype(int)) % 300
    np.testing.assert_array_equal(executor.sample(logits, records), np.where(records["temperature"] > 0, moved, best))
    executor.close()


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5])
def test_rows_of_both_parts_begin_on_16_bytes(
    bundle: Bundle, fake_device: MakeDevice, gpu_logits: Numpy, max_num_seqs: int
) -> None:
    """The fake refuses pointers that are not aligned."""
    executor = make(bundle, fake_device(), max_num_seqs)
    for ids in ([5, 6], [7]):
        logits = executor.step(StepBatch.build([(ids, 0, [0])], [len(ids) - 1]))
        best = int(gpu_logits(ids)[-1].argmax())
        assert executor.sample(logits, np.zeros(1, SAMPLING_DTYPE)).tolist() == [best]


@pytest.mark.parametrize("seed", range(6))
def test_steps_whose_logits_nobody_wants_still_come_one_after_another(
    bundle: Bundle, fake_device: MakeDevice, gpu_logits: Numpy, seed: int
) -> None:
    """A prompt in chunks of 1, 2, 1 and 3 tokens changes streams with every step, and the host never waits in between."""
    executor = make(bundle, fake_device(seed))
    ids, start = [5, 6, 7, 8, 9, 10, 11], 0
    for count in (1, 2, 1):
        executor.step(StepBatch.build([(ids[start : start + count], start, [0])], []))
        start += count
    logits = executor.step(StepBatch.build([(ids[4:], 4, [0])], [2]))
    np.testing.assert_array_equal(logits.numpy(), gpu_logits(ids)[-1:])


def decode(executor: CudaExecutor, count: int) -> None:
    logits = executor.step(StepBatch.build([([5], 0, [index]) for index in range(count)], range(count)))
    executor.sample(logits, np.zeros(count, SAMPLING_DTYPE))


def test_a_graph_is_captured_when_its_batch_size_first_comes_and_replayed_from_then_on(
    bundle: Bundle, fake_device: MakeDevice
) -> None:
    device = fake_device()
    executor = make(bundle, device)
    for count in (3, 4, 1, 3, 8, 5):
        decode(executor, count)
    graphs = [entry for entry in device.log if entry[0] in ("capture", "replay")]
    assert graphs == [
        ("capture", MAIN, 0), ("replay", MAIN, 0), ("replay", MAIN, 0), ("capture", MAIN, 1), ("replay", MAIN, 1),
        ("replay", MAIN, 0), ("capture", MAIN, 2), ("replay", MAIN, 2), ("replay", MAIN, 2),
    ]  # fmt: skip
    assert [launch.grid[0] for launch in device._graphs[0]] == [1, 5, 4]  # of four sequences, two of which were padding once
    assert {entry[1:] for entry in device.log if entry[0] == "launch"} == {(MAIN, "toy_sample")}


def test_a_mixed_batch_decodes_on_one_stream_and_prefills_on_the_other(bundle: Bundle, fake_device: MakeDevice) -> None:
    device = fake_device()
    executor = make(bundle, device)
    device.log.clear()
    logits = executor.step(StepBatch.build([([5], 0, [0]), ([6, 7], 0, [1]), ([8], 0, [2])], [0, 2, 3]))
    assert [entry for entry in device.log if entry[0] != "synchronize"] == [
        ("capture", MAIN, 0),
        ("replay", MAIN, 0),
        ("launch", SIDE, "toy_embed", "toy_append", "toy_logits"),
    ]
    assert not [entry for entry in device.log if entry[0] == "synchronize"], "a step only queues"
    executor.sample(logits, np.zeros(3, SAMPLING_DTYPE))
    assert [entry[1:] for entry in device.log if entry[0] == "launch"][1:] == [(MAIN, "toy_sample")] * 2
    assert [entry for entry in device.log if entry[0] == "synchronize"] == [("synchronize", MAIN)]


def test_more_decoding_sequences_than_the_phases_take_run_as_prefill(
    build_gpu_bundle: Callable[..., Path], fake_device: MakeDevice, gpu_logits: Numpy, tmp_path: Path
) -> None:
    path = build_gpu_bundle(tmp_path / "b", decode_tokens=(2,))
    device = fake_device()
    executor = make(Bundle.open(path, executor="interpreter"), device)
    logits = executor.step(StepBatch.build([([5 + index], 0, [index]) for index in range(5)], range(5)))
    np.testing.assert_array_equal(logits.numpy(), np.concatenate([gpu_logits([5 + index]) for index in range(5)]))
    assert [entry[1:] for entry in device.log if entry[0] == "launch"] == [(SIDE, "toy_embed", "toy_append", "toy_logits")]


def test_a_program_without_single_token_phases(
    build_gpu_bundle: Callable[..., Path], fake_device: MakeDevice, gpu_logits: Numpy, tmp_path: Path
) -> None:
    executor = make(Bundle.open(build_gpu_bundle(tmp_path / "b", decode_tokens=()), executor="interpreter"), fake_device())
    logits = executor.step(StepBatch.build([([5], 0, [0]), ([6, 7], 0, [1])], [2, 0]))
    np.testing.assert_array_equal(logits.numpy(), np.concatenate([gpu_logits([6, 7])[1:], gpu_logits([5])]))


def test_too_little_memory_is_refused_with_figures(bundle: Bundle, fake_device: MakeDevice) -> None:
    pool = PoolSize.of(bundle.program, max_num_seqs=8, kv_cache_bytes=None)
    with pytest.raises(
        CapacityError, match=r"'h100-fp8' on Fake GPU \(sm_90\) needs \d+ bytes \(\d+ of weights, .*; compile a target"
    ):
        CudaExecutor(bundle, fake_device(total_bytes=50_000), pool=pool, max_num_seqs=8)
    exact = PoolSize.of(bundle.program, max_num_seqs=8, kv_cache_bytes=1 << 30)
    with pytest.raises(CapacityError, match=r"cannot allocate 1073741824 bytes for the KV pool"):
        CudaExecutor(bundle, fake_device(), pool=exact, max_num_seqs=8)


def test_the_pool_takes_what_is_left_less_a_tenth(bundle: Bundle, fake_device: MakeDevice) -> None:
    pool = PoolSize.of(bundle.program, max_num_seqs=8, kv_cache_bytes=None)
    roomy = CudaExecutor(bundle, fake_device(), pool=pool, max_num_seqs=8)
    assert roomy.num_kv_blocks == 8 * 256 // 16
    tight = CudaExecutor(bundle, fake_device(total_bytes=75_000), pool=pool, max_num_seqs=8)
    assert 0 < tight.num_kv_blocks < roomy.num_kv_blocks
    assert tight._device.free_bytes() > 7_000  # type: ignore[attr-defined]


def test_misuse(bundle: Bundle, fake_device: MakeDevice) -> None:
    device = fake_device()
    executor = make(bundle, device)
    stale = executor.step(StepBatch.build([([5], 0, [0])], [0]))
    executor.step(StepBatch.build([([5], 0, [0])], [0]))
    with pytest.raises(AssertionError, match="the logits of step 1 were used after step 2"):
        stale.numpy()
    with pytest.raises(BundleError, match="a step of 33 tokens and 0 rows of logits is more than the 32 and 32"):
        executor.step(StepBatch.build([([5] * 33, 0, [0, 1, 2])], []))
    executor.close()
    assert device.closed


def test_a_failed_load_frees_the_device(
    load_fake: Callable[..., tuple[Engine, Any]], gpu_bundle: Path, fake_device: MakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, device = load_fake()
    monkeypatch.setattr("llmc.runtime.executor.cuda_device.CudaDevice", lambda chosen: device)
    with pytest.raises(CapacityError):
        llmc.load(gpu_bundle, kv_cache_bytes=1 << 40)
    assert device.closed
