// Rotates queries and keys in place, with an optional norm of each head, and writes keys and values to the KV pool.
#pragma once

#include "kv_pool.hpp"
#include "norm.hpp"
#include "rotary.hpp"

namespace llmc {

// NeoX rotary: channel i pairs with channel i + half.
LLMC_INLINE void rotate(float* head, int half, const float* cosine, const float* sine) {
  each_column(half, [&](int c, int n) {
    const F16 x = load_some(head + c, n), y = load_some(head + half + c, n);
    const F16 cos16 = load_some(cosine + c, n), sin16 = load_some(sine + c, n);
    store_some(head + c, x * cos16 - y * sin16, n);
    store_some(head + half + c, y * cos16 + x * sin16, n);
  });
}

template <int D>
LLMC_INLINE void norm_head(float* head, const float* weight, float eps) {
  const float scale = inverse_rms(D, eps, [&](int c, int n) { return load_some(head + c, n); });
  each_column(D, [&](int c, int n) {
    store_some(head + c, load_some(head + c, n) * set1(scale) * load_some(weight + c, n), n);
  });
}

// qkv is [T, (HQ + 2 HKV) * D]; q_norm and k_norm are [D] or null; inv_freq is [rotary_dim / 2]. layer_offset is the
// layer's byte offset inside a block of block_bytes.
template <int D, class KV>
void rope_append(const Ctx& ctx, float* qkv, int HQ, int HKV, const float* q_norm, const float* k_norm, float eps,
                 const float* inv_freq, int rotary_dim, float attention_scaling, int64_t layer_offset,
                 int64_t block_bytes) {
  const KvLayer<D, KV> cache(ctx, layer_offset, block_bytes, HKV);
  parallel_for(ctx.threads, ctx.T, 2, [&](int64_t t) {
    const int position = ctx.step->positions[t], half = rotary_dim / 2;
    float cosine[round_up(D, kBlock)], sine[round_up(D, kBlock)];
    rotary_factors(position, inv_freq, half, attention_scaling, cosine, sine);
    float* token = qkv + t * (HQ + 2 * HKV) * D;
    for (int h = 0; h < HQ + HKV; ++h) {
      float* head = token + h * D;
      const float* weight = h < HQ ? q_norm : k_norm;
      if (weight) norm_head<D>(head, weight, eps);
      rotate(head, half, cosine, sine);
    }
    const int32_t* table = ctx.step->block_table + sequence_of(*ctx.step, static_cast<int>(t)) * int64_t{ctx.step->max_blocks};
    for (int h = 0; h < HKV; ++h)
      cache.write(table[position / kBlock], h, position % kBlock, token + (HQ + h) * D, token + (HQ + HKV + h) * D);
  });
}

}  // namespace llmc
