// Products of integer weights as plain loops that a compiler can vectorise.
#pragma once

#include "gemm.hpp"

namespace llmc {

template <Format>
struct IntegerTileShape {
  static constexpr int rows = 1, blocks = 1;
};

// acc[n] += sum over four columns of codes[n][j] * x[j].
LLMC_INLINE void dot4(int32_t* acc, const uint8_t* codes, const int8_t* x) {
  for (int n = 0; n < kBlock; ++n)
    for (int j = 0; j < 4; ++j) acc[n] += codes[4 * n + j] * x[j];
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
  const IntegerRow row = group.row(args, 0);
  int32_t hi[kBlock], lo[kBlock];
  for (int n = 0; n < kBlock; ++n) {
    hi[n] = -weight_offset(F) * row.sum_hi[group.index];
    lo[n] = -weight_offset(F) * row.sum_lo[group.index];
  }
  for (int k = group.begin; k < group.end; k += kUnit, data += unit_bytes(F))
    for (int q = 0; q < kQuads; ++q) {
      U4 codes[4];
      LLMC_UNROLL for (int i = 0; i < 4; ++i) codes[i] = quad_codes<F, U4>(data + 16 * i, q);
      dot4(hi, reinterpret_cast<const uint8_t*>(codes), row.hi + k + 4 * q);
      dot4(lo, reinterpret_cast<const uint8_t*>(codes), row.lo + k + 4 * q);
    }
  products[0][0] = join_planes(hi, lo);
}

}  // namespace llmc
