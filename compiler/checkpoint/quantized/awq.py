"""AWQ checkpoints in AutoAWQ's `gemm` layout: 4 bits, columns of outputs packed in an order of their own (Lin et al. 2024)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ....errors import UnsupportedModelError
from ....formats.floats import Array
from .base import QuantizedWeight
from .format import Format
from .integer import GroupParameters, IntegerWeight
from .module import FLOATS, Module
from .settings import Settings

_BITS = 4
_PER_WORD = 32 // _BITS
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds output 8 * word + _ORDER[i]


class AwqFormat(Format):
    """`qweight` int32 `[K, N/8]`, `qzeros` int32 `[G, N/8]`, `scales` `[G, N]`; zeros are stored as they are."""

    method = "awq"
    parts = frozenset({"qweight", "qzeros", "scales"})

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        key = "version" if "version" in settings.values else "format"
        settings.choice(key, ("gemm",), "gemm")
        if (bits := settings.integer("bits", _BITS)) != _BITS:
            raise UnsupportedModelError(f"{settings.where}.bits is {bits}; the gemm layout of AWQ has {_BITS}")
        self.group = settings.group_size("group_size", 128)
        self.zero_point = settings.flag("zero_point", True)
        self.plain = settings.names("modules_to_not_convert")

    def quantizes(self, names: tuple[str, ...]) -> bool:
        return not self.settings.covers(self.plain, names)

    def weight(self, module: Module) -> QuantizedWeight | None:
        if not self.parts & module.parts.keys():
            return None
        module.require("qweight", "scales", *(("qzeros",) if self.zero_point else ()))
        module.refuse("weight", beside="qweight")
        k, words = module.shape("qweight", 2)
        n, groups = words * _PER_WORD, -(-k // (self.group or k))
        given = f"groups of {self.group or k}, as the config says"
        module.expect("qweight", (k, words), types=("I32",))
        module.expect("scales", (groups, n), types=FLOATS, given=given)
        if "qzeros" in module:
            module.expect("qzeros", (groups, words), types=("I32",), given=given)
        return AwqWeight(module, (n, k), self.group, zero_point=self.zero_point)


class AwqWeight(IntegerWeight):
    """A weight in the gemm layout."""

    def __init__(self, module: Module, shape: tuple[int, int], group: int | None, *, zero_point: bool) -> None:
        super().__init__(module, _BITS, shape)
        self.group = group
        self.zero_point = zero_point

    def parameters(self) -> GroupParameters:
        scale = np.ascontiguousarray(self.module.scales("scales").T)
        zero = np.full(scale.shape, 1 << (_BITS - 1), np.int16)
        if "qzeros" in self.module:
            stored = _outputs(self.module.integers("qzeros"))
            if self.zero_point:
                zero = stored.astype(np.int16)
            elif (stored != zero).any():
                raise self.module.damaged("qzeros", "holds zeros other than 8, but the config says zero_point: false")
        return GroupParameters(bits=_BITS, columns=self.shape[1], group=self.group, scale=scale, zero=zero)

    def codes(self) -> npt.NDArray[np.uint8]:
        return _outputs(self.module.integers("qweight"))


def _outputs(words: Array) -> npt.NDArray[np.uint8]:
    """`[R, N/8]` to codes `[N, R]`, outputs in order."""
    columns = np.ascontiguousarray(words.T).view(np.uint32)  # [N/8, R]
    codes = np.empty((len(columns), _PER_WORD, columns.shape[1]), np.uint8)
    for nibble, output in enumerate(_ORDER):
        codes[:, output] = (columns >> np.uint32(_BITS * nibble)).astype(np.uint8) & np.uint8(15)
    return codes.reshape(-1, columns.shape[1])
