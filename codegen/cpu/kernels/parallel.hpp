// Threads: how a kernel splits its work. Results never depend on the split.
#pragma once

#include <atomic>

#include "config.hpp"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace llmc {

// Runs body(thread, count) on `threads` threads; returns when all are done.
template <class Body>
inline void parallel(int threads, Body&& body) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    body(omp_get_thread_num(), omp_get_num_threads());
    return;
  }
#endif
  body(0, 1);
}

// Runs body(i) for i in [0, n). Threads take short runs of neighbours as they get free, so that one that the system
// interrupts does not hold up the others. `grain`: fewest items worth another thread.
template <class Body>
inline void parallel_for(int threads, int64_t n, int64_t grain, Body&& body) {
  const int64_t useful = n / grain;
  if (threads <= 1 || useful <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  const int count = static_cast<int>(useful < threads ? useful : threads);
  const int64_t run = n / (count * int64_t{8}) > grain ? n / (count * int64_t{8}) : grain;
  std::atomic<int64_t> next{0};
  parallel(count, [&](int, int) {
    for (int64_t begin = next.fetch_add(run); begin < n; begin = next.fetch_add(run))
      for (int64_t i = begin; i < (begin + run < n ? begin + run : n); ++i) body(i);
  });
}

}  // namespace llmc
