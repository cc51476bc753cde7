// GEMM tiles for i8 and i4 weights with AVX2, which has no u8 x s8 dot product that cannot saturate for i8.
#pragma once

#include "gemm.hpp"

namespace llmc {

template <>
struct TileShape<Format::i8> {
  static constexpr int rows = 1, blocks = 1;
};
template <>
struct TileShape<Format::i4> {
  static constexpr int rows = 2, blocks = 1;
};

struct I16 {
  __m256i a, b;
};

LLMC_INLINE F16 join_planes(I16 hi, I16 lo) {
  const F16 h{_mm256_cvtepi32_ps(hi.a), _mm256_cvtepi32_ps(hi.b)}, l{_mm256_cvtepi32_ps(lo.a), _mm256_cvtepi32_ps(lo.b)};
  return fma(h, set1(256.0f), l);
}

// Bytes widen to 16 bits and vpmaddwd adds pairs of columns. A register holds 4 outputs x 2 halves of a column quad;
// the halves are added at the end.
template <int ROWS, int BLOCKS>
LLMC_INLINE void tile_i8(const TileArgs& args) {
  static_assert(ROWS == 1 && BLOCKS == 1, "eight accumulators and four weights fill the registers");
  const IntegerRow row(const_cast<char*>(args.operand), args.padded_k, 1);
  __m256i hi[4], lo[4];
  LLMC_UNROLL for (int i = 0; i < 4; ++i) hi[i] = lo[i] = _mm256_setzero_si256();
  const char* data = args.data;
  Prefetch<BLOCKS> ahead(data, block_stride(Format::i8, args.padded_k));
  for (int k = 0; k < args.padded_k; k += 4, data += 64) {
    ahead.step();
    const __m256i x_hi = _mm256_cvtepi8_epi16(_mm_set1_epi32(static_cast<int>(load_u32(row.hi + k))));
    const __m256i x_lo = _mm256_cvtepi8_epi16(_mm_set1_epi32(static_cast<int>(load_u32(row.lo + k))));
    LLMC_UNROLL for (int i = 0; i < 4; ++i) {
      const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i));
      hi[i] = _mm256_add_epi32(hi[i], _mm256_madd_epi16(w, x_hi));
      lo[i] = _mm256_add_epi32(lo[i], _mm256_madd_epi16(w, x_lo));
    }
  }
  const auto halves = [](const __m256i* acc, int32_t sum) {  // [n0 n0 n1 n1 | n2 n2 n3 n3] x 4 -> [n0 .. n15]
    const __m256i offset = _mm256_set1_epi32(-128 * sum);
    const __m256i a = _mm256_permute4x64_epi64(_mm256_hadd_epi32(acc[0], acc[1]), 0xd8);
    const __m256i b = _mm256_permute4x64_epi64(_mm256_hadd_epi32(acc[2], acc[3]), 0xd8);
    return I16{_mm256_add_epi32(a, offset), _mm256_add_epi32(b, offset)};
  };
  const F16 sum = join_planes(halves(hi, *row.sum_hi), halves(lo, *row.sum_lo));
  store(args.out, sum * set1(*row.scale) * load(reinterpret_cast<const float*>(args.scale)));
}

// Nibbles are small enough for vpmaddubsw: 16-bit sums hold 32 columns (8 quads x 2 x 15 x 128 = 30720), then widen.
template <int ROWS, int BLOCKS>
LLMC_INLINE void tile_i4(const TileArgs& args) {
  static_assert(BLOCKS == 1, "");
  const int groups = static_cast<int>(ceil_div(args.padded_k, args.group));
  const auto row = [&](int r) {
    return IntegerRow(const_cast<char*>(args.operand) + r * args.operand_stride, args.padded_k, groups);
  };
  const __m256i low_nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const auto plus = [&](__m256i acc, __m256i w, const int8_t* x) {
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, _mm256_set1_epi32(static_cast<int>(load_u32(x)))));
  };
  F16 acc[ROWS];
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r) acc[r] = zero();
  const char* data = args.data;
  Prefetch<BLOCKS> ahead(data, block_stride(Format::i4, args.padded_k));
  for (int g = 0; g < groups; ++g) {
    I16 hi[ROWS], lo[ROWS];
    LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
      hi[r].a = hi[r].b = _mm256_set1_epi32(-8 * row(r).sum_hi[g]);
      lo[r].a = lo[r].b = _mm256_set1_epi32(-8 * row(r).sum_lo[g]);
    }
    const int begin = g * args.group;
    const int end = begin + args.group < args.padded_k ? begin + args.group : args.padded_k;
    for (int c = begin; c < end; c += 32) {
      I16 hi16[ROWS], lo16[ROWS];
      LLMC_UNROLL for (int r = 0; r < ROWS; ++r) hi16[r].a = hi16[r].b = lo16[r].a = lo16[r].b = _mm256_setzero_si256();
      for (int k = c; k < c + 32; k += 8, data += 64) {
        ahead.step();
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data) + 1);
        const __m256i even_a = _mm256_and_si256(a, low_nibble), odd_a = _mm256_and_si256(_mm256_srli_epi16(a, 4), low_nibble);
        const __m256i even_b = _mm256_and_si256(b, low_nibble), odd_b = _mm256_and_si256(_mm256_srli_epi16(b, 4), low_nibble);
        LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
          const int8_t* x = reinterpret_cast<const int8_t*>(args.operand) + r * args.operand_stride + k;
          const int8_t* y = x + args.padded_k;
          hi16[r].a = plus(plus(hi16[r].a, even_a, x), odd_a, x + 4);
          hi16[r].b = plus(plus(hi16[r].b, even_b, x), odd_b, x + 4);
          lo16[r].a = plus(plus(lo16[r].a, even_a, y), odd_a, y + 4);
          lo16[r].b = plus(plus(lo16[r].b, even_b, y), odd_b, y + 4);
        }
      }
      LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
        hi[r].a = _mm256_add_epi32(hi[r].a, _mm256_madd_epi16(hi16[r].a, ones));
        hi[r].b = _mm256_add_epi32(hi[r].b, _mm256_madd_epi16(hi16[r].b, ones));
        lo[r].a = _mm256_add_epi32(lo[r].a, _mm256_madd_epi16(lo16[r].a, ones));
        lo[r].b = _mm256_add_epi32(lo[r].b, _mm256_madd_epi16(lo16[r].b, ones));
      }
    }
    const F16 w = load_f16(reinterpret_cast<const uint16_t*>(args.scale) + g * kBlock);
    LLMC_UNROLL for (int r = 0; r < ROWS; ++r) acc[r] = fma(join_planes(hi[r], lo[r]), w, acc[r]);
  }
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r) store(args.out + r * args.out_stride, acc[r] * set1(*row(r).scale));
}

}  // namespace llmc
