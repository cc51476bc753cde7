"""What a request gives back: pieces while it runs, and at its end the whole output with its timings."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts and timings of one request; a rate is None where there was nothing to measure it on."""

    prompt_tokens: int
    generated_tokens: int
    queue_ms: float  # from submission to the first step that took part of it
    ttft_ms: float  # from submission to the first token
    e2e_ms: float  # from submission to the last token
    prefill_tokens_per_s: float | None  # prompt tokens over the time from the first step to the first token
    decode_tokens_per_s: float | None  # tokens after the first over the time they took
    num_preemptions: int

    def to_dict(self) -> dict[str, int | float | None]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, request: Request) -> Stats:
        """The stats of a finished request."""
        submitted = request.submitted_at
        scheduled = submitted if request.scheduled_at is None else request.scheduled_at
        first = scheduled if request.first_token_at is None else request.first_token_at
        last = first if request.last_token_at is None else request.last_token_at
        return cls(
            prompt_tokens=len(request.prompt_ids),
            generated_tokens=len(request.output_ids),
            queue_ms=(scheduled - submitted) * 1e3,
            ttft_ms=(first - submitted) * 1e3,
            e2e_ms=(last - submitted) * 1e3,
            prefill_tokens_per_s=_rate(len(request.prompt_ids), first - scheduled),
            decode_tokens_per_s=_rate(len(request.output_ids) - 1, last - first),
            num_preemptions=request.num_preemptions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The result of one request.

    `token_ids` are all generated ids, the one that ended the text included. `text` is what they decode to without
    special tokens, cut before a stop string. `finish_reason` is "stop" (end of sequence, stop id or stop string)
    or "length" (max_tokens or the end of the context).
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """News of one request after a step.

    `text` may be empty while an incomplete character or the beginning of a stop string is withheld; joined, the texts
    are the output's. The last chunk has a `finish_reason` and the whole `output`.
    """

    request_id: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: Output | None = None


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
