// AMX tiles in plain C++, after the pseudocode of the Intel SDM, so that amx.hpp is tested on machines without them.
// Included before the kernels, in a build of the AVX-512 level.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define LLMC_AMX 1
#define LLMC_AMX_EMULATION 1

namespace amx_emulation {

struct State {
  uint8_t config[64], tile[8][16][64];
  int rows(int t) const { return config[48 + t]; }
  int row_bytes(int t) const { return config[16 + 2 * t] | config[17 + 2 * t] << 8; }
};
inline thread_local State state;

inline void load_config(const void* config) {
  std::memset(&state, 0, sizeof state);
  std::memcpy(state.config, config, 64);
}
inline void zero(int t) { std::memset(state.tile[t], 0, sizeof state.tile[t]); }
inline void load(int t, const void* base, int64_t stride) {
  zero(t);
  for (int r = 0; r < state.rows(t); ++r)
    std::memcpy(state.tile[t][r], static_cast<const char*>(base) + r * stride, state.row_bytes(t));
}
inline void store(int t, void* base, int64_t stride) {
  for (int r = 0; r < state.rows(t); ++r)
    std::memcpy(static_cast<char*>(base) + r * stride, state.tile[t][r], state.row_bytes(t));
}
inline void dpbsud(int c, int a, int b) {
  for (int m = 0; m < state.rows(c); ++m)
    for (int k = 0; k < state.row_bytes(a) / 4 && k < state.rows(b); ++k)
      for (int n = 0; n < state.row_bytes(c) / 4; ++n) {
        int32_t sum;
        std::memcpy(&sum, &state.tile[c][m][4 * n], 4);
        for (int j = 0; j < 4; ++j) sum += static_cast<int8_t>(state.tile[a][m][4 * k + j]) * state.tile[b][k][4 * n + j];
        std::memcpy(&state.tile[c][m][4 * n], &sum, 4);
      }
}
inline float bf16_at(const uint8_t* p) {
  const uint32_t bits = static_cast<uint32_t>(p[0] | p[1] << 8) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void dpbf16ps(int c, int a, int b) {
  for (int m = 0; m < state.rows(c); ++m)
    for (int n = 0; n < state.row_bytes(c) / 4; ++n) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < state.row_bytes(a) / 4 && k < state.rows(b); ++k) {
        even += bf16_at(&state.tile[a][m][4 * k]) * bf16_at(&state.tile[b][k][4 * n]);
        odd += bf16_at(&state.tile[a][m][4 * k + 2]) * bf16_at(&state.tile[b][k][4 * n + 2]);
      }
      std::memcpy(&sum, &state.tile[c][m][4 * n], 4);
      sum += even + odd;
      std::memcpy(&state.tile[c][m][4 * n], &sum, 4);
    }
}

}  // namespace amx_emulation

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(p) amx_emulation::load_config(p)
#define _tile_release() ((void)0)
#define _tile_zero(t) amx_emulation::zero(t)
#define _tile_loadd(t, p, stride) amx_emulation::load(t, p, stride)
#define _tile_stored(t, p, stride) amx_emulation::store(t, p, stride)
#define _tile_dpbsud(c, a, b) amx_emulation::dpbsud(c, a, b)
#define _tile_dpbf16ps(c, a, b) amx_emulation::dpbf16ps(c, a, b)
