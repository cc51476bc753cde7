// Walsh-Hadamard rotation of a head: spreads outliers over all channels, so that few bits lose less.
#pragma once

#include "simd.hpp"

namespace llmc {

// The fast transform in place, on blocks of n channels, n the largest power of two that divides D. Orthonormal, so that
// products of two rotated heads stay what they were, and its own inverse.
template <int D>
LLMC_INLINE void hadamard(float* head) {
  constexpr int n = D & -D;
  for (int step = 1; step < n; step *= 2)
    for (int base = 0; base < D; base += 2 * step) {
      if (step >= kBlock) {
        for (int i = base; i < base + step; i += kBlock) {
          const F16 x = load(head + i), y = load(head + i + step);
          store(head + i, x + y), store(head + i + step, x - y);
        }
      } else {
        for (int i = base; i < base + step; ++i) {
          const float x = head[i], y = head[i + step];
          head[i] = x + y, head[i + step] = x - y;
        }
      }
    }
  const float norm = 1.0f / std::sqrt(static_cast<float>(n));
  for (int i = 0; i < D; ++i) head[i] *= norm;
}

}  // namespace llmc
