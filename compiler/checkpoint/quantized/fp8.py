"""FP8 checkpoints: E4M3 weights with one multiplier for the tensor, for each row, or for each block (Micikevicius et al. 2022)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ....errors import CheckpointError
from ....formats.floats import Float32, Fp8Matrix, from_fp8, row_slices
from .base import QuantizedWeight, StoredKind
from .format import Format
from .module import FLOATS, Module
from .settings import Settings

FP8_TYPES = ("F8_E4M3",)
SCALE_TYPES = (*FLOATS, "F8_E8M0")


class Fp8Format(Format):
    """`weight` in E4M3 and `weight_scale` or `weight_scale_inv`, both of them multipliers; `input_scale` is not used."""

    method = "fp8"
    parts = frozenset({"weight_scale", "weight_scale_inv"})

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.block = settings.pair("weight_block_size")
        self.plain = settings.names("modules_to_not_convert", "ignored_layers")

    def quantizes(self, names: tuple[str, ...]) -> bool:
        return not self.settings.covers(self.plain, names)

    def weight(self, module: Module) -> QuantizedWeight | None:
        scales = sorted(self.parts & module.parts.keys())
        stored = "weight" in module and module.type("weight").startswith("F8_")
        if not scales and not stored:
            return None
        module.require("weight", *(scales or ["weight_scale"]))
        if len(scales) > 1:
            module.refuse(scales[1], beside=scales[0])
        module.expect_type("weight", *FP8_TYPES)
        n, k = module.shape("weight", 2)
        blocks = dict.fromkeys([(), (1,), (1, 1)], (n, k)) | {(n,): (1, k), (n, 1): (1, k)}
        if self.block is not None and module.any_shape(scales[0]) not in blocks:
            blocks[-(-n // self.block[0]), -(-k // self.block[1])] = self.block
        module.expect(scales[0], *blocks, types=SCALE_TYPES)
        return Fp8Weight(module, (n, k), scales[0], blocks[module.any_shape(scales[0])])


class Fp8Weight(QuantizedWeight):
    """E4M3 bits with a scale for each block of `block` rows and columns; a row or the whole matrix are blocks, too."""

    stored_type = FP8_TYPES[0]

    def __init__(self, module: Module, shape: tuple[int, int], scale: str, block: tuple[int, int]) -> None:
        self.module = module
        self.shape = shape
        self.scale = scale
        self.block = block

    def kind(self) -> StoredKind:
        (n, k), (rows, columns) = self.shape, self.block
        if columns >= k:
            width = (
                "one scale for the tensor"
                if rows >= n and n > 1
                else "one scale a row"
                if rows == 1
                else f"a scale for {rows} rows"
            )
            return StoredKind(stored=f"E4M3, {width}", bits=8, group=None, kept_as="fp8")
        stored = f"E4M3, blocks of {rows} x {columns}"
        return StoredKind(stored=stored, bits=8, group=columns, kept_as=None, remark="kernels have one scale a row")

    def matrix(self) -> Fp8Matrix | None:
        if self.block[1] < self.shape[1]:
            return None
        return Fp8Matrix(bits=self._bits(), scale=np.ascontiguousarray(self._row_scales()[:, 0]))

    def dequantize(self) -> Float32:
        bits, scale = self._bits(), self._row_scales()
        groups = np.arange(self.shape[1]) // self.block[1]
        out = np.empty(self.shape, np.float32)
        for rows in row_slices(*self.shape):
            out[rows] = from_fp8(bits[rows], fnuz=False) * scale[rows][:, groups]
        return out

    def _row_scales(self) -> Float32:
        """`[N, G]`: scales of column blocks, repeated for each row of a block."""
        n, k = self.shape
        rows, columns = self.block
        scale = self.module.scales(self.scale).reshape(-(-n // rows), -(-k // columns))
        return np.repeat(scale, rows, axis=0)[:n]

    def _bits(self) -> npt.NDArray[np.uint8]:
        import torch

        bits: npt.NDArray[np.uint8] = self.module.tensor("weight").view(torch.uint8).numpy()
        if ((bits & np.uint8(0x7F)) == 0x7F).any():
            raise self._nan()
        return bits

    def _nan(self) -> CheckpointError:
        return self.module.damaged("weight", "holds NaN, expected finite E4M3 values; quantise the model again")
