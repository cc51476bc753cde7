// The blocks of a chunk of packed keys and values as bf16: from the sequence's slot where a query reads them in 16 bit,
// unpacked from the pool where it does not.
#pragma once

#include "attention_chunk.hpp"

namespace llmc {

// A kept block whose tokens are in this step, all or some: they reach the slot only after attention.
template <int D>
LLMC_INLINE void gather_block(const AttentionArgs& a, const KvLayer<D, KvBf16>& slot, const RowTile& tile, int block,
                              const UnpackedBlock& out) {
  const int first_token = a.step->query_start[tile.sequence], start = a.step->positions[first_token];
  const int begin = block * kBlock, end = tile.end(a, tile.rows - 1);
  if (begin < start) {
    std::memcpy(out.keys, slot.keys(slot_block(block), tile.kv_head), sizeof(uint16_t) * D * kBlock);
    std::memcpy(out.values, slot.values(slot_block(block), tile.kv_head), sizeof(uint16_t) * D * kBlock);
  }
  for (int p = begin > start ? begin : start; p < end && p < begin + kBlock; ++p) {
    const float* token = a.qkv + int64_t{first_token + p - start} * a.ldq;
    write_token<D, KvBf16>(out.keys, out.values, p - begin, token + (a.HQ + tile.kv_head) * D,
                           token + (a.HQ + a.HKV + tile.kv_head) * D);
  }
}

// Values that are exact in bf16 give the same bits packed or unpacked; with few rows unpacking them first does not pay.
constexpr int kDirectRows = 8;

template <int D, class KV>
LLMC_INLINE ChunkView<uint16_t> open_chunk(const AttentionArgs& a, const PackedLayer<D, KV>& cache, const RowTile& tile, int chunk,
                                           int first_block, int end_block, TileScratch<D, KV> scratch) {
  const int32_t* blocks = a.step->block_table + int64_t{tile.sequence} * a.step->max_blocks;
  const int start = a.step->positions[a.step->query_start[tile.sequence]], slot_start = a.step->slot_start[tile.sequence];
  const int query_block = (tile.end(a, 0) - 1) / kBlock;
  const KvLayer<D, KvBf16> slot = open_slot<D>(*a.model, *a.step, tile.sequence, a.place, a.HKV);
  const bool direct = KV::kExact && tile.rows <= kDirectRows;
  ChunkView<uint16_t> view{};
  for (int b = first_block; b < end_block; ++b) {
    const int block = chunk * kChunkBlocks + b;
    const UnpackedBlock out = scratch.block(b);
    view.keys[b] = out.keys, view.values[b] = out.values;
    if (!is_kept(block, query_block, slot_start)) {
      cache.unpack(blocks[block], blocks[b + 1 < end_block ? block + 1 : block], tile.kv_head, direct, out);
      if (direct) view.packed[b] = cache.data(blocks[block], a.HKV + tile.kv_head);
      continue;
    }
    if (block == 0 || (block + 1) * kBlock <= start)
      view.keys[b] = slot.keys(slot_block(block), tile.kv_head), view.values[b] = slot.values(slot_block(block), tile.kv_head);
    else
      gather_block(a, slot, tile, block, out);
    if constexpr (KV::kExact) store(out.key_scale, set1(1.0f)), store(out.value_scale, set1(1.0f));
  }
  if constexpr (KV::kExact) view.key_scale = scratch.block(0).key_scale, view.value_scale = scratch.block(0).value_scale;
  return view;
}

}  // namespace llmc
