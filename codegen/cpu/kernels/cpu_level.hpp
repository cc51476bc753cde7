// What this machine can run, asked of the processor and of the operating system.
#pragma once

#include "config.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace llmc {

#if defined(__x86_64__)

// Register state that the operating system saves (XCR0); an instruction set without it faults.
inline uint64_t saved_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux grants the 8 KiB of tile state to processes that ask (arch/x86/xstate in the kernel's documentation).
inline bool request_amx() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

inline int cpu_level() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const auto has = [](unsigned word, int bit) { return (word >> bit & 1) != 0; };
  const bool fma = has(c, 12), osxsave = has(c, 27), f16c = has(c, 29);
  if (!osxsave || !fma || !f16c || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  const unsigned leaf7_b = b, leaf7_c = c, leaf7_d = d, subleaves = a;
  const uint64_t state = saved_state();
  if (!has(leaf7_b, 5) || (state & 0x6) != 0x6) return 0;  // AVX2; xmm and ymm
  const bool avx512 = has(leaf7_b, 16) && has(leaf7_b, 17) && has(leaf7_b, 30) && has(leaf7_b, 31) && has(leaf7_c, 11);
  if (!avx512 || (state & 0xe6) != 0xe6) return 1;  // F, DQ, BW, VL, VNNI; opmask and both halves of zmm
  if (subleaves < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !has(a, 5)) return 1;  // BF16
  const bool amx = has(leaf7_d, 22) && has(leaf7_d, 24) && has(leaf7_d, 25);  // BF16, TILE, INT8
  if (!amx || (state & 0x60000) != 0x60000 || !request_amx()) return 2;
  return 3;
}

#else

inline int cpu_level() { return 0; }

#endif

}  // namespace llmc
