// Operands: the packed form in which a linear reads its activations.
//
//   f32, bf16   [Kp] values, zero padded; f16 weights take f32
//   integers    each value is a 16-bit integer q = round(x / scale), kept as two signed bytes q = 256 hi + lo:
//               s8 hi[Kp], s8 lo[Kp], f32 scale, s32 sum_hi[G], s32 sum_lo[G]    (G groups, 1 for i8)
//
// With u8 weights a product of bytes is then one vpdpbusd, integer arithmetic is exact in any order, and the weights'
// offset costs one subtraction of offset * sum per accumulator, their minimum one addition of minimum * sum per group.
// Activations keep 16 bits: weights are the only loss.
#pragma once

#include "simd.hpp"

namespace llmc {

constexpr float kQuantMax = 32512.0f;  // 127 * 256: hi stays within s8 after lo's rounding

constexpr int64_t operand_bytes(Format f, int k, int group) {
  const int64_t padded = round_up(k, kColumnAlign);
  if (f == Format::f32 || f == Format::f16) return padded * 4;
  if (f == Format::bf16) return padded * 2;
  return round_up(2 * padded + 4 + 8 * num_groups(f, padded, group), 64);
}

// Where the parts of one integer row lie.
struct IntegerRow {
  int8_t *hi, *lo;
  float* scale;
  int32_t *sum_hi, *sum_lo;

  // Sum of the 16-bit integers of a group: below 2^23, so exact as a float.
  LLMC_INLINE int32_t sum(int g) const { return 256 * sum_hi[g] + sum_lo[g]; }

  IntegerRow(void* row, int padded, int groups)
      : hi(static_cast<int8_t*>(row)), lo(hi + padded), scale(reinterpret_cast<float*>(lo + padded)),
        sum_hi(reinterpret_cast<int32_t*>(scale + 1)), sum_lo(sum_hi + groups) {}
};

// Splits 16 values x * inverse into byte planes and adds them to the sums.
LLMC_INLINE void split_bytes(F16 x, float inverse, int8_t* hi, int8_t* lo, int32_t& sum_hi, int32_t& sum_lo) {
  // max and min return their second operand for NaN, so that the conversion below is always in range
  const F16 q = max(min(x * set1(inverse), set1(kQuantMax)), set1(-kQuantMax));
#ifdef LLMC_AVX512
  const __m512i whole = _mm512_cvtps_epi32(q.v);
  const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
  const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(hi), _mm512_cvtepi32_epi8(high));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(lo), _mm512_cvtepi32_epi8(low));
  sum_hi += _mm512_reduce_add_epi32(high);
  sum_lo += _mm512_reduce_add_epi32(low);
#else
  float rounded[kBlock];
  store(rounded, q + set1(12582912.0f));  // rounds to nearest even; the integer is in the low bits
  for (int i = 0; i < kBlock; ++i) {
    const int32_t whole = static_cast<int32_t>(load_u32(rounded + i)) - 0x4b400000;
    const int32_t high = (whole + 128) >> 8, low = whole - high * 256;
    hi[i] = static_cast<int8_t>(high);
    lo[i] = static_cast<int8_t>(low);
    sum_hi += high;
    sum_lo += low;
  }
#endif
}

// Packs one row of k values; source(column, n) returns 16 of them, of which lanes >= n are zero.
template <Format F, class Source>
LLMC_INLINE void pack_row(Source&& source, int k, int group, void* row) {
  const int padded = static_cast<int>(round_up(k, kColumnAlign));
  const auto lanes = [&](int column) {
    return column >= k ? zero() : source(column, k - column < kBlock ? k - column : kBlock);
  };
  if constexpr (F == Format::f32 || F == Format::f16) {
    for (int c = 0; c < padded; c += kBlock) store(static_cast<float*>(row) + c, lanes(c));
  } else if constexpr (F == Format::bf16) {
    for (int c = 0; c < padded; c += kBlock) store_bf16(static_cast<uint16_t*>(row) + c, lanes(c));
  } else {
    F16 largest = zero();
    for (int c = 0; c < k; c += kBlock) largest = max(abs(lanes(c)), largest);
    const float amax = reduce_max(largest);
    const bool tiny = amax < 1e-30f;  // its inverse would overflow; such a row is zero
    const float inverse = tiny ? 0.0f : kQuantMax / amax;
    const int width = group_width(F, padded, group), groups = num_groups(F, padded, group);
    const IntegerRow out(row, padded, groups);
    *out.scale = tiny ? 0.0f : amax / kQuantMax;
    for (int g = 0; g < groups; ++g) {
      int32_t sum_hi = 0, sum_lo = 0;
      const int end = (g + 1) * width < padded ? (g + 1) * width : padded;
      for (int c = g * width; c < end; c += kBlock)
        split_bytes(lanes(c), inverse, out.hi + c, out.lo + c, sum_hi, sum_lo);
      out.sum_hi[g] = sum_hi;
      out.sum_lo[g] = sum_lo;
    }
  }
}

}  // namespace llmc
