// GEMM tiles for f32, f16 and bf16 weights, all levels.
#pragma once

#include "gemm.hpp"

namespace llmc {

#if defined(LLMC_AVX512)
struct FloatTileShape {
  static constexpr int rows = 6, blocks = 4;  // 24 accumulators, 4 weights, of 32 registers
};
#else
struct FloatTileShape {
  static constexpr int rows = 3, blocks = 2;  // 6 accumulators of two registers each, of 16
};
#endif

// Shared by all: a step consumes Step::kBytes of each weight block, which divide 64, and 4 of each operand row.
template <int ROWS, int BLOCKS, class Step>
LLMC_INLINE void float_tile(const TileArgs& args, int64_t stride, Step&& step) {
  F16 acc[ROWS][BLOCKS];
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) acc[r][b] = zero();
  const char* operand = args.operand;
  const char* data = args.data;
  Prefetch<BLOCKS> ahead(data, stride);
  for (const char* end = data + stride; data != end;) {
    ahead.step();
    LLMC_UNROLL for (int part = 0; part < 64; part += step.kBytes) {
      LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) step.weight(b, data + b * stride);
      LLMC_UNROLL for (int r = 0; r < ROWS; ++r) {
        step.operand(operand + r * args.operand_stride);
        LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) acc[r][b] = step.multiply(acc[r][b], b);
      }
      operand += 4;
      data += step.kBytes;
    }
  }
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) store(args.out + r * args.out_stride + b * kBlock, acc[r][b]);
}

template <Format F, int BLOCKS>
struct Step {
  static constexpr int kBytes = F == Format::f32 ? 64 : 32;
  F16 w[BLOCKS], x;
  LLMC_INLINE void weight(int b, const char* p) {
    if constexpr (F == Format::f32) w[b] = load(reinterpret_cast<const float*>(p));
    else w[b] = load_f16(reinterpret_cast<const uint16_t*>(p));
  }
  LLMC_INLINE void operand(const char* p) { x = set1(*reinterpret_cast<const float*>(p)); }
  LLMC_INLINE F16 multiply(F16 acc, int b) const { return fma(w[b], x, acc); }
};

template <int BLOCKS>
struct Step<Format::bf16, BLOCKS> {
  static constexpr int kBytes = 64;  // pairs of columns
  const char* w[BLOCKS];
  uint32_t x;
  LLMC_INLINE void weight(int b, const char* p) { w[b] = p; }
  LLMC_INLINE void operand(const char* p) { x = load_u32(p); }
  LLMC_INLINE F16 multiply(F16 acc, int b) const { return dot_bf16(acc, w[b], x); }
};

template <Format F, int ROWS, int BLOCKS>
LLMC_INLINE void tile_float(const TileArgs& args) {
  float_tile<ROWS, BLOCKS>(args, block_stride(F, args.padded_k), Step<F, BLOCKS>{});
}

}  // namespace llmc
