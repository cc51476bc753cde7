"""The engine: takes requests, runs steps, gives back text."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import TracebackType
from typing import cast

import numpy as np

from ..errors import CapacityError, RequestError
from .block_pool import BlockPool, blocks_for
from .executor import SAMPLING_DTYPE, Executor, Logits, StepBatch
from .executor.base import Float32, Int32
from .outputs import Chunk, Output, Stats
from .prompt import Prompt, PromptEncoder, is_batch
from .request import Request
from .sampling_params import SamplingParams
from .scheduler import ScheduledChunk, Scheduler
from .stop_strings import StopStrings
from .tokenizer import Tokenizer


class Engine:
    """Serves one model on one device; made by `llmc.load`.

    Synchronous and deterministic: nothing happens outside of `step`, which the blocking calls run until their
    requests are done. Not thread-safe. Requests are batched with each other however they came in.
    """

    def __init__(
        self,
        executor: Executor,
        encoder: PromptEncoder,
        *,
        max_tokens: int,
        context_length: int,
        max_num_seqs: int,
        end_ids: frozenset[int],
        default_params: SamplingParams,
        target_choice: str = "",
    ) -> None:
        """`max_tokens` is the most tokens of one step; `max_num_seqs` the most requests that run at a time.

        `target_choice` says for people which target of the bundle runs and why that one.
        """
        self.executor = executor
        self.encoder = encoder
        self.context_length = context_length
        self.end_ids = end_ids
        self.default_params = default_params
        self.target_choice = target_choice
        self.pool = BlockPool(executor.num_kv_blocks)
        self.scheduler = Scheduler(self.pool, max_tokens=max_tokens, max_num_seqs=max_num_seqs)
        self._requests: dict[int, Request] = {}
        self._inboxes: dict[int, deque[Chunk]] = {}  # of requests that a blocking call waits for
        self._news: list[Chunk] = []  # of all others, until the next step() returns them
        self._next_id = 0
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.encoder.tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether messages are a valid prompt."""
        return self.encoder.template is not None

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has work to do."""
        return bool(self._requests)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a request and return its id; `step` reports on it.

        Raises RequestError for a malformed prompt or one that fills the context, CapacityError for one that the KV
        pool could never hold.
        """
        self._check_open()
        params = (params or SamplingParams()).resolve(self.default_params)
        if params is not None and not isinstance(params, SamplingParams):
            raise RequestError(f"params is {params!r:.80}; expected SamplingParams")
        prompt_ids = self.encoder.encode(prompt)
        room = self.context_length - len(prompt_ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, which leaves no room in the context of "
                f"{self.context_length}; shorten it"
            )
        request = Request(
            id=self._next_id,
            prompt_ids=prompt_ids,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            max_output=min(params.max_tokens, room),
            end_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_ids),
            detokenizer=self.tokenizer.detokenizer(),
            stop_strings=StopStrings(params.stop),
            submitted_at=time.perf_counter(),
        )
        self.scheduler.add(request)
        self._requests[request.id] = request
        self._next_id += 1
        return request.id

    def abort(self, request_id: int) -> None:
        """Drop a request and free its blocks at once; an unknown or finished id is ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.remove(request)
        self._inboxes.pop(request_id, None)

    def step(self) -> list[Chunk]:
        """Compute one step and return the news of every request that no `generate` or `stream` call waits for."""
        self._advance()
        news, self._news = self._news, []
        return news

    def generate(
        self, prompt: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Output | list[Output]:
        """Generate for a prompt, or for a list of prompts with shared params or a list of params.

        A prompt is text, a list of token ids, or a list of messages for the chat template. Raises RequestError and
        CapacityError; if one prompt of a list is refused, none is run.
        """
        if not is_batch(prompt):
            if isinstance(params, Sequence):
                raise RequestError(f"{len(params)} params were given for one prompt; expected one")
            return self._run([cast("Prompt", prompt)], [params])[0]
        prompts = cast("Sequence[Prompt]", prompt)
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(f"{len(each)} params were given for {len(prompts)} prompts")
        return self._run(prompts, each)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Generate for one prompt, yielding a chunk for each step that produced a token.

        The request is queued by this call, so that its errors are raised here; closing the iterator aborts it.
        """
        request_id = self.submit(prompt, params)
        self._inboxes[request_id] = deque()
        chunks = self._chunks(request_id)
        next(chunks)  # enter the generator, so that closing or dropping it runs its cleanup
        return cast("Iterator[Chunk]", chunks)

    def logits(self, token_ids: Sequence[int]) -> Float32:
        """Next-token logits `[T, V]` at every position of a sequence, for measuring quality.

        Raises RequestError for ids out of range or more than the context, CapacityError if the free part of the KV
        pool is too small.
        """
        self._check_open()
        ids = self.encoder.encode(list(token_ids))
        if len(ids) > self.context_length:
            raise RequestError(f"{len(ids)} tokens are more than the context of {self.context_length}")
        needed = blocks_for(len(ids))
        if needed > self.pool.num_free:
            raise CapacityError(
                f"{len(ids)} tokens need {needed} KV blocks, but {self.pool.num_free} of {self.pool.num_blocks} are free"
            )
        blocks = self.pool.allocate(needed)
        rows = []
        try:
            length = min(self.scheduler.max_tokens, self.executor.max_logit_rows)
            for start in range(0, len(ids), length):
                chunk = ids[start : start + length]
                slot = (self.scheduler.spare_slot, 0)
                logits = self.executor.step(StepBatch.build([(chunk, start, blocks)], range(len(chunk)), [slot]))
                rows.append(logits.numpy().copy())
        finally:
            self.pool.release(blocks)
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def close(self) -> None:
        """Drop all requests and free the memory; the engine cannot be used afterwards."""
        if self._closed:
            return
        for request_id in list(self._requests):
            self.abort(request_id)
        self._closed = True
        self.executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the engine is closed; load the bundle again")

    def _run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None]) -> list[Output]:
        ids: list[int] = []
        outputs: dict[int, Output] = {}
        try:
            for prompt, each in zip(prompts, params, strict=True):
                ids.append(self.submit(prompt, each))
                self._inboxes[ids[-1]] = deque()
            while len(outputs) < len(ids):
                self._advance()
                for request_id in ids:
                    inbox = self._inboxes.get(request_id)
                    if inbox and inbox[-1].output is not None:
                        outputs[request_id] = inbox[-1].output
                        del self._inboxes[request_id]
        finally:
            for request_id in ids:
                self.abort(request_id)
        return [outputs[request_id] for request_id in ids]

    def _chunks(self, request_id: int) -> Iterator[Chunk | None]:
        try:
            yield None
            inbox = self._inboxes[request_id]
            while True:
                while not inbox:
                    if request_id not in self._requests:
                        return  # aborted
                    self._advance()
                chunk = inbox.popleft()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self.abort(request_id)

    def _advance(self) -> None:
        """One step: schedule, compute, sample, and file the news."""
        self._check_open()
        scheduled = self.scheduler.schedule()
        if not scheduled:
            if self._requests:
                raise AssertionError(f"{len(self._requests)} requests wait, but none could be scheduled")
            return
        now = time.perf_counter()
        sequences, slots = [], []
        for item in scheduled:
            request = item.request
            if request.scheduled_at is None:
                request.scheduled_at = now
            start = request.num_computed
            sequences.append((request.tokens(start, start + item.num_tokens), start, request.blocks))
            assert request.slot is not None, "a scheduled request runs"
            slots.append((request.slot, request.slot_start))
        ends = [end - 1 for end in accumulate(item.num_tokens for item in scheduled)]
        completing = [index for index, item in enumerate(scheduled) if item.completes]
        logits = self.executor.step(StepBatch.build(sequences, [ends[index] for index in completing], slots))
        sampled = self._sample(logits, [scheduled[index] for index in completing])
        now = time.perf_counter()
        requests = [scheduled[index].request for index in completing]
        for item in scheduled:
            item.request.num_computed += item.num_tokens
        for request, token_id in zip(requests, sampled.tolist(), strict=True):
            chunk = self._accept(request, token_id, now)
            self._inboxes.get(request.id, self._news).append(chunk)

    def _sample(self, logits: Logits, completing: list[ScheduledChunk]) -> Int32:
        if not completing:
            return np.empty(0, np.int32)
        rows = []
        for request in (item.request for item in completing):
            params = request.params
            chosen = (params.temperature, params.top_k, params.top_p, params.min_p)
            rows.append((*chosen, request.seed, len(request.output_ids)))
        return self.executor.sample(logits, np.array(rows, SAMPLING_DTYPE))

    def _accept(self, request: Request, token_id: int, now: float) -> Chunk:
        """Append a sampled token, decide whether the request has ended, and free it if so."""
        request.output_ids.append(token_id)
        request.last_token_at = now
        if request.first_token_at is None:
            request.first_token_at = now
        if token_id in request.end_ids:
            request.finish_reason = "stop"
            text = request.stop_strings.push(request.detokenizer.finish())
        else:
            text = request.stop_strings.push(request.detokenizer.push(token_id))
            if request.stop_strings.matched is None and len(request.output_ids) >= request.max_output:
                request.finish_reason = "length"
                text += request.stop_strings.push(request.detokenizer.finish())
        if request.stop_strings.matched is not None:
            request.finish_reason = "stop"
        if request.finish_reason is None:
            request.text += text
            return Chunk(request_id=request.id, text=text, token_ids=[token_id])
        text += request.stop_strings.finish()
        request.text += text
        self.scheduler.remove(request)
        del self._requests[request.id]
        output = Output(
            text=request.text,
            token_ids=request.output_ids,
            finish_reason=request.finish_reason,
            stats=Stats.of(request),
        )
        return Chunk(
            request_id=request.id,
            text=text,
            token_ids=[token_id],
            finish_reason=request.finish_reason,
            output=output,
        )
