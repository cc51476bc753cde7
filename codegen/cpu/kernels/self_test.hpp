// A minute's worth of trust in a millisecond: every kind of kernel against plain loops, on small fixed problems.
//
// The runtime runs it before it uses a level, so that a processor, hypervisor or compiler that lies costs a level
// rather than a wrong answer. It runs on one thread, since a fault is only caught on the thread that asked.
#pragma once

#include <vector>

#include "attention.hpp"
#include "embedding.hpp"
#include "linear.hpp"
#include "rope_append.hpp"

namespace llmc {

// Reproducible values in [-1, 1).
class SelfTestValues {
 public:
  float next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<float>(static_cast<int32_t>(state_ >> 33) - (1 << 30)) * (1.0f / (1 << 30));
  }
  std::vector<float> floats(size_t n) {
    std::vector<float> values(n);
    for (float& value : values) value = next();
    return values;
  }

 private:
  uint64_t state_ = 1;
};

inline bool self_test_close(float got, double want, double tolerance) {
  return std::fabs(got - want) <= tolerance * (1.0 + std::fabs(want));  // false for NaN
}

// Vectors come from operator new, which aligns to 16 bytes; kernels need no more.
template <Format F>
bool self_test_linear(const Ctx& ctx, int rows) {
  constexpr int N = 88, K = 160, kGroup = 32;
  const int padded = static_cast<int>(round_up(K, kColumnAlign)), blocks = static_cast<int>(ceil_div(N, kBlock));
  SelfTestValues random;
  std::vector<uint8_t> data(blocks * block_stride(F, padded));
  std::vector<float> scales = random.floats(blocks * kBlock);
  for (float& scale : scales) scale *= 1.0f / 128;
  std::vector<uint16_t> half_scales(blocks * (padded / kGroup) * kBlock);
  const int smallest = F == Format::i8g ? 0x2000 : 0x3000;  // 2^-7, 2^-3
  for (uint16_t& half : half_scales) half = static_cast<uint16_t>(smallest + (random.next() > 0 ? 0x155 : 0x8000));
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(random.next() * 128 + 128);
  if (F == Format::f32)
    for (size_t i = 0; i + 4 <= data.size(); i += 4) {
      const float value = random.next();
      std::memcpy(&data[i], &value, 4);
    }
  if (F == Format::bf16)
    for (size_t i = 0; i + 2 <= data.size(); i += 2) {
      const uint16_t value = float_to_bf16(random.next());
      std::memcpy(&data[i], &value, 2);
    }
  const void* scale = F == Format::i8 ? static_cast<const void*>(scales.data()) : half_scales.data();

  const std::vector<float> x = random.floats(rows * K);
  std::vector<char> operand(rows * operand_bytes(F, K, kGroup));
  std::vector<float> out(rows * N);
  pack_rows<F>(ctx, x.data(), rows, K, kGroup, operand.data());
  linear<F, Epilogue::none>(ctx, operand.data(), data.data(), scale, kGroup, nullptr, rows, N, K, out.data(), N);
  for (int r = 0; r < rows; ++r)
    for (int n = 0; n < N; ++n) {
      double want = 0;
      for (int k = 0; k < K; ++k)
        want += static_cast<double>(weight_at<F>(data.data(), scale, padded, kGroup, n, k)) * x[r * K + k];
      if (!self_test_close(out[r * N + n], want, F == Format::bf16 ? 2e-2 : 2e-3)) return false;
    }
  return true;
}

inline bool self_test_norm(const Ctx& ctx) {
  constexpr int kRows = 2, H = 88;
  SelfTestValues random;
  const std::vector<float> x = random.floats(kRows * H), weight = random.floats(96);
  std::vector<float> out(kRows * H);
  rms_norm(ctx, x.data(), weight.data(), 1e-6f, kRows, H, out.data());
  for (int r = 0; r < kRows; ++r) {
    double squares = 0;
    for (int h = 0; h < H; ++h) squares += static_cast<double>(x[r * H + h]) * x[r * H + h];
    for (int h = 0; h < H; ++h)
      if (!self_test_close(out[r * H + h], x[r * H + h] * weight[h] / std::sqrt(squares / H + 1e-6), 1e-5)) return false;
  }
  return true;
}

// Twenty tokens of one sequence, written and attended in one step by each phase's kernel.
template <class KV>
bool self_test_attention(bool decode) {
  constexpr int T = 20, HQ = 2, HKV = 1, D = 24, kWidth = (HQ + 2 * HKV) * D, kHalf = D / 2;
  constexpr int64_t kBlockBytes = 2 * HKV * D * kBlock * sizeof(typename KV::Element);
  SelfTestValues random;
  std::vector<float> qkv = random.floats(T * kWidth), out(T * HQ * D), inv_freq = random.floats(kHalf);
  const std::vector<float> before = qkv;
  std::vector<char> pool(3 * kBlockBytes, -1);  // NaN where nothing is written
  std::vector<char> workspace(attention_workspace_bytes(T, HQ, HKV, D, T, 1));
  int32_t positions[T];
  for (int t = 0; t < T; ++t) positions[t] = t;
  const int32_t query_start[2] = {0, T}, context_len[1] = {T}, table[2] = {2, 0};
  const llmc_model model{nullptr, nullptr, pool.data(), T, 1};
  const llmc_step_args step{0, T, 1, 2, 0, nullptr, positions, query_start, context_len, table, nullptr, nullptr};
  const Ctx ctx{&model, &step, T, 0, 1};
  rope_append<D, KV>(ctx, qkv.data(), HQ, HKV, nullptr, nullptr, 0.0f, inv_freq.data(), D, 1.0f, 0, kBlockBytes);
  const auto attention = decode ? attention_decode<D, KV> : attention_prefill<D, KV>;
  attention(ctx, qkv.data(), kWidth, HQ, HKV, 0, kBlockBytes, 0.3f, 0, 0.0f, out.data(), HQ * D, workspace.data());

  const auto rotated = [&](int t, int head, int d) {
    const float* x = before.data() + t * kWidth + head * D;
    const double angle = static_cast<float>(t) * inv_freq[d % kHalf];
    return d < kHalf ? x[d] * std::cos(angle) - x[d + kHalf] * std::sin(angle)
                     : x[d] * std::cos(angle) + x[d - kHalf] * std::sin(angle);
  };
  for (int t = 0; t < T; ++t)
    for (int h = 0; h < HQ; ++h) {
      double weights[T], total = 0;
      for (int s = 0; s <= t; ++s) {
        double score = 0;
        for (int d = 0; d < D; ++d) score += rotated(t, h, d) * rotated(s, HQ, d);
        total += weights[s] = std::exp(score * 0.3);
      }
      for (int d = 0; d < D; ++d) {
        double want = 0;
        for (int s = 0; s <= t; ++s) want += weights[s] / total * before[s * kWidth + (HQ + HKV) * D + d];
        if (!self_test_close(out[(t * HQ + h) * D + d], want, KV::kPairs ? 2e-2 : 1e-4)) return false;
      }
    }
  return true;
}

// 0, or the number of the first check that fails.
inline int self_test() {
  const llmc_model model{};
  const llmc_step_args step{};
  const Ctx ctx{&model, &step, 0, 0, 1};
  const int one = 1, many = 19;  // a decode's row; full tiles and a remainder
  int number = 0;
  for (const int rows : {one, many}) {
    if (++number; !self_test_linear<Format::f32>(ctx, rows)) return number;
    if (++number; !self_test_linear<Format::bf16>(ctx, rows)) return number;
    if (++number; !self_test_linear<Format::i8>(ctx, rows)) return number;
    if (++number; !self_test_linear<Format::i8g>(ctx, rows)) return number;
    if (++number; !self_test_linear<Format::i4>(ctx, rows)) return number;
  }
  if (++number; !self_test_norm(ctx)) return number;
  for (const bool decode : {false, true}) {
    if (++number; !self_test_attention<KvF32>(decode)) return number;
    if (++number; !self_test_attention<KvBf16>(decode)) return number;
  }
  return 0;
}

}  // namespace llmc
