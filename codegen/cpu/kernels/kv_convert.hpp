// Conversions between packed keys and values and bfloat16 or float vectors, for each level.
//
// E4M3 is the OCP 8-bit format: a sign, 4 bits of exponent (bias 7), 3 of mantissa, largest value 448, no infinity.
#pragma once

#include "simd.hpp"

namespace llmc {

LLMC_INLINE float round_to_integer(float x) {  // to nearest even, |x| < 2^22
  constexpr float kMagic = 12582912.0f;        // 1.5 * 2^23
  return (x + kMagic) - kMagic;
}

// To nearest even; what lies beyond the largest value becomes it.
LLMC_INLINE uint8_t float_to_e4m3(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  uint32_t code;
  if (magnitude < 0x3c800000u) {  // below 2^-6: steps of 2^-9; eight of them are the smallest normal number, as they should be
    float small;
    std::memcpy(&small, &magnitude, 4);
    code = static_cast<uint32_t>(static_cast<int32_t>(round_to_integer(small * 512.0f)));
  } else {
    code = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
    code = code > 0x7eu ? 0x7eu : code;
  }
  return static_cast<uint8_t>(sign | code);
}

#if defined(LLMC_AVX512)

LLMC_INLINE F16 load_i8(const void* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))))};
}

// Through half precision, whose exponent has the same place once shifted; its bias is 8 more.
LLMC_INLINE F16 load_e4m3(const void* p) {
  const __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  return {_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f))};
}

// Nibble - 8 of sixteen bytes.
LLMC_INLINE void load_nibbles(const void* p, F16* low, F16* high) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  const __m512i offset = _mm512_set1_epi32(8);
  *low = {_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(bytes, _mm512_set1_epi32(15)), offset))};
  *high = {_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(bytes, 4), offset))};
}

// Sixteen pairs (even[i], odd[i]); exact: both are bfloat16 values already.
LLMC_INLINE void store_exact_pairs(uint16_t* p, F16 even, F16 odd) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.v), 16);
  _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_castps_si512(odd.v)));
}
LLMC_INLINE void store_pairs(uint16_t* p, F16 even, F16 odd) {
  const __m512i low = _mm512_cvtepu16_epi32(narrow_bf16(even)), high = _mm512_cvtepu16_epi32(narrow_bf16(odd));
  _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

#elif defined(LLMC_AVX2)

LLMC_INLINE F16 load_i8(const void* p) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

// Through half precision, whose exponent has the same place once shifted; its bias is 8 more.
LLMC_INLINE F16 load_e4m3(const void* p) {
  const __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  return F16{_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))} * set1(256.0f);
}

LLMC_INLINE void load_nibbles(const void* p, F16* low, F16* high) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  const __m256i a = _mm256_cvtepu8_epi32(bytes), b = _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)), mask = _mm256_set1_epi32(15);
  const auto value = [](__m256i nibble) { return _mm256_cvtepi32_ps(_mm256_sub_epi32(nibble, _mm256_set1_epi32(8))); };
  *low = {value(_mm256_and_si256(a, mask)), value(_mm256_and_si256(b, mask))};
  *high = {value(_mm256_srli_epi32(a, 4)), value(_mm256_srli_epi32(b, 4))};
}

// Sixteen pairs (even[i], odd[i]); exact: both are bfloat16 values already.
LLMC_INLINE void store_exact_pairs(uint16_t* p, F16 even, F16 odd) {
  const auto pairs = [](__m256 low, __m256 high) {
    return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(low), 16), _mm256_castps_si256(high));
  };
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pairs(even.a, odd.a));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, pairs(even.b, odd.b));
}
LLMC_INLINE void store_pairs(uint16_t* p, F16 even, F16 odd) {
  const auto pairs = [](__m256 low, __m256 high) {
    return _mm256_or_si256(round_bf16(low), _mm256_slli_epi32(round_bf16(high), 16));
  };
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pairs(even.a, odd.a));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, pairs(even.b, odd.b));
}

#else

LLMC_INLINE F16 load_i8(const void* p) {
  const int8_t* bytes = static_cast<const int8_t*>(p);
  float lanes[kBlock];
  for (int i = 0; i < kBlock; ++i) lanes[i] = static_cast<float>(bytes[i]);
  return load(lanes);
}

// The bits of a float that is too small by 2^120, which also gets subnormals right.
LLMC_INLINE F16 load_e4m3(const void* p) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  float lanes[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t bits = (bytes[i] & 0x80u) << 24 | (bytes[i] & 0x7fu) << 20;
    std::memcpy(&lanes[i], &bits, 4);
  }
  return load(lanes) * set1(1.329227995784916e36f);
}

LLMC_INLINE void load_nibbles(const void* p, F16* low, F16* high) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  float a[kBlock], b[kBlock];
  for (int i = 0; i < kBlock; ++i) a[i] = static_cast<float>((bytes[i] & 15) - 8), b[i] = static_cast<float>((bytes[i] >> 4) - 8);
  *low = load(a), *high = load(b);
}

LLMC_INLINE void store_pairs(uint16_t* p, F16 even, F16 odd) {
  uint16_t a[kBlock], b[kBlock];
  store_bf16(a, even), store_bf16(b, odd);
  for (int i = 0; i < kBlock; ++i) p[2 * i] = a[i], p[2 * i + 1] = b[i];
}
LLMC_INLINE void store_exact_pairs(uint16_t* p, F16 even, F16 odd) { store_pairs(p, even, odd); }

#endif

}  // namespace llmc
