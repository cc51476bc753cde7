// F16 for AVX-512: one register.
#pragma once

#include <immintrin.h>

#include "config.hpp"

namespace llmc {

struct F16 {
  __m512 v;
};

LLMC_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

LLMC_INLINE F16 zero() { return {_mm512_setzero_ps()}; }
LLMC_INLINE F16 set1(float x) { return {_mm512_set1_ps(x)}; }
LLMC_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
LLMC_INLINE F16 load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
LLMC_INLINE void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
LLMC_INLINE void store(float* p, F16 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

LLMC_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
LLMC_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
LLMC_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
LLMC_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
LLMC_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
LLMC_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where a is NaN
LLMC_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }  // b where a is NaN
LLMC_INLINE F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }

LLMC_INLINE F16 select_less(F16 a, F16 b, F16 yes, F16 no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}

// `other` outside of lanes [begin, end).
LLMC_INLINE F16 keep_lanes(F16 a, int begin, int end, float other) {
  return {_mm512_mask_blend_ps(first_lanes(end) & ~first_lanes(begin), _mm512_set1_ps(other), a.v)};
}

// 2^n for n stored as 1.5 * 2^23 + n.
LLMC_INLINE F16 power_of_two(F16 shifted) {
  const __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(127 << 23)))};
}

LLMC_INLINE float reduce_add(F16 a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}

LLMC_INLINE float reduce_max(F16 a) { return _mm512_reduce_max_ps(a.v); }

LLMC_INLINE F16 widen_bf16(__m256i half) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
LLMC_INLINE F16 load_bf16(const uint16_t* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
LLMC_INLINE F16 load_bf16(const uint16_t* p, int n) { return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
LLMC_INLINE __m256i narrow_bf16(F16 a) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v)); }
LLMC_INLINE void store_bf16(uint16_t* p, F16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a)); }
LLMC_INLINE void store_bf16(uint16_t* p, F16 a, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(a)); }
LLMC_INLINE F16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

// acc[i] += pairs[i][0] * q[0] + pairs[i][1] * q[1], all bf16; q is two values in one word.
LLMC_INLINE F16 dot_bf16(F16 acc, const void* pairs, uint32_t q) {
  const __m512i w = _mm512_loadu_si512(pairs);
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(w),
                           reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(q))))};
}

}  // namespace llmc
