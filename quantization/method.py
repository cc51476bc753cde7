"""The names of quantisation methods: how scales move between layers first, and how matrices are rounded then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from ..errors import UsageError

Equalisation: TypeAlias = Literal["awq", "smoothquant"]
Rounding: TypeAlias = Literal["rtn", "opt-rtn", "gptq", "autoround"]
EQUALISATIONS: Final[tuple[Equalisation, ...]] = get_args(Equalisation)
ROUNDINGS: Final[tuple[Rounding, ...]] = get_args(Rounding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """`awq`, `gptq`, `smoothquant+gptq`, ...: at most one of each kind; rounding after equalisation alone is `opt-rtn`."""

    equalisation: Equalisation | None = None
    rounding: Rounding = "rtn"

    @classmethod
    def parse(cls, name: str) -> Method:
        """Raises UsageError for an unknown name or order."""
        first, plus, second = name.partition("+")
        if first in EQUALISATIONS and not plus:
            return cls(equalisation=first, rounding="opt-rtn")
        if first in EQUALISATIONS and second in ROUNDINGS:
            return cls(equalisation=first, rounding=second)
        if first in ROUNDINGS and not plus:
            return cls(rounding=first)
        raise UsageError(
            f"method {name!r} is unknown; choose one of {', '.join(ROUNDINGS)}, or {' or '.join(EQUALISATIONS)}, alone or followed by "
            "+ and one of the former, such as awq+gptq"
        )

    def __str__(self) -> str:
        return f"{self.equalisation}+{self.rounding}" if self.equalisation else self.rounding

    @property
    def needs_calibration(self) -> bool:
        """Whether it looks at activations."""
        return self != Method()
