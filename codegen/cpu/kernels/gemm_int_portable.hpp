// Products of integer weights as plain loops that a compiler can vectorise.
#pragma once

#include "gemm.hpp"

namespace llmc {

struct IntegerTileShape {
  static constexpr int rows = 1, blocks = 1;
};
template <>
struct TileShape<Format::i8> : IntegerTileShape {};
template <>
struct TileShape<Format::i8g> : IntegerTileShape {};
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

template <Format F, int ROWS, int BLOCKS>
LLMC_INLINE void multiply_group(const TileArgs& args, const Group& group, const char*& data, Prefetch<BLOCKS>& /*ahead*/,
                                F16 (&products)[ROWS][BLOCKS]) {
  static_assert(ROWS == 1 && BLOCKS == 1, "");
  constexpr int kBits = F == Format::i4 ? 4 : 8, kMask = (1 << kBits) - 1;
  const IntegerRow row = group.row(args, 0);
  int32_t hi[kBlock], lo[kBlock];
  for (int n = 0; n < kBlock; ++n) {
    hi[n] = -weight_offset(F) * row.sum_hi[group.index];
    lo[n] = -weight_offset(F) * row.sum_lo[group.index];
  }
  for (int k = group.begin; k < group.end; data += 64)
    LLMC_UNROLL for (int shift = 0; shift < 8; shift += kBits, k += 4) {
      dot4(hi, reinterpret_cast<const uint8_t*>(data), shift, kMask, row.hi + k);
      dot4(lo, reinterpret_cast<const uint8_t*>(data), shift, kMask, row.lo + k);
    }
  products[0][0] = join_planes(hi, lo);
}

}  // namespace llmc
