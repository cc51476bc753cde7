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
  std::vector<uint16_t> half_scales(blocks * scale_stride(F, padded, kGroup) / sizeof(uint16_t));
  const int smallest = (16 - weight_bits(F)) << 10;  // 2^(1 - bits) as a half
  for (uint16_t& half : half_scales) half = static_cast<uint16_t>(smallest + (random.next() > 0 ? 0x155 : 0x8000));
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(random.next() * 128 + 128);
  if (F == Format::f32)
    for (size_t i = 0; i + 4 <= data.size(); i += 4) {
      const float value = random.next();
      std::memcpy(&data[i], &value, 4);
    }
  if (F == Format::bf16 || F == Format::f16)
    for (size_t i = 0; i + 2 <= data.size(); i += 2) {
      const float number = random.next();
      const uint16_t value = F == Format::bf16 ? float_to_bf16(number) : static_cast<uint16_t>(0x3400 + number * 0x7ff);
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

// Forty tokens of one sequence, written and attended in one step by each phase's kernel. For packed types some of the keys
// that the last ones see are read as packed.
template <class KV, bool ROTATE = false>
bool self_test_attention(bool decode, int64_t token_bytes, double tolerance) {
  constexpr int T = 40, HQ = 2, HKV = 1, D = 24, kWidth = (HQ + 2 * HKV) * D, kHalf = D / 2;
  const int64_t block_bytes = 2 * HKV * kBlock * token_bytes;
  SelfTestValues random;
  std::vector<float> qkv = random.floats(T * kWidth), out(T * HQ * D), inv_freq = random.floats(kHalf);
  const std::vector<float> before = qkv;
  std::vector<char> pool(3 * block_bytes, -1);  // NaN where nothing is written
  std::vector<char> slot(kSlotBlocks * 2 * HKV * D * kBlock * 2, -1);
  std::vector<char> workspace(attention_workspace_bytes(T, HQ, D, KV::kPacked, 1));
  int32_t positions[T];
  for (int t = 0; t < T; ++t) positions[t] = t;
  const int32_t query_start[2] = {0, T}, context_len[1] = {T}, table[3] = {2, 0, 1}, slots[1] = {0}, slot_start[1] = {0};
  const llmc_model model{nullptr, nullptr, pool.data(), slot.data(), T, 1};
  const llmc_step_args step{0,          T,           1,     3,       0,       nullptr, positions,
                            query_start, context_len, table, nullptr, slots, slot_start, nullptr};
  const Ctx ctx{&model, &step, T, 0, 1};
  const KvPlace place{0, block_bytes, 0, static_cast<int64_t>(slot.size())};
  rope_append<D, KV, ROTATE>(ctx, qkv.data(), HQ, HKV, nullptr, nullptr, 0.0f, inv_freq.data(), D, 1.0f, place);
  const auto attention = decode ? attention_decode<D, KV> : attention_prefill<D, KV>;
  attention(ctx, qkv.data(), kWidth, HQ, HKV, place, 0.3f, 0, 0.0f, out.data(), HQ * D, workspace.data());

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
        if (!self_test_close(out[(t * HQ + h) * D + d], want, tolerance)) return false;
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
  for (const int rows : {one, many}) {  // of the integers with planes, those that have each width of plane
    if (++number; !self_test_linear<Format::f32>(ctx, rows)) return number;
    if (++number; !self_test_linear<Format::f16>(ctx, rows)) return number;
    if (++number; !self_test_linear<Format::bf16>(ctx, rows)) return number;
    if (++number; !self_test_linear<Format::i8>(ctx, rows)) return number;
    if (++number; !self_test_linear<Format::i8g>(ctx, rows)) return number;
    if (++number; !self_test_linear<Format::i4>(ctx, rows)) return number;
    if (++number; !self_test_linear<Format::i3>(ctx, rows)) return number;
    if (++number; !self_test_linear<Format::i6a>(ctx, rows)) return number;
  }
  if (++number; !self_test_norm(ctx)) return number;
  for (const bool decode : {false, true}) {
    if (++number; !self_test_attention<KvF32>(decode, 4 * 24, 1e-4)) return number;
    if (++number; !self_test_attention<KvBf16>(decode, 2 * 24, 2e-2)) return number;
    if (++number; !self_test_attention<KvFp8>(decode, 24 + 4, 5e-2)) return number;
    if (++number; !self_test_attention<KvInt8, true>(decode, 24 + 4, 2e-2)) return number;
    if (++number; !self_test_attention<KvInt4, true>(decode, 18, 1e-1)) return number;
  }
  return 0;
}

}  // namespace llmc
