// F16 for any compiler with vector extensions (GCC, Clang; x86-64, AArch64, RISC-V): four quads.
#pragma once

#include <cstring>

#include "config.hpp"

namespace llmc {

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));

struct F16 {
  F4 q[4];
};

template <class Function>
LLMC_INLINE F16 each_quad(Function&& f) {
  return {{f(0), f(1), f(2), f(3)}};
}
LLMC_INLINE F4 choose(I4 mask, F4 yes, F4 no) {
  return reinterpret_cast<F4>((mask & reinterpret_cast<I4>(yes)) | (~mask & reinterpret_cast<I4>(no)));
}

LLMC_INLINE F16 set1(float x) { return each_quad([&](int) { return F4{x, x, x, x}; }); }
LLMC_INLINE F16 zero() { return set1(0.0f); }
LLMC_INLINE F16 load(const float* p) {
  F16 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
LLMC_INLINE F16 load(const float* p, int n) {
  float lanes[kBlock] = {};
  std::memcpy(lanes, p, sizeof(float) * n);
  return load(lanes);
}
LLMC_INLINE void store(float* p, F16 x) { std::memcpy(p, &x, sizeof x); }
LLMC_INLINE void store(float* p, F16 x, int n) { std::memcpy(p, &x, sizeof(float) * n); }

LLMC_INLINE F16 operator+(F16 x, F16 y) { return each_quad([&](int i) { return x.q[i] + y.q[i]; }); }
LLMC_INLINE F16 operator-(F16 x, F16 y) { return each_quad([&](int i) { return x.q[i] - y.q[i]; }); }
LLMC_INLINE F16 operator*(F16 x, F16 y) { return each_quad([&](int i) { return x.q[i] * y.q[i]; }); }
LLMC_INLINE F16 operator/(F16 x, F16 y) { return each_quad([&](int i) { return x.q[i] / y.q[i]; }); }
LLMC_INLINE F16 fma(F16 x, F16 y, F16 z) { return each_quad([&](int i) { return x.q[i] * y.q[i] + z.q[i]; }); }
LLMC_INLINE F16 max(F16 x, F16 y) { return each_quad([&](int i) { return choose(x.q[i] > y.q[i], x.q[i], y.q[i]); }); }
LLMC_INLINE F16 min(F16 x, F16 y) { return each_quad([&](int i) { return choose(x.q[i] < y.q[i], x.q[i], y.q[i]); }); }
LLMC_INLINE F16 abs(F16 x) {
  return each_quad([&](int i) { return reinterpret_cast<F4>(reinterpret_cast<U4>(x.q[i]) & 0x7fffffffu); });
}

LLMC_INLINE F16 select_less(F16 x, F16 y, F16 yes, F16 no) {
  return each_quad([&](int i) { return choose(x.q[i] < y.q[i], yes.q[i], no.q[i]); });
}

// `other` outside of lanes [begin, end).
LLMC_INLINE F16 keep_lanes(F16 x, int begin, int end, float other) {
  float lanes[kBlock];
  store(lanes, x);
  for (int i = 0; i < kBlock; ++i) lanes[i] = i >= begin && i < end ? lanes[i] : other;
  return load(lanes);
}

// 2^n for n stored as 1.5 * 2^23 + n.
LLMC_INLINE F16 power_of_two(F16 shifted) {
  return each_quad([&](int i) { return reinterpret_cast<F4>((reinterpret_cast<U4>(shifted.q[i]) << 23) + (127u << 23)); });
}

LLMC_INLINE float reduce_add(F16 x) {
  const F4 s = (x.q[0] + x.q[2]) + (x.q[1] + x.q[3]);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
LLMC_INLINE float reduce_max(F16 x) {
  float lanes[kBlock], best = x.q[0][0];
  store(lanes, x);
  for (float lane : lanes) best = lane > best ? lane : best;
  return best;
}

LLMC_INLINE F16 load_bf16(const uint16_t* p) {
  uint32_t lanes[kBlock];
  for (int i = 0; i < kBlock; ++i) lanes[i] = static_cast<uint32_t>(p[i]) << 16;
  F16 x;
  std::memcpy(&x, lanes, sizeof x);
  return x;
}
LLMC_INLINE F16 load_bf16(const uint16_t* p, int n) {
  uint16_t lanes[kBlock] = {};
  std::memcpy(lanes, p, sizeof(uint16_t) * n);
  return load_bf16(lanes);
}
LLMC_INLINE void store_bf16(uint16_t* p, F16 x, int n) {  // round to nearest even; NaN stays NaN
  uint32_t lanes[kBlock];
  std::memcpy(lanes, &x, sizeof x);
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = lanes[i];
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    p[i] = static_cast<uint16_t>(((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded) >> 16);
  }
}
LLMC_INLINE void store_bf16(uint16_t* p, F16 x) { store_bf16(p, x, kBlock); }

LLMC_INLINE F16 load_f16(const uint16_t* p) {
  float lanes[kBlock];
  for (int i = 0; i < kBlock; ++i) lanes[i] = half_to_float(p[i]);
  return load(lanes);
}

// acc[i] += pairs[i][0] * q[0] + pairs[i][1] * q[1], all bf16; q is two values in one word.
LLMC_INLINE F16 dot_bf16(F16 acc, const void* pairs, uint32_t q) {
  U4 words[4];
  std::memcpy(words, pairs, sizeof words);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "weight and KV layouts are little-endian"
#endif
  const uint32_t low = q << 16, high = q & 0xffff0000u;
  float q0, q1;
  std::memcpy(&q0, &low, 4);
  std::memcpy(&q1, &high, 4);
  return each_quad([&](int i) {
    const F4 even = reinterpret_cast<F4>(words[i] << 16), odd = reinterpret_cast<F4>(words[i] & 0xffff0000u);
    return acc.q[i] + even * q0 + odd * q1;
  });
}

}  // namespace llmc
