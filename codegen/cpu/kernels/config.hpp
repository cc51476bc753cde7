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

enum class Format { f32, bf16, i8, i8g, i4 };  // i8 has a scale for each row, i8g and i4 for each group of a row
enum class Epilogue { none, glu_silu, glu_gelu_tanh, glu_gelu };

struct Ctx {
  const llmc_model* model;
  const llmc_step_args* step;
  int T, R, threads;  // tokens, logit rows, threads of this step
};

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Bytes of one block of 16 weight rows.
constexpr int64_t block_stride(Format f, int64_t padded_k) {
  return padded_k * (f == Format::f32 ? 64 : f == Format::bf16 ? 32 : f == Format::i4 ? 8 : 16);
}

constexpr bool is_grouped(Format f) { return f == Format::i8g || f == Format::i4; }

// Columns that share a scale, and how many such groups a row has; i8 has one. The last group may be short.
constexpr int group_width(Format f, int64_t padded_k, int group) { return is_grouped(f) ? group : static_cast<int>(padded_k); }
constexpr int num_groups(Format f, int64_t padded_k, int group) {
  return static_cast<int>(ceil_div(padded_k, group_width(f, padded_k, group)));
}

// What an integer format's stored weights lie above their values.
constexpr int weight_offset(Format f) { return f == Format::i4 ? 8 : 128; }

}  // namespace llmc
