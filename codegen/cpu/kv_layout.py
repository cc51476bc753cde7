"""Where the keys and values of each layer lie in a block of the KV pool and in a sequence's slot, and what attention needs beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import fx

from ...passes.dialect import llmc
from ...passes.graph import calls
from ...passes.insert_kv_cache import KvCacheShape
from ...passes.kv_formats import is_packed
from ...runtime.program import KV_SLOT_BLOCKS, KvCacheSpec, kv_head_bytes

_KERNEL_TYPES = {"f32": "KvF32", "bf16": "KvBf16", "fp8": "KvFp8", "int8": "KvInt8", "int4": "KvInt4"}
_PREFILL_ROWS, _DECODE_ROWS = 32, 8  # of a tile
_DECODE_SLOTS = 256  # partial results of a decode wave
_CHUNK = 128  # keys


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The pool of one program. Layers lie one after another, in blocks and in slots; only packed layers are in slots."""

    shape: KvCacheShape
    formats: tuple[str, ...]  # of each layer

    @classmethod
    def of(cls, module: fx.GraphModule) -> KvLayout:
        """The layout for the formats that `quantize-kv` has set."""
        formats = {cast(int, n.args[17]): cast(str, n.args[18]) for n in calls(module, llmc.rope_paged_attention.default)}
        return cls(shape=cast(KvCacheShape, module.meta["kv_cache"]), formats=tuple(formats[i] for i in sorted(formats)))

    def kernel_type(self, layer: int) -> str:
        """The C++ type of a layer."""
        return _KERNEL_TYPES[self.formats[layer]]

    def is_packed(self, layer: int) -> bool:
        """Whether a layer needs slots."""
        return is_packed(self.formats[layer])

    def place(self, layer: int) -> str:
        """The `KvPlace` of a layer, as C++."""
        before = self.formats[:layer]
        offsets = (
            sum(map(self._layer_bytes, before)),
            self.bytes_per_block,
            sum(map(self._slot_bytes, before)),
            self.bytes_per_slot,
        )
        return f"KvPlace{{{', '.join(map(str, offsets))}}}"

    @property
    def bytes_per_block(self) -> int:
        """Bytes of 16 tokens of all layers."""
        return sum(map(self._layer_bytes, self.formats))

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that a running sequence takes beside the pool."""
        return sum(map(self._slot_bytes, self.formats))

    def spec(self) -> KvCacheSpec:
        """The layout as program.json has it."""
        return KvCacheSpec(
            layer_dtypes=list(self.formats),
            num_layers=self.shape.num_layers,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            block_size=self.shape.block_size,
            bytes_per_block=self.bytes_per_block,
            bytes_per_slot=self.bytes_per_slot,
        )

    def workspace_bytes(self, *, max_tokens: int, num_heads: int, threads: int) -> int:
        """Bytes of an attention kernel's workspace for any layer."""
        return attention_workspace_bytes(
            max_tokens, num_heads, self.shape.head_dim, packed=any(map(is_packed, self.formats)), threads=threads
        )

    def _layer_bytes(self, format: str) -> int:
        tokens = 2 * self.shape.num_kv_heads * self.shape.block_size  # keys and values
        return tokens * kv_head_bytes(format, self.shape.head_dim)

    def _slot_bytes(self, format: str) -> int:
        return KV_SLOT_BLOCKS * self._layer_bytes("bf16") if is_packed(format) else 0


def attention_workspace_bytes(max_tokens: int, num_heads: int, dim: int, *, packed: bool, threads: int) -> int:
    """The same as `llmc::attention_workspace_bytes` (`attention.hpp`)."""
    width = -(-dim // 16) * 16
    chunk = _CHUNK * (dim + 2) if packed else 0

    def state(rows: int) -> int:
        return -(-rows * (width + 2) // 16) * 16

    prefill = threads * (_PREFILL_ROWS * (width + _CHUNK) + chunk + 2 * state(_PREFILL_ROWS))
    decode = threads * (_DECODE_ROWS * (width + _CHUNK) + chunk)
    decode += _DECODE_SLOTS * state(_DECODE_ROWS) + max_tokens * num_heads * (width + 2)
    return -(-4 * max(prefill, decode) // 64) * 64
