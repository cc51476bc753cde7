// Products of integer weights with AVX2, which has no u8 x s8 dot product that cannot saturate for bytes.
#pragma once

#include "gemm.hpp"

namespace llmc {

template <Format F>
struct IntegerTileShape {
  static constexpr int rows = F == Format::i8 ? 1 : 2, blocks = 1;
};

typedef uint32_t U32x8 __attribute__((vector_size(32)));

struct I16 {
  __m256i a, b;
};

LLMC_INLINE F16 join_planes(I16 hi, I16 lo) {
  const F16 h{_mm256_cvtepi32_ps(hi.a), _mm256_cvtepi32_ps(hi.b)}, l{_mm256_cvtepi32_ps(lo.a), _mm256_cvtepi32_ps(lo.b)};
  return fma(h, set1(256.0f), l);
}

// Weight bytes widen to 16 bits and vpmaddwd adds pairs of columns. A register of sums holds 4 outputs x 2 halves of a
// column quad; this adds the halves: [n0 n0 n1 n1 | n2 n2 n3 n3] x 4 -> [n0 .. n15] + offset.
LLMC_INLINE I16 add_halves(const __m256i* acc, int32_t offset) {
  const __m256i a = _mm256_permute4x64_epi64(_mm256_hadd_epi32(acc[0], acc[1]), 0xd8);
  const __m256i b = _mm256_permute4x64_epi64(_mm256_hadd_epi32(acc[2], acc[3]), 0xd8);
  return {_mm256_add_epi32(a, _mm256_set1_epi32(offset)), _mm256_add_epi32(b, _mm256_set1_epi32(offset))};
}

LLMC_INLINE __m256i widen_weights(const char* p) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// A whole row of i8: each plane has its sums.
template <int ROWS>
LLMC_INLINE void multiply_planes(const TileArgs& args, const Group& group, const char*& data, Prefetch<1>& ahead,
                                 F16 (&products)[ROWS][1]) {
  static_assert(ROWS == 1, "eight accumulators and four weights fill the registers");
  const IntegerRow row = group.row(args, 0);
  __m256i hi[4], lo[4];
  LLMC_UNROLL for (int i = 0; i < 4; ++i) hi[i] = lo[i] = _mm256_setzero_si256();
  for (int k = group.begin; k < group.end; k += 4, data += 64) {
    ahead.step();
    const __m256i x_hi = _mm256_cvtepi8_epi16(_mm_set1_epi32(static_cast<int>(load_u32(row.hi + k))));
    const __m256i x_lo = _mm256_cvtepi8_epi16(_mm_set1_epi32(static_cast<int>(load_u32(row.lo + k))));
    LLMC_UNROLL for (int i = 0; i < 4; ++i) {
      const __m256i w = widen_weights(data + 16 * i);
      hi[i] = _mm256_add_epi32(hi[i], _mm256_madd_epi16(w, x_hi));
      lo[i] = _mm256_add_epi32(lo[i], _mm256_madd_epi16(w, x_lo));
    }
  }
  products[0][0] = join_planes(add_halves(hi, -128 * *row.sum_hi), add_halves(lo, -128 * *row.sum_lo));
}

// A group of i8g or i8a: so few columns that the joined planes' sums fit 32 bits (128 x 255 x 32512 < 2^30), in half the products.
template <Format F, int ROWS>
LLMC_INLINE void multiply_words(const TileArgs& args, const Group& group, const char*& data, Prefetch<1>& ahead,
                                F16 (&products)[ROWS][1]) {
  __m256i acc[ROWS][4];
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int i = 0; i < 4; ++i) acc[r][i] = _mm256_setzero_si256();
  for (int k = group.begin; k < group.end; k += 8) {
    __m256i x[ROWS];  // 8 columns, twice
    LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
      const char* hi = args.operand + r * args.operand_stride + k;
      const auto widen = [](const char* p) { return _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); };
      x[r] = _mm256_broadcastsi128_si256(_mm_add_epi16(_mm_slli_epi16(widen(hi), 8), widen(hi + args.padded_k)));
    }
    LLMC_UNROLL for (int quad = 0; quad < 2; ++quad, data += 64) {
      ahead.step();
      __m256i y[ROWS];
      LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
        y[r] = quad ? _mm256_unpackhi_epi64(x[r], x[r]) : _mm256_unpacklo_epi64(x[r], x[r]);
      LLMC_UNROLL for (int i = 0; i < 4; ++i) {
        const __m256i w = widen_weights(data + 16 * i);
        LLMC_UNROLL for (int r = 0; r < ROWS; ++r) acc[r][i] = _mm256_add_epi32(acc[r][i], _mm256_madd_epi16(w, y[r]));
      }
    }
  }
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
    const IntegerRow row = group.row(args, r);
    const I16 sums = add_halves(acc[r], -weight_offset(F) * row.sum(group.index));
    products[r][0] = {_mm256_cvtepi32_ps(sums.a), _mm256_cvtepi32_ps(sums.b)};
  }
}

// Codes of up to 6 bits are small enough for vpmaddubsw: so many quads as 16-bit sums hold (8 x 2 x 15 x 128 = 30720), then
// they widen.
template <Format F, int ROWS>
LLMC_INLINE void multiply_codes(const TileArgs& args, const Group& group, const char*& data, Prefetch<1>& ahead,
                                F16 (&products)[ROWS][1]) {
  constexpr int kBits = weight_bits(F), kRun = kBits <= 4 ? 8 : kBits == 5 ? 4 : 2;
  static_assert(kRun * 2 * ((1 << kBits) - 1) * 128 <= 32767, "");
  const __m256i ones = _mm256_set1_epi16(1);
  const auto plus = [&](__m256i acc, __m256i w, __m256i x) {
    acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x));
    __asm__("" : "+x"(acc));  // keeps GCC from summing quads side by side, which spills
    return acc;
  };
  const auto spread = [](const int8_t* x) { return _mm256_set1_epi32(static_cast<int>(load_u32(x))); };
  I16 hi[ROWS], lo[ROWS];
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
    hi[r].a = hi[r].b = _mm256_set1_epi32(-weight_offset(F) * group.row(args, r).sum_hi[group.index]);
    lo[r].a = lo[r].b = _mm256_set1_epi32(-weight_offset(F) * group.row(args, r).sum_lo[group.index]);
  }
  for (int k = group.begin; k < group.end; k += kUnit, data += unit_bytes(F))
    LLMC_UNROLL for (int run = 0; run < kQuads; run += kRun) {
      I16 hi16[ROWS], lo16[ROWS];
      LLMC_UNROLL for (int r = 0; r < ROWS; ++r) hi16[r].a = hi16[r].b = lo16[r].a = lo16[r].b = _mm256_setzero_si256();
      LLMC_UNROLL for (int q = run; q < run + kRun; ++q) {
        if (q < kBits) ahead.step();
        const __m256i a = reinterpret_cast<__m256i>(quad_codes<F, U32x8>(data, q));
        const __m256i b = reinterpret_cast<__m256i>(quad_codes<F, U32x8>(data + 32, q));
        LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
          const int8_t* x = reinterpret_cast<const int8_t*>(args.operand) + r * args.operand_stride + k + 4 * q;
          const __m256i high = spread(x), low = spread(x + args.padded_k);
          hi16[r] = {plus(hi16[r].a, a, high), plus(hi16[r].b, b, high)};
          lo16[r] = {plus(lo16[r].a, a, low), plus(lo16[r].b, b, low)};
        }
      }
      LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
        hi[r].a = _mm256_add_epi32(hi[r].a, _mm256_madd_epi16(hi16[r].a, ones));
        hi[r].b = _mm256_add_epi32(hi[r].b, _mm256_madd_epi16(hi16[r].b, ones));
        lo[r].a = _mm256_add_epi32(lo[r].a, _mm256_madd_epi16(lo16[r].a, ones));
        lo[r].b = _mm256_add_epi32(lo[r].b, _mm256_madd_epi16(lo16[r].b, ones));
      }
    }
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r) products[r][0] = join_planes(hi[r], lo[r]);
}

template <Format F, int ROWS, int BLOCKS>
LLMC_INLINE void multiply_group(const TileArgs& args, const Group& group, const char*& data, Prefetch<BLOCKS>& ahead,
                                F16 (&products)[ROWS][BLOCKS]) {
  if constexpr (F == Format::i8) multiply_planes(args, group, data, ahead, products);
  else if constexpr (weight_bits(F) == 8) multiply_words<F>(args, group, data, ahead, products);
  else multiply_codes<F>(args, group, data, ahead, products);
}

}  // namespace llmc
