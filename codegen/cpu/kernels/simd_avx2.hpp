// F16 for AVX2 with FMA and F16C: two registers.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "config.hpp"

namespace llmc {

struct F16 {
  __m256 a, b;
};

// Lanes [8 * half, 8 * half + 8) that lie below n.
LLMC_INLINE __m256i first_lanes(int n, int half) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8 * half), index);
}

LLMC_INLINE F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
LLMC_INLINE F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
LLMC_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
LLMC_INLINE F16 load(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_lanes(n, 0)), _mm256_maskload_ps(p + 8, first_lanes(n, 1))};
}
LLMC_INLINE void store(float* p, F16 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
LLMC_INLINE void store(float* p, F16 x, int n) {
  _mm256_maskstore_ps(p, first_lanes(n, 0), x.a);
  _mm256_maskstore_ps(p + 8, first_lanes(n, 1), x.b);
}

LLMC_INLINE F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
LLMC_INLINE F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
LLMC_INLINE F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
LLMC_INLINE F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
LLMC_INLINE F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
LLMC_INLINE F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }  // y where x is NaN
LLMC_INLINE F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }  // y where x is NaN
LLMC_INLINE F16 abs(F16 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}

LLMC_INLINE F16 select_less(F16 x, F16 y, F16 yes, F16 no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}

// `other` outside of lanes [begin, end).
LLMC_INLINE F16 keep_lanes(F16 x, int begin, int end, float other) {
  const __m256 fill = _mm256_set1_ps(other);
  const __m256i a = _mm256_andnot_si256(first_lanes(begin, 0), first_lanes(end, 0));
  const __m256i b = _mm256_andnot_si256(first_lanes(begin, 1), first_lanes(end, 1));
  return {_mm256_blendv_ps(fill, x.a, _mm256_castsi256_ps(a)), _mm256_blendv_ps(fill, x.b, _mm256_castsi256_ps(b))};
}

LLMC_INLINE __m256 power_of_two(__m256 shifted) {
  const __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(127 << 23)));
}
// 2^n for n stored as 1.5 * 2^23 + n.
LLMC_INLINE F16 power_of_two(F16 shifted) { return {power_of_two(shifted.a), power_of_two(shifted.b)}; }

LLMC_INLINE float reduce_add(F16 x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}

LLMC_INLINE float reduce_max(F16 x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}

LLMC_INLINE __m256 widen_bf16(__m128i half) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
LLMC_INLINE F16 load_bf16(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {widen_bf16(_mm_loadu_si128(q)), widen_bf16(_mm_loadu_si128(q + 1))};
}
LLMC_INLINE F16 load_bf16(const uint16_t* p, int n) {
  uint16_t lanes[kBlock] = {};
  std::memcpy(lanes, p, sizeof(uint16_t) * n);
  return load_bf16(lanes);
}

// Round to nearest even in integers, eight lanes; NaN stays NaN.
LLMC_INLINE __m256i round_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
LLMC_INLINE void store_bf16(uint16_t* p, F16 x) {
  const __m256i packed = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
LLMC_INLINE void store_bf16(uint16_t* p, F16 x, int n) {
  uint16_t lanes[kBlock];
  store_bf16(lanes, x);
  std::memcpy(p, lanes, sizeof(uint16_t) * n);
}
LLMC_INLINE F16 load_f16(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}

// acc[i] += pairs[i][0] * q[0] + pairs[i][1] * q[1], all bf16; q is two values in one word.
LLMC_INLINE F16 dot_bf16(F16 acc, const void* pairs, uint32_t q) {
  const __m256i* p = static_cast<const __m256i*>(pairs);
  const __m256i a = _mm256_loadu_si256(p), b = _mm256_loadu_si256(p + 1);
  const __m256i both = _mm256_set1_epi32(static_cast<int>(q)), high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256 q0 = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  const __m256 q1 = _mm256_castsi256_ps(_mm256_and_si256(both, high));
  acc.a = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), q0, acc.a);
  acc.b = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), q0, acc.b);
  acc.a = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, high)), q1, acc.a);
  acc.b = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(b, high)), q1, acc.b);
  return acc;
}

}  // namespace llmc
