// Integer weights as bit planes: how the bits of a weight lie in memory, for vectors of any width.
//
// A block's 16 rows are cut into units of 32 columns. A unit is 8 quads of 4 columns; a quad is 64 bytes [16 rows][4], one
// code each, before its bits are distributed. Codes have a low plane (8, 4 or 2 bits) and may have a high one (2 or 1 bits):
//
//   8 = 8      6 = 4 + 2      5 = 4 + 1      4 = 4      3 = 2 + 1
//
// A plane of w bits is w times 64 bytes; each byte holds bits of 8 / w neighbouring quads, the first in its lowest bits. So
// a unit is exactly `bits` times 64 bytes, the low plane first, and a quad comes from loads, shifts, ands and an or.
#pragma once

#include <cstring>

#include "config.hpp"

namespace llmc {

constexpr int kUnit = 32, kQuads = kUnit / 4;  // columns and quads of a unit

constexpr int low_bits(Format f) { return weight_bits(f) == 8 ? 8 : weight_bits(f) >= 4 ? 4 : 2; }
constexpr int high_bits(Format f) { return weight_bits(f) - low_bits(f); }
constexpr int unit_bytes(Format f) { return 64 * weight_bits(f); }

// What holds quad q of a plane of WIDTH bits. A Word is uint32_t or a vector of them.
template <int WIDTH, class Word>
LLMC_INLINE Word load_plane(const char* plane, int q) {
  Word word;
  std::memcpy(&word, plane + q * WIDTH / 8 * 64, sizeof word);
  return word;
}

// The bits of quad q in it, moved to bit TO of every byte; what a shift brings in from a neighbouring byte is masked out.
template <int WIDTH, int TO, class Word>
LLMC_INLINE Word plane_bits(Word word, int q) {
  constexpr uint32_t kMask = ((1u << WIDTH) - 1u) * 0x01010101u << TO;
  const int from = q * WIDTH % 8;
  return (from > TO ? word >> (from - TO) : word << (TO - from)) & kMask;
}

// The codes of quad q as bytes, from the words of its planes.
template <Format F, class Word>
LLMC_INLINE Word join_codes(Word low, Word high, int q) {
  constexpr int kLow = low_bits(F), kHigh = high_bits(F);
  const Word codes = plane_bits<kLow, 0>(low, q);
  if constexpr (kHigh > 0) return codes | plane_bits<kHigh, kLow>(high, q);
  return codes;
}

// All 64 codes of quad q for a Word of 64 bytes, else those at `unit` + the offset of a part of the rows.
template <Format F, class Word>
LLMC_INLINE Word quad_codes(const char* unit, int q) {
  constexpr int kLow = low_bits(F), kHigh = high_bits(F);
  const Word low = load_plane<kLow, Word>(unit, q);
  if constexpr (kHigh > 0) return join_codes<F>(low, load_plane<kHigh, Word>(unit + 64 * kLow, q), q);
  return join_codes<F>(low, low, q);
}

}  // namespace llmc
