// Threads: how a kernel splits its work. Results never depend on the split.
#pragma once

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

// Runs body(i) for i in [0, n), each thread one contiguous range. `grain`: fewest items worth another thread.
template <class Body>
inline void parallel_for(int threads, int64_t n, int64_t grain, Body&& body) {
  const int64_t useful = n / (grain > 0 ? grain : 1);
  const int count = static_cast<int>(useful < threads ? (useful < 1 ? 1 : useful) : threads);
  parallel(count, [&](int thread, int of) {
    const int64_t end = n * (thread + 1) / of;
    for (int64_t i = n * thread / of; i < end; ++i) body(i);
  });
}

}  // namespace llmc
