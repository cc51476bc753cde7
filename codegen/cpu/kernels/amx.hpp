// GEMM tiles of up to 16 rows with AMX, for i8 and bf16 weights.
//
// A weight block's 64 columns (i8) or 32 (bf16) are 16 x 64 bytes in a row: exactly an AMX B tile, no copy needed. i8
// sums are the exact integers of the AVX-512 tile, so the two mix freely. bf16 sums are rounded in another order than
// vdpbf16ps rounds them, so at this level every bf16 product takes this path, even a single row: one arithmetic for
// all batches. Grouped integers stay with AVX-512 VNNI: their sums leave the tiles after each group, which costs much of what
// is gained. f16 does too, as tiles that multiply halves are rare.
//
// The process needs Linux's permission to use tiles; llmc_cpu_level asks for it before this level is chosen.
#pragma once

#include "gemm.hpp"

namespace llmc {

#ifdef LLMC_AMX

constexpr int kAmxRows = 16;

template <Format F>
constexpr bool kHasAmx = F == Format::i8 || F == Format::bf16;

// Operand of LDTILECFG (Intel SDM, volume 1, 18.3).
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // Tiles 0-3 accumulate and 4-5 hold operands, `operand_rows` high; 6-7 hold weights, 16 high.
  explicit TileConfig(int operand_rows) {
    for (int t = 0; t < 8; ++t) {
      row_bytes[t] = 64;
      rows[t] = static_cast<uint8_t>(t < 6 ? operand_rows : 16);
    }
  }
};

// Two i8 blocks, or one: both planes of the operand times each.
template <bool TWO>
LLMC_INLINE void amx_i8(const TileArgs& args, int rows) {
  const int64_t stride = block_stride(Format::i8, args.padded_k);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (TWO) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < args.padded_k; k += 64) {
    const char* data = args.data + int64_t{k} * kBlock;
    _tile_loadd(4, args.operand + k, args.operand_stride);
    _tile_loadd(5, args.operand + args.padded_k + k, args.operand_stride);
    _tile_loadd(6, data, 64);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 5, 6);
    if constexpr (TWO) {
      _tile_loadd(7, data + stride, 64);
      _tile_dpbsud(2, 4, 7);
      _tile_dpbsud(3, 5, 7);
    }
  }
  alignas(64) int32_t sums[4][kAmxRows][kBlock];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if constexpr (TWO) {
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
  const float* scale = reinterpret_cast<const float*>(args.scale);
  for (int r = 0; r < rows; ++r) {
    const IntegerRow row(const_cast<char*>(args.operand) + r * args.operand_stride, args.padded_k, 1);
    const __m512i hi_offset = _mm512_set1_epi32(-128 * *row.sum_hi), lo_offset = _mm512_set1_epi32(-128 * *row.sum_lo);
    for (int b = 0; b < (TWO ? 2 : 1); ++b) {
      const __m512i hi = _mm512_add_epi32(_mm512_load_si512(sums[2 * b][r]), hi_offset);
      const __m512i lo = _mm512_add_epi32(_mm512_load_si512(sums[2 * b + 1][r]), lo_offset);
      store(args.out + r * args.out_stride + b * kBlock,
            join_planes(hi, lo) * set1(*row.scale) * load(scale + b * kBlock));
    }
  }
}

template <bool TWO>
LLMC_INLINE void amx_bf16(const TileArgs& args) {
  const int64_t stride = block_stride(Format::bf16, args.padded_k), out_bytes = args.out_stride * int64_t{4};
  _tile_zero(0);
  if constexpr (TWO) _tile_zero(1);
  for (int k = 0; k < args.padded_k; k += 32) {
    const char* data = args.data + int64_t{k} * 2 * kBlock;
    _tile_loadd(4, args.operand + 2 * k, args.operand_stride);
    _tile_loadd(6, data, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (TWO) {
      _tile_loadd(7, data + stride, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, args.out, out_bytes);
  if constexpr (TWO) _tile_stored(1, args.out + kBlock, out_bytes);
}

// Up to 16 rows times the blocks of a panel.
template <Format F>
LLMC_NOINLINE void amx_panel(TileArgs args, int rows, int blocks) {
  const TileConfig config(rows);
  _tile_loadconfig(&config);
  for (; blocks > 0; blocks -= 2) {
    if constexpr (F == Format::i8) {
      blocks > 1 ? amx_i8<true>(args, rows) : amx_i8<false>(args, rows);
      args.scale += 2 * kBlock * sizeof(float);
    } else {
      blocks > 1 ? amx_bf16<true>(args) : amx_bf16<false>(args);
    }
    args.data += 2 * block_stride(F, args.padded_k);
    args.out += 2 * kBlock;
  }
  _tile_release();  // leaves no tile state for the system to save
}

#else

template <Format F>
constexpr bool kHasAmx = false;

#endif

}  // namespace llmc
