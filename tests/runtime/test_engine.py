"""The engine over the toy program: batching, chunking and preemption must not change one token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import llmc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llmc.errors import CapacityError, RequestError
from llmc.runtime import Engine, Output, SamplingParams
from llmc.runtime.executor import Logits, StepBatch

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
prompts = st.lists(st.lists(st.integers(3, 299), min_size=1, max_size=90), min_size=1, max_size=12)


def oracle(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding by recomputing the whole sequence for every token: no cache, no scheduler."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(engine.logits(ids)[-1].argmax()))
    return ids[len(prompt) :]


def test_tokens_are_those_of_full_recomputation(engine: Engine) -> None:
    prompt = list(range(3, 80))
    assert engine.generate(prompt, GREEDY).token_ids == oracle(engine, prompt, 24)


def test_the_toy_sees_every_token(engine: Engine) -> None:
    """If this fails the other tests of this file cannot fail."""
    prompt = list(range(3, 80))
    expected = engine.generate(prompt, GREEDY).token_ids
    for position in (0, 31, 32, 76):
        changed = [*prompt]
        changed[position] += 1
        assert engine.generate(changed, GREEDY).token_ids[:4] != expected[:4]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=prompts)
def test_batched_equals_alone(engine: Engine, batch: list[list[int]]) -> None:
    alone = [engine.generate(prompt, GREEDY).token_ids for prompt in batch]
    assert [output.token_ids for output in engine.generate(batch, GREEDY)] == alone
    assert engine.pool.num_free == engine.pool.num_blocks


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=prompts, num_blocks=st.integers(8, 12))
def test_preemption_changes_no_token(engine: Engine, toy_bundle: Path, batch: list[list[int]], num_blocks: int) -> None:
    expected = [output.token_ids for output in engine.generate(batch, GREEDY)]
    with llmc.load(toy_bundle, num_threads=1, kv_cache_bytes=128 * num_blocks) as tiny:
        assert tiny.pool.num_blocks == num_blocks
        for prompt in batch:
            tiny.submit(prompt, GREEDY)
        outputs = {}
        while tiny.has_unfinished:
            for chunk in tiny.step():
                if chunk.output is not None:
                    outputs[chunk.request_id] = chunk.output
            tiny.pool.check([request.blocks for request in tiny.scheduler.running])
            queue = [request.id for request in (*tiny.scheduler.running, *tiny.scheduler.waiting)]
            assert queue == sorted(queue), "a request overtook one that came before it"
        assert [outputs[index].token_ids for index in range(len(batch))] == expected
        assert tiny.pool.num_free == num_blocks


def test_a_tiny_pool_does_preempt(toy_bundle: Path) -> None:
    with llmc.load(toy_bundle, num_threads=1, kv_cache_bytes=128 * 8) as tiny:
        outputs = tiny.generate([[3 + index] * 17 for index in range(6)], SamplingParams(max_tokens=80, ignore_eos=True))
        assert sum(output.stats.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("max_tokens", [1, 5, 16, 17, 200])
def test_chunk_size_changes_no_token(
    engine: Engine, build_bundle: Callable[..., Path], tmp_path: Path, max_tokens: int
) -> None:
    batch = [list(range(3, 3 + length)) for length in (1, 16, 33, 150)]
    expected = [output.token_ids for output in engine.generate(batch, GREEDY)]
    with llmc.load(build_bundle(tmp_path / "b", max_tokens=max_tokens), num_threads=1) as other:
        assert [output.token_ids for output in other.generate(batch, GREEDY)] == expected


def test_a_long_prompt_does_not_stop_decoding(engine: Engine) -> None:
    """max_tokens is 32: a prompt of 200 tokens takes several steps, in each of which the running request advances."""
    first = engine.submit([5], SamplingParams(max_tokens=50, ignore_eos=True))
    assert [chunk.request_id for chunk in engine.step()] == [first]
    second = engine.submit(list(range(3, 203)), GREEDY)
    for _ in range(6):
        assert [chunk.request_id for chunk in engine.step()] == [first]
    assert second in [chunk.request_id for chunk in engine.step()]


def test_first_come_first_served(toy_bundle: Path) -> None:
    with llmc.load(toy_bundle, num_threads=1, max_num_seqs=2) as narrow:
        ids = [narrow.submit([9] * 4, SamplingParams(max_tokens=4, ignore_eos=True)) for _ in range(5)]
        finished = []
        while narrow.has_unfinished:
            assert len(narrow.scheduler.running) <= 2
            finished += [chunk.request_id for chunk in narrow.step() if chunk.finish_reason]
        assert finished == ids


def test_a_seed_gives_the_same_tokens_in_any_company(engine: Engine) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1234, ignore_eos=True)
    alone = engine.generate([7, 8, 9], params).token_ids
    crowd = engine.generate([[5], [7, 8, 9], [6] * 40], [GREEDY, params, GREEDY])
    assert crowd[1].token_ids == alone
    assert engine.generate([7, 8, 9], SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=True)).token_ids != alone


def test_each_draw_has_the_requests_seed_and_the_index_of_its_token(toy_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a preemption, or a recomputed request would be sampled differently."""
    with llmc.load(toy_bundle, num_threads=1, kv_cache_bytes=128 * 8) as tiny:
        draws: dict[int, list[int]] = {}
        sample = tiny.executor.sample

        def record(logits: np.ndarray, sampling: np.ndarray) -> np.ndarray:
            for row in sampling:
                assert (row["temperature"], row["top_k"], row["top_p"], row["min_p"]) == (0.5, 7, 0.75, 0.25)
                draws.setdefault(int(row["seed"]), []).append(int(row["offset"]))
            return sample(logits, sampling)

        monkeypatch.setattr(tiny.executor, "sample", record)
        settings = {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "ignore_eos": True}
        params = [SamplingParams(max_tokens=70, seed=2**64 - 1 - index, **settings) for index in range(4)]
        outputs = tiny.generate([[5] * 20] * 4, params)
        assert sum(output.stats.num_preemptions for output in outputs) > 0
        assert draws == {each.seed: list(range(70)) for each in params}


def test_abort_frees_the_blocks(engine: Engine) -> None:
    ids = [engine.submit([5] * 40, GREEDY) for _ in range(3)]
    engine.step()
    for request_id in (ids[0], ids[2]):
        engine.abort(request_id)
    engine.abort(ids[0])
    engine.pool.check([request.blocks for request in engine.scheduler.running])
    finished = set()
    while engine.has_unfinished:
        finished |= {chunk.request_id for chunk in engine.step() if chunk.finish_reason}
    assert finished == {ids[1]}
    assert engine.pool.num_free == engine.pool.num_blocks


def test_aborting_a_streamed_request_ends_its_stream(engine: Engine) -> None:
    stream = engine.stream([5] * 40, GREEDY)
    engine.abort(next(stream).request_id)
    assert list(stream) == []
    assert not engine.has_unfinished


def test_closing_a_stream_aborts_it(engine: Engine) -> None:
    stream = engine.stream([5] * 40, GREEDY)
    next(stream)
    assert engine.has_unfinished
    del stream
    assert not engine.has_unfinished
    stream = engine.stream([5] * 40, GREEDY)
    del stream  # never started
    assert not engine.has_unfinished


def test_two_streams_and_a_submitted_request_share_steps(engine: Engine) -> None:
    expected = [engine.generate([index], GREEDY).token_ids for index in (5, 6, 7)]
    submitted = engine.submit([7], GREEDY)
    streams = [engine.stream([5], GREEDY), engine.stream([6], GREEDY)]
    got: list[list[int]] = [[], [], []]
    for pair in zip(*streams, strict=True):
        for tokens, chunk in zip(got, pair, strict=False):
            tokens += chunk.token_ids
    news = engine.step()
    assert {chunk.request_id for chunk in news} == {submitted}
    for chunk in news:
        got[2] += chunk.token_ids
    assert got == expected


def test_stream_joins_to_the_output(engine: Engine) -> None:
    chunks = list(engine.stream("the quick brown", SamplingParams(max_tokens=60, ignore_eos=True)))
    output = chunks[-1].output
    assert output is not None
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert [token for chunk in chunks for token in chunk.token_ids] == output.token_ids
    assert output.text == engine.tokenizer.decode(output.token_ids)
    assert [chunk.finish_reason for chunk in chunks] == [None] * 59 + ["length"]


def test_stop_string_ends_the_text_before_it(engine: Engine) -> None:
    whole = engine.generate("the quick brown", GREEDY).text
    for stop in (whole[5], whole[9:12], whole[-2:]):
        at = whole.index(stop)
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, stop=["never there", stop])
        chunks = list(engine.stream("the quick brown", params))
        assert "".join(chunk.text for chunk in chunks) == whole[:at]
        assert chunks[-1].finish_reason == "stop"
        assert chunks[-1].output is not None
        assert chunks[-1].output.text == whole[:at]


def test_eos_ends_and_ignore_eos_does_not(engine: Engine) -> None:
    token_ids = engine.generate([40, 41], GREEDY).token_ids
    at = next(index for index, token in enumerate(token_ids) if token not in token_ids[:index] and index > 5)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, stop_token_ids=[token_ids[at]])
    output = engine.generate([40, 41], params)
    assert output.finish_reason == "stop"
    assert output.token_ids == token_ids[: at + 1]
    assert output.text == engine.tokenizer.decode(token_ids[:at])
    engine.end_ids = frozenset([token_ids[at]])
    assert engine.generate([40, 41], SamplingParams(max_tokens=24, temperature=0.0)).token_ids == token_ids[: at + 1]


def test_end_ids_are_the_union_of_all_sources(engine: Engine) -> None:
    assert engine.end_ids == {1, 2}


def test_the_context_ends_a_request(engine: Engine) -> None:
    output = engine.generate([5] * 250, SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (6, "length")
    with pytest.raises(RequestError, match="256 tokens, which leaves no room in the context of 256"):
        engine.generate([5] * 256)


def test_a_request_that_never_fits_is_refused_with_figures(toy_bundle: Path) -> None:
    with llmc.load(toy_bundle, num_threads=1, kv_cache_bytes=128 * 4) as tiny:
        with pytest.raises(CapacityError, match=r"65 tokens \(40 prompt \+ 25 new\) or 5 KV blocks.*4 blocks for 64"):
            tiny.submit([5] * 40, SamplingParams(max_tokens=25))
        assert not tiny.has_unfinished
        with pytest.raises(CapacityError, match="5 KV blocks"):
            tiny.logits([5] * 65)


def test_one_bad_prompt_refuses_the_whole_list(engine: Engine) -> None:
    with pytest.raises(RequestError, match="token 1 is 300; expected a token id from 0 to 299"):
        engine.generate([[5], [5, 300]])
    assert not engine.has_unfinished


@pytest.mark.parametrize("prompt", [[], [5, -1], [5, True], [5, 2.0], b"abc", 7, [{"role": 3}], "\ud800"])
def test_malformed_prompts(engine: Engine, prompt: object) -> None:
    with pytest.raises(RequestError):
        engine.generate(prompt)  # type: ignore[arg-type]
    assert not engine.has_unfinished


def test_logits_are_independent_of_chunking(engine: Engine) -> None:
    ids = list(range(3, 103))
    whole = engine.logits(ids)
    assert whole.shape == (100, 300)
    assert whole.dtype == np.float32
    for length in (1, 31, 32, 33, 99):
        np.testing.assert_array_equal(engine.logits(ids[:length]), whole[:length])


def test_prompt_kinds_give_one_output_or_a_list(engine: Engine) -> None:
    message = [{"role": "user", "content": "the fox"}]
    outputs = engine.generate(["the fox", [5, 6], message], GREEDY)
    assert isinstance(outputs, list)
    for prompt, output in zip(("the fox", [5, 6], message), outputs, strict=True):
        single = engine.generate(prompt, GREEDY)
        assert isinstance(single, Output)
        assert single.token_ids == output.token_ids


def test_stats(engine: Engine) -> None:
    stats = engine.generate([5] * 40, GREEDY).stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.num_preemptions) == (40, 24, 0)
    assert 0 <= stats.queue_ms <= stats.ttft_ms <= stats.e2e_ms
    assert stats.prefill_tokens_per_s is not None
    assert stats.prefill_tokens_per_s > 0
    assert stats.decode_tokens_per_s is not None
    assert engine.generate([5], SamplingParams(max_tokens=1)).stats.decode_tokens_per_s is None


def test_a_closed_engine_refuses(toy_bundle: Path) -> None:
    engine = llmc.load(toy_bundle)
    engine.submit([5])
    engine.close()
    engine.close()
    with pytest.raises(RequestError, match="closed"):
        engine.generate([5])


def test_slots_are_the_requests_own(toy_bundle: Path) -> None:
    """Distinct within a step, the same from a request's first step to its last or its preemption, and handed out again."""
    with llmc.load(toy_bundle, num_threads=1, max_num_seqs=3, kv_cache_bytes=128 * 10) as engine:
        step = engine.executor.step
        held: dict[tuple[int, int], int] = {}  # by request and how often it was preempted
        used: list[int] = []

        def watch(batch: StepBatch) -> Logits:
            running = {request.blocks[0]: request for request in engine.scheduler.running}
            slots = batch.slots.tolist()
            assert len(set(slots)) == len(slots)
            assert batch.slot_start.tolist() == [0] * len(slots)
            for block, slot in zip(batch.block_table[:, 0].tolist(), slots, strict=True):
                if block in running:
                    request = running[block]
                    assert held.setdefault((request.id, request.num_preemptions), slot) == slot
                used.append(slot)
            return step(batch)

        engine.executor.step = watch  # type: ignore[method-assign]
        for index in range(5):
            engine.submit([3 + index] * 17, SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True))
        engine.step()
        engine.logits([5, 6, 7])  # beside running requests
        while engine.has_unfinished:
            engine.step()
        assert {request for request, _ in held} == set(range(5))
        assert any(preemptions for _, preemptions in held)
        assert set(held.values()) == {0, 1, 2}
        assert used.count(3) == 1
