// The KV pool: where the keys and values of a position lie (docs/bundle.md), as f32 or bf16, and the slots of sequences.
//
// Inside a block each kv head has its keys with 16 tokens side by side, so that 16 scores are one vector, and its
// values with channels side by side, so that a weighted sum of values is one too. Packed types are in kv_packed.hpp.
#pragma once

#include "simd.hpp"

namespace llmc {

struct KvF32 {
  using Element = float;
  using Arithmetic = KvF32;  // what attention computes in
  static constexpr bool kPairs = false, kPacked = false, kExact = false;
  LLMC_INLINE static F16 load_values(const float* p, int n) { return load_some(p, n); }
  LLMC_INLINE static float narrow(float x) { return x; }
};

struct KvBf16 {
  using Element = uint16_t;
  using Arithmetic = KvBf16;
  static constexpr bool kPairs = true, kPacked = false, kExact = false;  // kPairs: adjacent channels of a key interleaved
  LLMC_INLINE static F16 load_values(const uint16_t* p, int n) { return n >= kBlock ? load_bf16(p) : load_bf16(p, n); }
  LLMC_INLINE static uint16_t narrow(float x) { return float_to_bf16(x); }
};

// Where a layer lies in a block of the pool and, if its type is packed, in the slot of a sequence.
struct KvPlace {
  int64_t layer_offset, block_bytes, slot_offset, slot_bytes;
};

// One token of a block.
template <int D, class KV>
LLMC_INLINE void write_token(typename KV::Element* keys, typename KV::Element* values, int token, const float* key,
                             const float* value) {
  if constexpr (KV::kPairs) {
    uint16_t narrow[round_up(D, kBlock)];
    for (int d = 0; d < D; d += kBlock) store_bf16(narrow + d, load_some(key + d, D - d));
    for (int d = 0; d < D; d += 2) std::memcpy(keys + (d / 2 * kBlock + token) * 2, narrow + d, 4);
    for (int d = 0; d < D; d += kBlock) {
      if (D - d >= kBlock) store_bf16(values + token * D + d, load(value + d));
      else store_bf16(values + token * D + d, load(value + d, D - d), D - d);
    }
  } else {
    for (int d = 0; d < D; ++d) keys[d * kBlock + token] = key[d];
    std::memcpy(values + token * D, value, sizeof(float) * D);
  }
}

// Blocks of f32 or bf16: a layer of the pool, or of a slot.
template <int D, class KV>
struct KvLayer {
  using Element = typename KV::Element;
  char* base;
  int64_t block_bytes;
  int heads;

  KvLayer(char* blocks, int64_t bytes_per_block, int kv_heads) : base(blocks), block_bytes(bytes_per_block), heads(kv_heads) {}
  KvLayer(const llmc_model& model, const KvPlace& place, int kv_heads)
      : KvLayer(static_cast<char*>(model.kv_pool) + place.layer_offset, place.block_bytes, kv_heads) {}

  LLMC_INLINE Element* keys(int64_t block, int head) const {
    return reinterpret_cast<Element*>(base + block * block_bytes) + int64_t{head} * D * kBlock;
  }
  LLMC_INLINE Element* values(int64_t block, int head) const { return keys(block, heads + head); }

  LLMC_INLINE void write(int64_t block, int head, int token, const float* key, const float* value) const {
    write_token<D, KV>(keys(block, head), values(block, head), token, key, value);
  }
};

// A sequence that runs has a slot, where the keys and values that are read in 16 bit are kept beside their packed form:
// block 0 (attention sinks; Xiao et al. 2023), and a ring of the newest blocks.
//
// A query at position p reads block 0, its own block and the one before from there, and all others from the pool. That
// depends on positions alone, so a token's result does not depend on how its sequence was cut into steps. The third
// block of the ring lets a sequence go back by up to 16 positions, as after rejected drafts. Blocks with positions before
// `slot_start` were not computed into this slot; they are read from the pool.
constexpr int kNearBlocks = 2;  // of the query: its own and the one before
constexpr int kRingBlocks = 3;
constexpr int kSlotBlocks = 1 + kRingBlocks;

LLMC_INLINE int slot_block(int block) { return block == 0 ? 0 : 1 + block % kRingBlocks; }

LLMC_INLINE bool is_kept(int block, int query_block, int slot_start) {
  return (block == 0 || block > query_block - kNearBlocks) && block * kBlock >= slot_start;
}

template <int D>
LLMC_INLINE KvLayer<D, KvBf16> open_slot(const llmc_model& model, const llmc_step_args& step, int sequence, const KvPlace& place,
                                         int kv_heads) {
  char* const slot = static_cast<char*>(model.kv_slots) + step.slots[sequence] * place.slot_bytes + place.slot_offset;
  return {slot, int64_t{2} * kv_heads * D * kBlock * 2, kv_heads};
}

// The sequence that token t of the step belongs to: the last whose first token is not after t.
inline int sequence_of(const llmc_step_args& step, int t) {
  int low = 0, high = step.num_seqs - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (step.query_start[middle] <= t) low = middle;
    else high = middle - 1;
  }
  return low;
}

}  // namespace llmc
