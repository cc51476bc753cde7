// GEMM tiles for i8 and i4 weights with AVX-512 VNNI: u8 weights times s8 operand planes, four columns at a time.
#pragma once

#include "gemm.hpp"

namespace llmc {

struct IntegerTileShape {
  static constexpr int rows = 3, blocks = 4;  // 3 rows x 2 planes x 4 blocks = 24 accumulators, 4 weights
};
template <>
struct TileShape<Format::i8> : IntegerTileShape {};
template <>
struct TileShape<Format::i4> : IntegerTileShape {};

LLMC_INLINE __m512i dot4(__m512i acc, __m512i weights, const int8_t* operand) {
  acc = _mm512_dpbusd_epi32(acc, weights, _mm512_set1_epi32(static_cast<int>(load_u32(operand))));
  // Stops GCC's redundancy elimination from keeping every accumulator twice, which spills them and halves the speed.
  __asm__("" : "+v"(acc));
  return acc;
}

LLMC_INLINE F16 join_planes(__m512i hi, __m512i lo) {
  return fma(F16{_mm512_cvtepi32_ps(hi)}, set1(256.0f), F16{_mm512_cvtepi32_ps(lo)});
}

template <int ROWS, int BLOCKS>
LLMC_INLINE void tile_i8(const TileArgs& args) {
  const int64_t stride = block_stride(Format::i8, args.padded_k);
  const auto row = [&](int r) {
    return IntegerRow(const_cast<char*>(args.operand) + r * args.operand_stride, args.padded_k, 1);
  };
  __m512i hi[ROWS][BLOCKS], lo[ROWS][BLOCKS];
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) {
      hi[r][b] = _mm512_set1_epi32(-128 * *row(r).sum_hi);
      lo[r][b] = _mm512_set1_epi32(-128 * *row(r).sum_lo);
    }
  const int8_t* plane = reinterpret_cast<const int8_t*>(args.operand);
  const char* data = args.data;
  Prefetch<BLOCKS> ahead(data, stride);
  for (int k = 0; k < args.padded_k; k += 4) {
    __m512i w[BLOCKS];
    ahead.step();
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) w[b] = _mm512_loadu_si512(data + b * stride);
    LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
      const int8_t* x = plane + r * args.operand_stride;
      LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) hi[r][b] = dot4(hi[r][b], w[b], x);
      LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) lo[r][b] = dot4(lo[r][b], w[b], x + args.padded_k);
    }
    plane += 4;
    data += 64;
  }
  const float* scale = reinterpret_cast<const float*>(args.scale);
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b)
      store(args.out + r * args.out_stride + b * kBlock,
            join_planes(hi[r][b], lo[r][b]) * set1(*row(r).scale) * load(scale + b * kBlock));
}

template <int ROWS, int BLOCKS>
LLMC_INLINE void tile_i4(const TileArgs& args) {
  const int64_t stride = block_stride(Format::i4, args.padded_k);
  const int groups = static_cast<int>(ceil_div(args.padded_k, args.group));
  const auto row = [&](int r) {
    return IntegerRow(const_cast<char*>(args.operand) + r * args.operand_stride, args.padded_k, groups);
  };
  const __m512i low_nibble = _mm512_set1_epi8(15);
  F16 acc[ROWS][BLOCKS];
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) acc[r][b] = zero();
  const char* data = args.data;
  Prefetch<BLOCKS> ahead(data, stride);
  for (int g = 0; g < groups; ++g) {
    __m512i hi[ROWS][BLOCKS], lo[ROWS][BLOCKS];
    LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
      LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) {
        hi[r][b] = _mm512_set1_epi32(-8 * row(r).sum_hi[g]);
        lo[r][b] = _mm512_set1_epi32(-8 * row(r).sum_lo[g]);
      }
    const int begin = g * args.group;
    const int end = begin + args.group < args.padded_k ? begin + args.group : args.padded_k;
    const int8_t* plane = reinterpret_cast<const int8_t*>(args.operand) + begin;
    for (int k = begin; k < end; k += 8) {
      __m512i even[BLOCKS], odd[BLOCKS];
      ahead.step();
      LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) {
          const __m512i both = _mm512_loadu_si512(data + b * stride);
        even[b] = _mm512_and_si512(both, low_nibble);
        odd[b] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_nibble);
      }
      LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
        const int8_t* x = plane + r * args.operand_stride;
        LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) hi[r][b] = dot4(hi[r][b], even[b], x);
        LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) lo[r][b] = dot4(lo[r][b], even[b], x + args.padded_k);
        LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) hi[r][b] = dot4(hi[r][b], odd[b], x + 4);
        LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) lo[r][b] = dot4(lo[r][b], odd[b], x + args.padded_k + 4);
      }
      plane += 8;
      data += 64;
    }
    const uint16_t* scale = reinterpret_cast<const uint16_t*>(args.scale) + g * kBlock;
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) {
      const F16 w = load_f16(scale + b * groups * kBlock);
      LLMC_UNROLL for (int r = 0; r < ROWS; ++r) acc[r][b] = fma(join_planes(hi[r][b], lo[r][b]), w, acc[r][b]);
    }
  }
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b)
      store(args.out + r * args.out_stride + b * kBlock, acc[r][b] * set1(*row(r).scale));
}

}  // namespace llmc
