// The KV pool: where the keys and values of a position lie (docs/bundle.md), for both element types.
//
// Inside a block each kv head has its keys with 16 tokens side by side, so that 16 scores are one vector, and its
// values with channels side by side, so that a weighted sum of values is one too.
#pragma once

#include "simd.hpp"

namespace llmc {

struct KvF32 {
  using Element = float;
  static constexpr bool kPairs = false;
  LLMC_INLINE static F16 load_values(const float* p, int n) { return load_some(p, n); }
  LLMC_INLINE static float narrow(float x) { return x; }
};

struct KvBf16 {
  using Element = uint16_t;
  static constexpr bool kPairs = true;  // adjacent channels of a key interleaved
  LLMC_INLINE static F16 load_values(const uint16_t* p, int n) { return n >= kBlock ? load_bf16(p) : load_bf16(p, n); }
  LLMC_INLINE static uint16_t narrow(float x) { return float_to_bf16(x); }
};

template <int D, class KV>
struct KvLayer {
  using Element = typename KV::Element;
  char* base;
  int64_t block_bytes;
  int heads;

  KvLayer(const Ctx& ctx, int64_t layer_offset, int64_t bytes_per_block, int kv_heads)
      : base(static_cast<char*>(ctx.model->kv_pool) + layer_offset), block_bytes(bytes_per_block), heads(kv_heads) {}

  LLMC_INLINE Element* keys(int64_t block, int head) const {
    return reinterpret_cast<Element*>(base + block * block_bytes) + int64_t{head} * D * kBlock;
  }
  LLMC_INLINE Element* values(int64_t block, int head) const { return keys(block, heads + head); }

  LLMC_INLINE void write(int64_t block, int head, int slot, const float* key, const float* value) const {
    Element* k = keys(block, head);
    for (int d = 0; d < D; ++d)
      k[KV::kPairs ? (d / 2 * kBlock + slot) * 2 + d % 2 : d * kBlock + slot] = KV::narrow(key[d]);
    Element* v = values(block, head) + slot * D;
    for (int d = 0; d < D; ++d) v[d] = KV::narrow(value[d]);
  }
};

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
