"""How the next token of a request is chosen and when the request ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..errors import RequestError

N = TypeVar("N", int, float)

DEFAULT_MAX_TOKENS = 256
MAX_STOPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling and stopping rules; raises RequestError for a value out of range.

    A sampling field left at None takes the model's own default (its generation_config.json), and where the model has
    none: greedy, with no top-k, top-p or min-p.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS  # most tokens to generate; the end of the context also ends a request
    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None  # 0 is off
    top_p: float | None = None  # 1 is off
    min_p: float | None = None  # 0 is off; least probability as a share of the likeliest token's
    seed: int | None = None  # None draws one; the same seed gives the same tokens whatever else is in the batch
    stop: str | Sequence[str] = ()  # strings that end the text and are not part of it
    stop_token_ids: Sequence[int] = ()  # like the model's end-of-sequence ids
    ignore_eos: bool = False  # go on past the model's end-of-sequence ids

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p=0 leaves no token to choose; for greedy decoding use temperature=0")
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("seed", self.seed, 0, 2**64 - 1)
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        if len(stop) > MAX_STOPS:
            raise RequestError(f"stop has {len(stop)} strings; at most {MAX_STOPS} are allowed")
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop={self.stop!r}: expected a non-empty string or a list of them")
        ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        for token_id in ids:
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={self.ignore_eos!r}: expected True or False")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)

    def resolve(self, defaults: SamplingParams) -> SamplingParams:
        """These params with every sampling field that is None taken from `defaults`, else set to greedy or off."""
        return replace(
            self,
            temperature=_first(self.temperature, defaults.temperature) or 0.0,
            top_k=_first(self.top_k, defaults.top_k) or 0,
            top_p=_first(self.top_p, defaults.top_p) or 1.0,
            min_p=_first(self.min_p, defaults.min_p) or 0.0,
        )

    @classmethod
    def from_generation_config(cls, config: Mapping[str, object]) -> SamplingParams:
        """The defaults a model's generation_config.json asks for: greedy unless `do_sample` is true.

        Values outside the allowed ranges are ignored, since no request asked for them.
        """
        if config.get("do_sample") is not True:
            return cls(temperature=0.0)
        params = cls(temperature=1.0)
        for name in ("temperature", "top_k", "top_p", "min_p"):
            value = config.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                try:
                    params = replace(params, **{name: value})  # type: ignore[arg-type]
                except RequestError:
                    continue
        return params


def _first(value: N | None, default: N | None) -> N | None:
    return default if value is None else value


def _as_tuple(name: str, values: object) -> tuple[object, ...]:
    if not isinstance(values, Sequence | set | frozenset) or isinstance(values, bytes | str):
        raise RequestError(f"{name}={values!r}: expected a list")
    return tuple(values)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if value is None and name in ("top_k", "seed"):
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name}={value!r}: expected a whole number from {low} to {high}")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if value is None:
        return
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= float(value) <= high:  # type: ignore[arg-type]
        raise RequestError(f"{name}={value!r}: expected a number from {low:g} to {high:g}")
