// Linear layers: out = epilogue(operand @ W^T + bias) for one row or thousands.
//
// Work is cut into panels of four weight blocks. A panel is read from memory once, by one thread, and stays in its L2
// while all rows pass by in tiles; so the few rows of a decode step stream the weights, and the many of a prefill
// compute at the rate of the tile. Both run the same tiles and give the same bits.
#pragma once

#include "amx.hpp"
#include "gemm.hpp"
#include "parallel.hpp"

namespace llmc {

constexpr int kPanelBlocks = 4;
constexpr int kPanelWidth = kPanelBlocks * kBlock;

struct LinearShape {
  const char *operand, *data, *scale;
  int64_t operand_stride, data_stride, scale_stride;  // bytes of a row, of a weight block, of a block's scales
  int padded_k, group, blocks;                        // blocks of the weight, both halves of a gate/up pair
};

template <Format F>
LinearShape linear_shape(const void* operand, const void* data, const void* scale, int group, int N, int K, bool paired) {
  const int padded = static_cast<int>(round_up(K, kColumnAlign));
  return {static_cast<const char*>(operand), static_cast<const char*>(data), static_cast<const char*>(scale),
          operand_bytes(F, K, group), block_stride(F, padded), scale_stride(F, padded, group), padded, group,
          static_cast<int>(ceil_div(N, kBlock)) * (paired ? 2 : 1)};
}

template <Epilogue E>
LLMC_INLINE F16 activate(F16 gate) {
  if constexpr (E == Epilogue::glu_silu) return silu(gate);
  if constexpr (E == Epilogue::glu_gelu_tanh) return gelu_tanh(gate);
  return gelu(gate);
}

// Writes one row of a panel: `sums` holds its raw products, `first` is its first weight block.
template <Epilogue E>
LLMC_INLINE void finish_row(const float* sums, const float* bias, int first, int blocks, int N, float* out) {
  const auto value = [&](int b) {
    const F16 sum = load(sums + b * kBlock);
    return bias ? sum + load(bias + (first + b) * kBlock) : sum;
  };
  if constexpr (E == Epilogue::none) {
    for (int b = 0; b < blocks; ++b) {
      const int column = (first + b) * kBlock;
      store_some(out + column, value(b), N - column);
    }
  } else {
    for (int b = 0; b < blocks; b += 2) {
      const int column = (first + b) / 2 * kBlock;
      store_some(out + column, activate<E>(value(b)) * value(b + 1), N - column);
    }
  }
}

// Rows that pass by a panel at a time.
template <Format F>
constexpr int kTileRows = kHasAmx<F> ? 16 : TileShape<F>::rows;

// Raw products of up to kTileRows rows with the blocks of a panel.
template <Format F>
LLMC_INLINE void panel_tile(const LinearShape& s, int row, int rows, int first, int blocks, float* sums) {
  const auto at = [&](int r, int b) {
    return TileArgs{s.operand + (row + r) * s.operand_stride, s.operand_stride,
                    s.data + (first + b) * s.data_stride, s.scale + (first + b) * s.scale_stride,
                    s.padded_k, s.group, sums + r * kPanelWidth + b * kBlock, kPanelWidth};
  };
#ifdef LLMC_AMX
  if constexpr (kHasAmx<F>) {
    if (F == Format::bf16 || rows == kAmxRows) return amx_panel<F>(at(0, 0), rows, blocks);
  }
#endif
  constexpr int kWide = TileShape<F>::blocks, kHigh = TileShape<F>::rows;
  for (int r = 0; r < rows; r += kHigh) {
    int b = 0;
    for (; b + kWide <= blocks; b += kWide) tile_for<F, kWide>(rows - r)(at(r, b));
    for (; b < blocks; ++b) tile_for<F, 1>(rows - r)(at(r, b));
  }
}

template <Format F, Epilogue E>
void linear(const Ctx& ctx, const void* operand, const void* data, const void* scale, int group, const float* bias,
            int rows, int N, int K, float* out, int ldo) {
  const LinearShape shape = linear_shape<F>(operand, data, scale, group, N, K, E != Epilogue::none);
  constexpr int kRows = kTileRows<F>;
  const int64_t panels = ceil_div(shape.blocks, kPanelBlocks);
  // A narrow matrix has too few panels to balance the threads; its rows are split too.
  const int64_t wanted = panels < 4 * ctx.threads ? ceil_div(4 * ctx.threads, panels) : 1;
  const int64_t chunk = round_up(ceil_div(rows, wanted), kRows);
  const int64_t chunks = rows > 0 ? ceil_div(rows, chunk) : 0;
  parallel_for(ctx.threads, panels * chunks, 1, [&](int64_t unit) {
    const int first = static_cast<int>(unit / chunks) * kPanelBlocks;
    const int blocks = shape.blocks - first < kPanelBlocks ? shape.blocks - first : kPanelBlocks;
    const int begin = static_cast<int>(unit % chunks * chunk);
    const int end = static_cast<int>(begin + chunk < rows ? begin + chunk : rows);
    alignas(64) float sums[kRows * kPanelWidth];
    for (int row = begin; row < end; row += kRows) {
      const int count = end - row < kRows ? end - row : kRows;
      panel_tile<F>(shape, row, count, first, blocks, sums);
      for (int r = 0; r < count; ++r)
        finish_row<E>(sums + r * kPanelWidth, bias, first, blocks, N, out + static_cast<int64_t>(row + r) * ldo);
    }
  });
}

}  // namespace llmc
