// Products of integer weights with AVX-512 VNNI: u8 weights times s8 operand planes, four columns at a time.
#pragma once

#include "gemm.hpp"

namespace llmc {

struct IntegerTileShape {
  static constexpr int rows = 3, blocks = 4;  // 3 rows x 2 planes x 4 blocks = 24 accumulators, 4 weights
};
template <>
struct TileShape<Format::i8> : IntegerTileShape {};
template <>
struct TileShape<Format::i8g> : IntegerTileShape {};
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

// Column quads in 64 bytes of weights, each as u8 for one dot product.
template <Format F>
struct Quads {
  static constexpr int count = 1;
  __m512i q[1];
  LLMC_INLINE void load(const char* p) { q[0] = _mm512_loadu_si512(p); }
};
template <>
struct Quads<Format::i4> {
  static constexpr int count = 2;
  __m512i q[2];
  LLMC_INLINE void load(const char* p) {
    const __m512i both = _mm512_loadu_si512(p), low_nibble = _mm512_set1_epi8(15);
    q[0] = _mm512_and_si512(both, low_nibble);
    q[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_nibble);
  }
};

template <Format F, int ROWS, int BLOCKS>
LLMC_INLINE void multiply_group(const TileArgs& args, const Group& group, const char*& data, Prefetch<BLOCKS>& ahead,
                                F16 (&products)[ROWS][BLOCKS]) {
  constexpr int kQuads = Quads<F>::count;
  const int64_t stride = block_stride(F, args.padded_k);
  __m512i hi[ROWS][BLOCKS], lo[ROWS][BLOCKS];
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) {
      hi[r][b] = _mm512_set1_epi32(-weight_offset(F) * group.row(args, r).sum_hi[group.index]);
      lo[r][b] = _mm512_set1_epi32(-weight_offset(F) * group.row(args, r).sum_lo[group.index]);
    }
  const int8_t* plane = reinterpret_cast<const int8_t*>(args.operand) + group.begin;
  for (int k = group.begin; k < group.end; k += 4 * kQuads) {
    Quads<F> w[BLOCKS];
    ahead.step();
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) w[b].load(data + b * stride);
    LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
      LLMC_UNROLL for (int i = 0; i < kQuads; ++i) {
        const int8_t* x = plane + r * args.operand_stride + 4 * i;
        LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) hi[r][b] = dot4(hi[r][b], w[b].q[i], x);
        LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) lo[r][b] = dot4(lo[r][b], w[b].q[i], x + args.padded_k);
      }
    plane += 4 * kQuads;
    data += 64;
  }
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) products[r][b] = join_planes(hi[r][b], lo[r][b]);
}

}  // namespace llmc
