// Rows picked out of a table: token embeddings from a packed matrix, and the rows whose logits are wanted.
#pragma once

#include "parallel.hpp"
#include "planes.hpp"
#include "simd.hpp"

namespace llmc {

// Column k of one of the 16 rows of a block.
template <Format F>
LLMC_INLINE float float_weight(const char* block, int k, int64_t lane) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(block);
  if constexpr (F == Format::f32) return reinterpret_cast<const float*>(block)[k * kBlock + lane];
  if constexpr (F == Format::f16) return half_to_float(halves[k * kBlock + lane]);
  return bf16_to_float(halves[(k / 2 * kBlock + lane) * 2 + k % 2]);
}

// W[n, k] of a packed matrix. Slow and obvious, for the self-test.
template <Format F>
float weight_at(const void* data, const void* scale, int padded, int group, int64_t n, int k) {
  const int64_t block = n / kBlock, lane = n % kBlock;
  const char* base = static_cast<const char*>(data) + block * block_stride(F, padded);
  if constexpr (!is_integer(F)) return float_weight<F>(base, k, lane);
  const int quad = k % kUnit / 4;
  const auto bits = [&](int width, int plane) {
    const uint8_t byte = static_cast<uint8_t>(base[k / kUnit * unit_bytes(F) + plane + quad * width / 8 * 64 + lane * 4 + k % 4]);
    return byte >> quad * width % 8 & ((1 << width) - 1);
  };
  const int code = bits(low_bits(F), 0) + (high_bits(F) ? bits(high_bits(F), 64 * low_bits(F)) << low_bits(F) : 0);
  const float value = static_cast<float>(code - weight_offset(F));
  const char* scales = static_cast<const char*>(scale) + block * scale_stride(F, padded, group);
  if constexpr (!is_grouped(F)) return value * reinterpret_cast<const float*>(scales)[lane];
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(scales) + k / group * kBlock * (is_asymmetric(F) ? 2 : 1) + lane;
  return value * half_to_float(halves[0]) + (is_asymmetric(F) ? half_to_float(halves[kBlock]) : 0.0f);
}

// One row of a packed matrix, times `multiplier`: out[k] for k < K.
template <Format F>
LLMC_INLINE void decode_row(const void* data, const void* scale, int group, int64_t n, int K, float multiplier, float* out) {
  const int64_t padded = round_up(K, kColumnAlign), block = n / kBlock, lane = n % kBlock;
  const char* base = static_cast<const char*>(data) + block * block_stride(F, padded);
  if constexpr (!is_integer(F)) {
    for (int k = 0; k < K; ++k) out[k] = multiplier * float_weight<F>(base, k, static_cast<int>(lane));
  } else {
    const char* scales = static_cast<const char*>(scale) + block * scale_stride(F, padded, group);
    const int width = group_width(F, padded, group);
    float step = 0, lowest = 0;
    for (int k = 0; k < K; k += kUnit, base += unit_bytes(F)) {
      if (k % width == 0) {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(scales) + k / width * (is_asymmetric(F) ? 2 : 1) * kBlock + lane;
        step = is_grouped(F) ? half_to_float(halves[0]) : reinterpret_cast<const float*>(scales)[lane];
        lowest = is_asymmetric(F) ? half_to_float(halves[kBlock]) : 0;
      }
      uint8_t codes[kUnit];
      LLMC_UNROLL for (int q = 0; q < kQuads; ++q) {
        const uint32_t quad = quad_codes<F, uint32_t>(base + 4 * lane, q);
        std::memcpy(codes + 4 * q, &quad, 4);
      }
      for (int i = 0; i < (K - k < kUnit ? K - k : kUnit); ++i)
        out[k + i] = multiplier * (static_cast<float>(codes[i] - weight_offset(F)) * step + lowest);
    }
  }
}

// out[t] = multiplier * table[token_ids[t]].
template <Format F>
void embedding(const Ctx& ctx, const void* data, const void* scale, int group, int /*vocab*/, int K, float multiplier,
               float* out) {
  parallel_for(ctx.threads, ctx.T, 4, [&](int64_t t) {
    decode_row<F>(data, scale, group, ctx.step->token_ids[t], K, multiplier, out + t * K);
  });
}

// out[r] = x[logit_rows[r]].
inline void gather_rows(const Ctx& ctx, const float* x, int H, float* out) {
  for (int r = 0; r < ctx.R; ++r)
    std::memcpy(out + static_cast<int64_t>(r) * H, x + static_cast<int64_t>(ctx.step->logit_rows[r]) * H, sizeof(float) * H);
}

}  // namespace llmc
