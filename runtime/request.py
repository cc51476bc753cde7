"""A request on its way through the engine: its tokens, its KV blocks and the text it has produced."""

from __future__ import annotations

from dataclasses import dataclass, field

from .detokenizer import Detokenizer
from .sampling_params import SamplingParams
from .stop_strings import StopStrings


@dataclass(slots=True, kw_only=True)
class Request:
    """One sequence. Times are seconds of `time.perf_counter`."""

    # Set when it is made.
    id: int
    prompt_ids: list[int]
    params: SamplingParams  # resolved: no field is None
    seed: int
    max_output: int  # max_tokens, cut to what the context leaves
    end_ids: frozenset[int]
    detokenizer: Detokenizer
    stop_strings: StopStrings
    submitted_at: float
    # Set by the scheduler.
    blocks: list[int] = field(default_factory=list)  # block table
    slot: int | None = None  # among the executor's, while it runs
    slot_start: int = 0  # tokens that were in the pool when it got the slot
    num_computed: int = 0  # tokens whose keys and values are in the pool
    num_preemptions: int = 0
    # Set by the engine after each step.
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_pending(self) -> int:
        """Tokens that a step has yet to compute; 1 while decoding."""
        return self.num_tokens - self.num_computed

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions `start .. stop-1`."""
        offset = len(self.prompt_ids)
        if start >= offset:
            return self.output_ids[start - offset : stop - offset]
        return self.prompt_ids[start:stop] + self.output_ids[: max(stop - offset, 0)]
