// The instruction-set level this file is compiled for, the weight formats, and the context every kernel receives.
//
// A level follows from compiler flags alone: the same source gives four libraries. Nothing here asks the machine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define LLMC_AVX512 1
#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && !defined(LLMC_AMX)
#define LLMC_AMX 1
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LLMC_AVX2 1
#endif

#define LLMC_NOINLINE __attribute__((noinline))
#define LLMC_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define LLMC_UNROLL _Pragma("unroll")
#else
#define LLMC_UNROLL _Pragma("GCC unroll 16")
#endif

namespace llmc {

constexpr int kBlock = 16;       // rows of a weight block, lanes of a vector, tokens of a KV block
constexpr int kColumnAlign = 64; // K is padded to this

// Integers by their bits: i8 has a scale for each row, the others for each group of a row; those with an `a` are asymmetric and
// have a minimum for each group too.
enum class Format { f32, f16, bf16, i8, i8g, i3, i4, i5, i6, i3a, i4a, i5a, i6a, i8a };
enum class Epilogue { none, glu_silu, glu_gelu_tanh, glu_gelu };

struct Ctx {
  const llmc_model* model;
  const llmc_step_args* step;
  int T, R, threads;  // tokens, logit rows, threads of this step
};

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

constexpr bool is_integer(Format f) { return f != Format::f32 && f != Format::f16 && f != Format::bf16; }
constexpr bool is_grouped(Format f) { return is_integer(f) && f != Format::i8; }
constexpr bool is_asymmetric(Format f) {
  return f == Format::i3a || f == Format::i4a || f == Format::i5a || f == Format::i6a || f == Format::i8a;
}

constexpr int weight_bits(Format f) {
  switch (f) {
    case Format::f32: return 32;
    case Format::f16: case Format::bf16: return 16;
    case Format::i8: case Format::i8g: case Format::i8a: return 8;
    case Format::i6: case Format::i6a: return 6;
    case Format::i5: case Format::i5a: return 5;
    case Format::i4: case Format::i4a: return 4;
    case Format::i3: case Format::i3a: return 3;
  }
  return 0;
}

// Bytes of one block of 16 weight rows.
constexpr int64_t block_stride(Format f, int64_t padded_k) { return padded_k * kBlock * weight_bits(f) / 8; }

// Columns that share a scale, and how many such groups a row has; i8 has one. The last group may be short.
constexpr int group_width(Format f, int64_t padded_k, int group) { return is_grouped(f) ? group : static_cast<int>(padded_k); }
constexpr int num_groups(Format f, int64_t padded_k, int group) {
  return static_cast<int>(ceil_div(padded_k, group_width(f, padded_k, group)));
}

// Bytes of one block's scales, and minimums: f32 for each row, or f16 for each group and row.
constexpr int64_t scale_stride(Format f, int64_t padded_k, int group) {
  if (!is_grouped(f)) return is_integer(f) ? kBlock * 4 : 0;
  return int64_t{num_groups(f, padded_k, group)} * kBlock * (is_asymmetric(f) ? 4 : 2);
}

// What an integer format's stored weights lie above their values; asymmetric ones count from the group's minimum instead.
constexpr int weight_offset(Format f) { return is_asymmetric(f) ? 0 : 1 << (weight_bits(f) - 1); }

}  // namespace llmc
