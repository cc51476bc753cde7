// The contract of a GEMM tile: ROWS operand rows times BLOCKS weight blocks over the whole K, as floats.
//
// Every tile size of a format does the same arithmetic for each output in the same order, so a row's result does not
// depend on the rows it is computed with. Tiles are plain functions: a linear of any shape and epilogue calls them.
#pragma once

#include <type_traits>

#include "operand.hpp"
#include "planes.hpp"

namespace llmc {

struct TileArgs {
  const char* operand;  // first row
  int64_t operand_stride;
  const char* data;  // first block
  const char* scale;  // first block's scales: f32 [16] (i8), f16 [G, 16], or with minimums f16 [G, 2, 16]
  int padded_k, group;
  float* out;  // [ROWS][out_stride]
  int out_stride;
};

using TileFunction = void (*)(const TileArgs&);

// Fetches weights some way ahead of their use: the hardware prefetchers stop at 4 KiB pages, weights do not. A tile reads
// BLOCKS blocks side by side, so near their end what comes next is the same place of the following BLOCKS.
template <int BLOCKS>
class Prefetch {
 public:
  Prefetch(const char* data, int64_t stride)
      : next_(data + kDistance), end_(data + stride), stride_(stride) {}

  // Call once for each 64 bytes of a block.
  LLMC_INLINE void step() {
    if (next_ == end_) next_ += (BLOCKS - 1) * stride_;
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) __builtin_prefetch(next_ + b * stride_, 0, 2);
    next_ += 64;
  }

 private:
  static constexpr int kDistance = 1024;
  const char *next_, *end_;
  int64_t stride_;
};

// Group g of an integer tile's columns. Its products are what each level defines:
//   template <Format F, int ROWS, int BLOCKS>
//   void multiply_group(const TileArgs&, const Group&, const char*& data, Prefetch<BLOCKS>&, F16 (&products)[ROWS][BLOCKS])
// sums exact products in integers, takes off the weights' offset, and leaves `data` at the next group.
struct Group {
  int begin, end;  // columns
  int index, count;

  LLMC_INLINE IntegerRow row(const TileArgs& args, int r) const {
    return IntegerRow(const_cast<char*>(args.operand) + r * args.operand_stride, args.padded_k, count);
  }
};

}  // namespace llmc

#include "gemm_float.hpp"

#if defined(LLMC_AVX512)
#include "gemm_int_avx512.hpp"
#elif defined(LLMC_AVX2)
#include "gemm_int_avx2.hpp"
#else
#include "gemm_int_portable.hpp"
#endif

namespace llmc {

// Largest tile of a format at this level, as many accumulators as the registers hold.
template <Format F>
using TileShape = std::conditional_t<is_integer(F), IntegerTileShape<F>, FloatTileShape>;

template <int ROWS, int BLOCKS>
LLMC_INLINE void tile_i8(const TileArgs& args) {
  const Group all{0, args.padded_k, 0, 1};
  const char* data = args.data;
  Prefetch<BLOCKS> ahead(data, block_stride(Format::i8, args.padded_k));
  F16 products[ROWS][BLOCKS];
  multiply_group<Format::i8>(args, all, data, ahead, products);
  const float* scale = reinterpret_cast<const float*>(args.scale);
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b)
      store(args.out + r * args.out_stride + b * kBlock,
            products[r][b] * set1(*all.row(args, r).scale) * load(scale + b * kBlock));
}

template <Format F, int ROWS, int BLOCKS>
LLMC_INLINE void tile_grouped(const TileArgs& args) {
  constexpr int kPerGroup = is_asymmetric(F) ? 2 * kBlock : kBlock;
  const int groups = num_groups(F, args.padded_k, args.group);
  const uint16_t* scale = reinterpret_cast<const uint16_t*>(args.scale);
  const char* data = args.data;
  Prefetch<BLOCKS> ahead(data, block_stride(F, args.padded_k));
  F16 acc[ROWS][BLOCKS];
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) acc[r][b] = zero();
  for (int g = 0; g < groups; ++g, scale += kPerGroup) {
    const int begin = g * args.group, end = begin + args.group;
    F16 products[ROWS][BLOCKS];
    const Group here{begin, end < args.padded_k ? end : args.padded_k, g, groups};
    multiply_group<F>(args, here, data, ahead, products);
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b) {
      const uint16_t* first = scale + b * groups * kPerGroup;
      const F16 w = load_f16(first);
      LLMC_UNROLL for (int r = 0; r < ROWS; ++r) acc[r][b] = fma(products[r][b], w, acc[r][b]);
      if constexpr (is_asymmetric(F)) {
        const F16 minimum = load_f16(first + kBlock);
        LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
          acc[r][b] = fma(set1(static_cast<float>(here.row(args, r).sum(g))), minimum, acc[r][b]);
      }
    }
  }
  const Group any{0, 0, 0, groups};
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int b = 0; b < BLOCKS; ++b)
      store(args.out + r * args.out_stride + b * kBlock, acc[r][b] * set1(*any.row(args, r).scale));
}

template <Format F, int ROWS, int BLOCKS>
LLMC_NOINLINE void tile(const TileArgs& args) {
  if constexpr (!is_integer(F)) tile_float<F, ROWS, BLOCKS>(args);
  if constexpr (F == Format::i8) tile_i8<ROWS, BLOCKS>(args);
  if constexpr (is_grouped(F)) tile_grouped<F, ROWS, BLOCKS>(args);
}

// The tile function for a remainder of rows, and for full panels or single blocks.
template <Format F, int BLOCKS, int ROWS = TileShape<F>::rows>
TileFunction tile_for(int rows) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return tile_for<F, BLOCKS, ROWS - 1>(rows);
  }
  return tile<F, ROWS, BLOCKS>;
}

}  // namespace llmc
