// GEMM tiles for i8 and i4 weights as plain loops that a compiler can vectorise.
#pragma once

#include "gemm.hpp"

namespace llmc {

struct IntegerTileShape {
  static constexpr int rows = 1, blocks = 1;
};
template <>
struct TileShape<Format::i8> : IntegerTileShape {};
template <>
struct TileShape<Format::i4> : IntegerTileShape {};

// acc[n] += sum over four columns of (weights[n][j] >> shift & mask) * x[j].
LLMC_INLINE void dot4(int32_t* acc, const uint8_t* weights, int shift, int mask, const int8_t* x) {
  for (int n = 0; n < kBlock; ++n)
    for (int j = 0; j < 4; ++j) acc[n] += (weights[4 * n + j] >> shift & mask) * x[j];
}

LLMC_INLINE F16 join_planes(const int32_t* hi, const int32_t* lo) {
  float sum[kBlock];
  for (int n = 0; n < kBlock; ++n) sum[n] = 256.0f * static_cast<float>(hi[n]) + static_cast<float>(lo[n]);
  return load(sum);
}

template <int ROWS, int BLOCKS>
LLMC_INLINE void tile_i8(const TileArgs& args) {
  static_assert(ROWS == 1 && BLOCKS == 1, "");
  const IntegerRow row(const_cast<char*>(args.operand), args.padded_k, 1);
  const uint8_t* data = reinterpret_cast<const uint8_t*>(args.data);
  int32_t hi[kBlock], lo[kBlock];
  for (int n = 0; n < kBlock; ++n) hi[n] = -128 * *row.sum_hi, lo[n] = -128 * *row.sum_lo;
  for (int k = 0; k < args.padded_k; k += 4, data += 64) {
    dot4(hi, data, 0, 255, row.hi + k);
    dot4(lo, data, 0, 255, row.lo + k);
  }
  store(args.out, join_planes(hi, lo) * set1(*row.scale) * load(reinterpret_cast<const float*>(args.scale)));
}

template <int ROWS, int BLOCKS>
LLMC_INLINE void tile_i4(const TileArgs& args) {
  static_assert(ROWS == 1 && BLOCKS == 1, "");
  const int groups = static_cast<int>(ceil_div(args.padded_k, args.group));
  const IntegerRow row(const_cast<char*>(args.operand), args.padded_k, groups);
  const uint8_t* data = reinterpret_cast<const uint8_t*>(args.data);
  F16 acc = zero();
  for (int g = 0; g < groups; ++g) {
    int32_t hi[kBlock], lo[kBlock];
    for (int n = 0; n < kBlock; ++n) hi[n] = -8 * row.sum_hi[g], lo[n] = -8 * row.sum_lo[g];
    const int begin = g * args.group;
    const int end = begin + args.group < args.padded_k ? begin + args.group : args.padded_k;
    for (int k = begin; k < end; k += 8, data += 64) {
      dot4(hi, data, 0, 15, row.hi + k);
      dot4(lo, data, 0, 15, row.lo + k);
      dot4(hi, data, 4, 15, row.hi + k + 4);
      dot4(lo, data, 4, 15, row.lo + k + 4);
    }
    acc = fma(join_planes(hi, lo), load_f16(reinterpret_cast<const uint16_t*>(args.scale) + g * kBlock), acc);
  }
  store(args.out, acc * set1(*row.scale));
}

}  // namespace llmc
