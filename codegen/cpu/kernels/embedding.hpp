// Rows picked out of a table: token embeddings from a packed matrix, and the rows whose logits are wanted.
#pragma once

#include "parallel.hpp"
#include "simd.hpp"

namespace llmc {

// W[n, k] of a packed matrix. Slow and obvious; the linears never use it.
template <Format F>
LLMC_INLINE float weight_at(const void* data, const void* scale, int padded, int group, int64_t n, int k) {
  const int64_t block = n / kBlock, lane = n % kBlock;
  const char* base = static_cast<const char*>(data) + block * block_stride(F, padded);
  if constexpr (F == Format::f32) return reinterpret_cast<const float*>(base)[k * kBlock + lane];
  if constexpr (F == Format::bf16)
    return bf16_to_float(reinterpret_cast<const uint16_t*>(base)[(k / 2 * kBlock + lane) * 2 + k % 2]);
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(base);
  int stored;
  if constexpr (F == Format::i4) {
    const uint8_t byte = bytes[(k / 8 * kBlock + lane) * 4 + k % 4];
    stored = k % 8 < 4 ? byte & 15 : byte >> 4;
  } else {
    stored = bytes[(k / 4 * kBlock + lane) * 4 + k % 4];
  }
  const float value = static_cast<float>(stored - weight_offset(F));
  if constexpr (!is_grouped(F)) return value * static_cast<const float*>(scale)[n];
  const uint16_t* halves = static_cast<const uint16_t*>(scale) + (block * num_groups(F, padded, group) + k / group) * kBlock;
  float scales[kBlock];
  store(scales, load_f16(halves));
  return value * scales[lane];
}

// out[t] = multiplier * table[token_ids[t]].
template <Format F>
void embedding(const Ctx& ctx, const void* data, const void* scale, int group, int /*vocab*/, int K, float multiplier,
               float* out) {
  const int padded = static_cast<int>(round_up(K, kColumnAlign));
  parallel_for(ctx.threads, ctx.T, 4, [&](int64_t t) {
    const int64_t token = ctx.step->token_ids[t];
    for (int k = 0; k < K; ++k) out[t * K + k] = multiplier * weight_at<F>(data, scale, padded, group, token, k);
  });
}

// out[r] = x[logit_rows[r]].
inline void gather_rows(const Ctx& ctx, const float* x, int H, float* out) {
  for (int r = 0; r < ctx.R; ++r)
    std::memcpy(out + static_cast<int64_t>(r) * H, x + static_cast<int64_t>(ctx.step->logit_rows[r]) * H, sizeof(float) * H);
}

}  // namespace llmc
