// Rotates queries and keys in place, with an optional norm of each head, and writes keys and values to the KV pool.
#pragma once

#include "hadamard.hpp"
#include "kv_packed.hpp"
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

// qkv is [T, (HQ + 2 HKV) * D]; q_norm and k_norm are [D] or null; inv_freq is [rotary_dim / 2]. With ROTATE, queries
// and keys go through `hadamard` as well, which leaves their products what they are.
template <int D, class KV, bool ROTATE = false>
void rope_append(const Ctx& ctx, float* qkv, int HQ, int HKV, const float* q_norm, const float* k_norm, float eps,
                 const float* inv_freq, int rotary_dim, float attention_scaling, KvPlace place) {
  const PoolLayer<D, KV> cache(*ctx.model, place, HKV);
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
    if constexpr (ROTATE)
      for (int h = 0; h < HQ + HKV; ++h) hadamard<D>(token + h * D);
    const int sequence = sequence_of(*ctx.step, static_cast<int>(t));
    const int32_t block = ctx.step->block_table[sequence * int64_t{ctx.step->max_blocks} + position / kBlock];
    for (int h = 0; h < HKV; ++h) {
      const float *key = token + (HQ + h) * D, *value = token + (HQ + HKV + h) * D;
      cache.write(block, h, position % kBlock, key, value);
      if constexpr (KV::kPacked)
        if (position < kBlock) open_slot<D>(*ctx.model, *ctx.step, sequence, place, HKV).write(0, h, position, key, value);
    }
  });
}

// After attention, for packed types: the newest keys and values of each sequence go to its slot. Not before, since the
// step's first queries still need what they replace.
template <int D>
void keep_newest(const Ctx& ctx, const float* qkv, int HQ, int HKV, KvPlace place) {
  const llmc_step_args& step = *ctx.step;
  parallel_for(ctx.threads, int64_t{step.num_seqs} * HKV, 1, [&](int64_t i) {
    const int sequence = static_cast<int>(i / HKV), head = static_cast<int>(i % HKV);
    const int first = step.query_start[sequence], end = step.query_start[sequence + 1];
    if (first == end) return;
    const int newest = step.positions[end - 1] / kBlock;
    const auto slot = open_slot<D>(*ctx.model, step, sequence, place, HKV);
    for (int t = end - 1; t >= first; --t) {
      const int block = step.positions[t] / kBlock;
      if (block == 0 || block <= newest - kRingBlocks) break;
      const float* token = qkv + int64_t{t} * (HQ + 2 * HKV) * D;
      slot.write(slot_block(block), head, step.positions[t] % kBlock, token + (HQ + head) * D, token + (HQ + HKV + head) * D);
    }
  });
}

}  // namespace llmc
