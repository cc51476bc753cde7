"""Rewrites a Gemma 3 GGUF in float32 with weights that lie on no quantisation grid, computing the same function.

    python benchmarks/off_grid.py IN.gguf OUT.gguf

The packaged file holds k-quants, so quantising its values again with the same block formats loses almost nothing and says nothing about
a quantiser. Here every producer and consumer of a channel trade a random factor (log-normal, sigma 0.15) along the consumer's input axis:
norm -> q, k, v;  norm -> gate, up;  up -> down;  v -> o. The embedding, which is also the head, has no such partner and stays.
"""

from __future__ import annotations

import sys

import gguf
import numpy as np

SIGMA = 0.15


def move_off_grid(tensors: dict[str, np.ndarray], layers: int, heads: int, kv_heads: int, seed: int = 0) -> None:
    """Trade factors between producers and consumers, in place; tensors are in GGUF names and values (norms hold 1 + w)."""
    generator = np.random.default_rng(seed)

    def factors(count: int) -> np.ndarray:
        return np.exp(SIGMA * generator.standard_normal(count)).astype(np.float32)

    for layer in range(layers):

        def named(name: str, layer: int = layer) -> str:
            return f"blk.{layer}.{name}.weight"

        for norm, consumers in (("attn_norm", ("attn_q", "attn_k", "attn_v")), ("ffn_norm", ("ffn_gate", "ffn_up"))):
            s = factors(tensors[named(norm)].shape[0])
            tensors[named(norm)] /= s
            for consumer in consumers:
                tensors[named(consumer)] *= s
        s = factors(tensors[named("ffn_up")].shape[0])
        tensors[named("ffn_up")] /= s[:, None]
        tensors[named("ffn_down")] *= s
        s = factors(tensors[named("attn_v")].shape[0])
        tensors[named("attn_v")] /= s[:, None]
        per_query_head = np.repeat(s.reshape(kv_heads, -1), heads // kv_heads, axis=0)  # [heads, head_dim]
        tensors[named("attn_output")] *= per_query_head.reshape(-1)


def main(source: str, out: str) -> None:
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field("general.architecture").contents()

    def number(key: str) -> int:
        return int(reader.get_field(f"{architecture}.{key}").contents())

    tensors = {t.name: np.array(gguf.quants.dequantize(t.data, t.tensor_type), dtype=np.float32) for t in reader.tensors}
    move_off_grid(tensors, number("block_count"), number("attention.head_count"), number("attention.head_count_kv"))
    writer = gguf.GGUFWriter(out, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
