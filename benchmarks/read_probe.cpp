// Reads memory as fast as it comes: the floor that a decoded token's weights are held against.
#include <cstdint>

namespace {

constexpr int kStreams = 4;    // read side by side, as a product reads several rows of a matrix
constexpr int kAhead = 128;    // words to ask for in advance: the hardware prefetchers stop at page boundaries
constexpr int kLine = 8;       // words of a cache line
constexpr int64_t kShare = 1 << 17;  // words of a stream before the next place is taken

}  // namespace

// The sum of `count` words, a multiple of kStreams * kShare.
extern "C" __attribute__((visibility("default"))) uint64_t read_all(const uint64_t* data, int64_t count, int threads) {
  uint64_t total[kLine] = {};
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static)
  for (int64_t share = 0; share < count / (kStreams * kShare); ++share) {
    const uint64_t* start = data + share * kStreams * kShare;
    for (int64_t i = 0; i < kShare; i += kLine)
      for (int stream = 0; stream < kStreams; ++stream) {
        const uint64_t* p = start + stream * kShare + i;
        __builtin_prefetch(p + kAhead, 0, 2);
        for (int word = 0; word < kLine; ++word) total[word] += p[word];
      }
  }
  return total[0] + total[1] + total[2] + total[3] + total[4] + total[5] + total[6] + total[7];
}
