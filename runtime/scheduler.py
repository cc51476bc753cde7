"""Decides what a step computes: continuous batching under one token budget, with chunked prefill and preemption."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..errors import CapacityError
from .block_pool import BlockPool, blocks_for
from .program import BLOCK_SIZE
from .request import Request


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next `num_tokens` tokens of a request, to be computed in this step."""

    request: Request
    num_tokens: int

    @property
    def completes(self) -> bool:
        """Whether the request's next token can be sampled from this step."""
        return self.num_tokens == self.request.num_pending


class Scheduler:
    """First come, first served.

    Two invariants make it short. Every running request arrived before every waiting one. And since a request is only
    admitted with what the running ones leave of the budget, at most the last running one is in the middle of its
    prompt: decoding never waits for a long prompt.
    """

    def __init__(self, pool: BlockPool, *, max_tokens: int, max_num_seqs: int) -> None:
        self.pool = pool
        self.max_tokens = max_tokens  # of one step
        self.max_num_seqs = min(max_num_seqs, max_tokens)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._free_slots = list(reversed(range(self.max_num_seqs)))  # the one freed last is taken first

    @property
    def spare_slot(self) -> int:
        """A slot that no request ever gets, for a sequence beside them."""
        return self.max_num_seqs

    def add(self, request: Request) -> None:
        """Queue a request; raises CapacityError for one that would not fit in an empty pool."""
        longest = len(request.prompt_ids) + request.max_output
        needed = blocks_for(longest)
        if needed > self.pool.num_blocks:
            raise CapacityError(
                f"the request may grow to {longest} tokens ({len(request.prompt_ids)} prompt + {request.max_output} "
                f"new) or {needed} KV blocks, but the pool has {self.pool.num_blocks} blocks for "
                f"{self.pool.num_blocks * BLOCK_SIZE} tokens; shorten it, lower max_tokens or load with a larger "
                "kv_cache_bytes"
            )
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Drop a finished or aborted request and free its blocks and slot."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request)

    def schedule(self) -> list[ScheduledChunk]:
        """The chunks of the next step, with blocks allocated for them; empty when there is nothing to do."""
        budget = self.max_tokens
        chunks: list[ScheduledChunk] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            num_tokens = min(request.num_pending, budget)
            while not self._grow(request, request.num_computed + num_tokens):
                preempted = True
                if self._preempt_last() is request:
                    break
            else:
                chunks.append(ScheduledChunk(request, num_tokens))
                budget -= num_tokens
            index += 1
        while self.waiting and budget and not preempted and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            # A block for the whole prompt now, and one left over for each running request to grow into.
            if blocks_for(request.num_tokens) + len(self.running) > self.pool.num_free and self.running:
                break
            if not self._grow(request, request.num_tokens):
                break
            self.running.append(self.waiting.popleft())
            request.slot, request.slot_start = self._free_slots.pop(), request.num_computed
            num_tokens = min(request.num_pending, budget)
            chunks.append(ScheduledChunk(request, num_tokens))
            budget -= num_tokens
        return chunks

    def _grow(self, request: Request, num_tokens: int) -> bool:
        missing = blocks_for(num_tokens) - len(request.blocks)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            request.blocks += self.pool.allocate(missing)
        return True

    def _preempt_last(self) -> Request:
        """Send the last running request back to the queue; its keys and values are computed again later."""
        request = self.running.pop()
        self._release(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        return request

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        if request.slot is not None:
            self._free_slots.append(request.slot)
            request.slot = None
