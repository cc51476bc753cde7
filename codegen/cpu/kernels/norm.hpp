// RMS norm, alone and fused with what surrounds it: post-norm, residual addition, packing for the next linear.
#pragma once

#include "operand.hpp"
#include "parallel.hpp"

namespace llmc {

// Where a fused kernel leaves its rows: as floats, or packed for a linear of format F.
struct OutF32 {
  float* p;
  template <class Source>
  LLMC_INLINE void write(int64_t row, int width, Source&& source) const {
    float* out = p + row * width;
    for (int c = 0; c < width; c += kBlock) {
      const int n = width - c < kBlock ? width - c : kBlock;
      store_some(out + c, source(c, n), n);
    }
  }
};

template <Format F>
struct OutOperand {
  void* p;
  int group;
  template <class Source>
  LLMC_INLINE void write(int64_t row, int width, Source&& source) const {
    pack_row<F>(source, width, group, static_cast<char*>(p) + row * operand_bytes(F, width, group));
  }
};

// Calls f(column, n) for each 16 columns.
template <class Function>
LLMC_INLINE void each_column(int width, Function&& f) {
  int c = 0;
  for (; c + kBlock <= width; c += kBlock) f(c, kBlock);
  if (c < width) f(c, width - c);
}

// 1 / sqrt(mean of squares + eps) of a row that source(column, n) yields.
template <class Source>
LLMC_INLINE float inverse_rms(int width, float eps, Source&& source) {
  F16 even = zero(), odd = zero();  // two chains: the latency of an addition would otherwise set the speed
  each_column(width, [&](int c, int n) {
    const F16 x = source(c, n);
    F16& sum = (c / kBlock) % 2 ? odd : even;
    sum = fma(x, x, sum);
  });
  return 1.0f / std::sqrt(reduce_add(even + odd) / static_cast<float>(width) + eps);
}

// y = HasPost ? rmsnorm(x) * post_weight : x;   HasResidual: residual += y, y = residual;   out <- rmsnorm(y) * weight.
template <bool HasPost, bool HasResidual, class Out>
void residual_norm(const Ctx& ctx, int rows, int H, const float* x, const float* post_weight, float post_eps,
                   float* residual, const float* weight, float eps, Out out) {
  parallel_for(ctx.threads, rows, 4, [&](int64_t row) {
    const float* input = x + row * H;
    float* sum = HasResidual ? residual + row * H : nullptr;
    float post_scale = 1.0f;
    if constexpr (HasPost) post_scale = inverse_rms(H, post_eps, [&](int c, int n) { return load_some(input + c, n); });
    const auto branch = [&](int c, int n) {
      const F16 value = load_some(input + c, n);
      if constexpr (HasPost) return value * set1(post_scale) * load_some(post_weight + c, n);
      return value;
    };
    if constexpr (HasResidual)
      each_column(H, [&](int c, int n) { store_some(sum + c, load_some(sum + c, n) + branch(c, n), n); });
    const auto stream = [&](int c, int n) {
      if constexpr (HasResidual) return load_some(sum + c, n);
      return branch(c, n);
    };
    const float scale = inverse_rms(H, eps, stream);
    out.write(row, H, [&](int c, int n) { return stream(c, n) * set1(scale) * load_some(weight + c, n); });
  });
}

inline void rms_norm(const Ctx& ctx, const float* x, const float* weight, float eps, int rows, int H, float* out) {
  residual_norm<false, false>(ctx, rows, H, x, nullptr, 0.0f, nullptr, weight, eps, OutF32{out});
}

// Packs plain float rows.
template <Format F>
void pack_rows(const Ctx& ctx, const float* x, int rows, int K, int group, void* operand) {
  const OutOperand<F> out{operand, group};
  parallel_for(ctx.threads, rows, 4, [&](int64_t row) {
    out.write(row, K, [&](int c, int n) { return load_some(x + row * K + c, n); });
  });
}

}  // namespace llmc
