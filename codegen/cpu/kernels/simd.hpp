// Sixteen floats as one value: the only vector type of the kernels, with one implementation for each level.
//
// Sixteen because a weight block has 16 rows and a KV block 16 tokens: one zmm, two ymm or four portable quads. Every
// operation rounds like its scalar counterpart, and reductions use one fixed tree.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "config.hpp"

namespace llmc {

// Without a branch: scales the bits as a tiny float by 2^112, which also gets subnormals right; for finite values.
LLMC_INLINE float half_to_float(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &magnitude, 4);
  value *= 5.192296858534828e33f;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits |= static_cast<uint32_t>(half & 0x8000u) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace llmc

#if defined(LLMC_AVX512)
#include "simd_avx512.hpp"
#elif defined(LLMC_AVX2)
#include "simd_avx2.hpp"
#else
#include "simd_portable.hpp"
#endif

namespace llmc {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

LLMC_INLINE F16 load_some(const float* p, int n) { return n >= kBlock ? load(p) : load(p, n); }
LLMC_INLINE void store_some(float* p, F16 v, int n) { n >= kBlock ? store(p, v) : store(p, v, n); }

// e^x by Cody-Waite reduction and the Cephes polynomial, about 1 ulp; 0 below -87.3, saturates above 88.3.
LLMC_INLINE F16 exp(F16 x) {
  const F16 magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const F16 clamped = max(min(x, set1(88.37f)), set1(-87.33f));
  const F16 shifted = fma(clamped, set1(1.44269504088896341f), magic);
  const F16 n = shifted - magic;
  F16 r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  F16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  return select_less(x, set1(-87.33f), zero(), p * power_of_two(shifted));
}

LLMC_INLINE F16 sigmoid(F16 x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }

LLMC_INLINE F16 silu(F16 x) { return x / (set1(1.0f) + exp(zero() - x)); }

LLMC_INLINE F16 tanh(F16 x) { return set1(1.0f) - set1(2.0f) / (set1(1.0f) + exp(x + x)); }

// 0.5 x (1 + tanh u) = x sigmoid(2u): no cancellation for negative x.
LLMC_INLINE F16 gelu_tanh(F16 x) {
  const F16 u = x * fma(x * x, set1(0.79788456080286536f * 0.044715f), set1(0.79788456080286536f));
  return x * sigmoid(u + u);
}

// 0.5 x erfc(-x / sqrt 2), erfc by Abramowitz and Stegun 7.1.26 (absolute error 1.5e-7).
LLMC_INLINE F16 gelu(F16 x) {
  const F16 z = abs(x) * set1(0.70710678118654752f);
  const F16 t = set1(1.0f) / fma(z, set1(0.3275911f), set1(1.0f));
  F16 p = fma(t, set1(1.061405429f), set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const F16 half_tail = p * t * exp(zero() - z * z) * set1(0.5f);  // 0.5 erfc(|x| / sqrt 2)
  return select_less(x, zero(), x * half_tail, x - x * half_tail);
}

LLMC_INLINE float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

LLMC_INLINE uint16_t float_to_bf16(float value) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

LLMC_INLINE uint32_t load_u32(const void* p) {
  uint32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

}  // namespace llmc
