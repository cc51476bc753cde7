// Products of integer weights with AVX-512 VNNI: u8 weights times s8 operand planes, four columns at a time.
#pragma once

#include "gemm.hpp"

namespace llmc {

template <Format>
struct IntegerTileShape {
  static constexpr int rows = 3, blocks = 4;  // 3 rows x 2 planes x 4 blocks = 24 accumulators, 4 weights
};

typedef uint32_t U32x16 __attribute__((vector_size(64)));

LLMC_INLINE __m512i dot4(__m512i acc, __m512i weights, const int8_t* operand) {
  acc = _mm512_dpbusd_epi32(acc, weights, _mm512_set1_epi32(static_cast<int>(load_u32(operand))));
  // Stops GCC's redundancy elimination from keeping every accumulator twice, which spills them and halves the speed.
  __asm__("" : "+v"(acc));
  return acc;
}

LLMC_INLINE F16 join_planes(__m512i hi, __m512i lo) {
  return fma(F16{_mm512_cvtepi32_ps(hi)}, set1(256.0f), F16{_mm512_cvtepi32_ps(lo)});
}

// Quads of one block in ascending order. A tile of one row has registers to keep the planes in, KEEP, and loads each word of
// them once; larger tiles load again for each quad.
template <Format F, bool KEEP>
class QuadReader {
 public:
  LLMC_INLINE __m512i next(const char* unit, int q) {
    constexpr int kLow = low_bits(F), kHigh = high_bits(F);
    if constexpr (!KEEP) return reinterpret_cast<__m512i>(quad_codes<F, U32x16>(unit, q));
    if (q * kLow % 8 == 0) low_ = kept(load_plane<kLow, U32x16>(unit, q));
    if constexpr (kHigh > 0)
      if (q * kHigh % 8 == 0) high_ = kept(load_plane<kHigh, U32x16>(unit + 64 * kLow, q));
    return reinterpret_cast<__m512i>(join_codes<F>(low_, high_, q));
  }

 private:
  LLMC_INLINE static U32x16 kept(U32x16 word) {
    __asm__("" : "+v"(word));  // GCC would rather load again
    return word;
  }
  U32x16 low_, high_;
};

template <Format F, int ROWS, int BLOCKS>
LLMC_INLINE void multiply_group(const TileArgs& args, const Group& group, const char*& data, Prefetch<BLOCKS>& ahead,
                                F16 (&products)[ROWS][BLOCKS]) {
  const int64_t stride = block_stride(F, args.padded_k);
  __m512i hi[ROWS][BLOCKS], lo[ROWS][BLOCKS];
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) {
      hi[r][b] = _mm512_set1_epi32(-weight_offset(F) * group.row(args, r).sum_hi[group.index]);
      lo[r][b] = _mm512_set1_epi32(-weight_offset(F) * group.row(args, r).sum_lo[group.index]);
    }
  const int8_t* plane = reinterpret_cast<const int8_t*>(args.operand) + group.begin;
  QuadReader<F, ROWS == 1> reader[BLOCKS];
  for (int k = group.begin; k < group.end; k += kUnit) {
    LLMC_UNROLL for (int q = 0; q < kQuads; ++q) {
      if (q < weight_bits(F)) ahead.step();
      __m512i w[BLOCKS];
      LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) w[b] = reader[b].next(data + b * stride, q);
      LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
        const int8_t* x = plane + r * args.operand_stride + 4 * q;
        LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) hi[r][b] = dot4(hi[r][b], w[b], x);
        LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) lo[r][b] = dot4(lo[r][b], w[b], x + args.padded_k);
      }
    }
    plane += kUnit;
    data += unit_bytes(F);
  }
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) products[r][b] = join_planes(hi[r][b], lo[r][b]);
}

}  // namespace llmc
