// Cosines and sines of one position, to float accuracy for any context length.
#pragma once

#include <cmath>
#include <cstring>

#include "config.hpp"

namespace llmc {

// The angle position * inv_freq[i] is rounded to float, as the reference model does, then reduced in double: a float
// reduction would lose the low bits of angles in the tens of thousands. Branch-free, so that compilers vectorise it.
inline void rotary_factors(int position, const float* inv_freq, int n, float scaling, float* cosine, float* sine) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, kept in the low bits
  for (int i = 0; i < n; ++i) {
    const float angle = static_cast<float>(position) * inv_freq[i];
    const double shifted = static_cast<double>(angle) * 0.63661977236758134308 + kMagic;  // quarter turns
    const double turns = shifted - kMagic;
    const double r = (static_cast<double>(angle) - turns * 1.57079632679489655800) - turns * 6.12323399573676603587e-17;
    const double z = r * r;
    const double s = r + r * z * (-1.6666666666666632e-1 + z * (8.3333333332248946e-3 + z * (-1.9841269829589539e-4 + z * 2.7557136e-6)));
    const double c = 1.0 - 0.5 * z + z * z * (4.1666666666665929e-2 + z * (-1.3888888887305640e-3 + z * (2.4801587289876704e-5 - z * 2.7556e-7)));
    int64_t bits;
    std::memcpy(&bits, &shifted, 8);
    const double swapped_cos = bits & 1 ? s : c, swapped_sin = bits & 1 ? c : s;
    cosine[i] = static_cast<float>((bits + 1) & 2 ? -swapped_cos : swapped_cos) * scaling;
    sine[i] = static_cast<float>(bits & 2 ? -swapped_sin : swapped_sin) * scaling;
  }
}

}  // namespace llmc
