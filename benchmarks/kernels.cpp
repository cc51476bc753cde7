// The loops behind kernels.py: the machine's limits, then the kernels.
#include <chrono>
#include <cstdio>
#include <initializer_list>
#include <utility>
#include <vector>

#include "llmc_cpu.hpp"

using namespace llmc;

LLMC_EXPORT int32_t llmc_step(const llmc_model*, const llmc_step_args*) { return 0; }

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class Function>
static double best_of(int runs, Function&& f) {
  double best = 1e9;
  for (int i = 0; i < runs; ++i) {
    const double start = now();
    f();
    const double took = now() - start;
    best = took < best ? took : best;
  }
  return best;
}

static double read_bandwidth(const std::vector<char>& memory, int threads) {
  const char* base = memory.data();
  const size_t size = memory.size();
  const double seconds = best_of(7, [&] {
    parallel(threads, [&](int thread, int count) {
      F16 sum[4] = {zero(), zero(), zero(), zero()};
      for (size_t i = size / count * thread; i + 256 <= size / count * (thread + 1); i += 256)
        for (int j = 0; j < 4; ++j) {
          __builtin_prefetch(base + i + j * 64 + 1024, 0, 2);
          sum[j] = sum[j] + load(reinterpret_cast<const float*>(base + i + j * 64));
        }
      volatile float keep = reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
      (void)keep;
    });
  });
  return static_cast<double>(size) / seconds;
}

static double copy_bandwidth(std::vector<char>& memory, int threads) {
  char* base = memory.data();
  const size_t half = memory.size() / 2;
  const double seconds = best_of(7, [&] {
    parallel(threads, [&](int thread, int count) {
      const size_t begin = half / count * thread;
      std::memcpy(base + half + begin, base + begin, half / count);
    });
  });
  return static_cast<double>(memory.size()) / seconds;  // read and written
}

// Vector instructions per second of one thread, and how many multiply-adds each does.
struct Peak {
  double rate, width;
};

template <Format F>
static Peak instruction_peak() {
  constexpr int kCount = 12, kRounds = 500000;
#ifdef LLMC_AVX512
  const double seconds = best_of(9, [] {
    __m512i acc[kCount], x = _mm512_set1_epi32(0x3f803f80);
    __asm__ volatile("" : "+v"(x));
    const auto one = [&](__m512i a) {
      if constexpr (F == Format::f32 || F == Format::f16)
        a = _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(x), _mm512_castsi512_ps(a)));
      else if constexpr (F == Format::bf16)
        a = _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(a), reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(x)));
      else
        a = _mm512_dpbusd_epi32(a, x, x);
      __asm__ volatile("" : "+v"(a));  // neither removed nor merged with its neighbours
      return a;
    };
    LLMC_UNROLL for (int i = 0; i < kCount; ++i) acc[i] = _mm512_setzero_si512();
    for (int n = 0; n < kRounds; ++n)
      LLMC_UNROLL for (int i = 0; i < kCount; ++i) acc[i] = one(acc[i]);
  });
  return {kRounds * double{kCount} / seconds, F == Format::f32 || F == Format::f16 ? 16.0 : 32.0};  // integers: 64 bytes for each of two planes
#else
  return {0, 1};
#endif
}

struct Bench {
  int threads;
  double read;
  std::vector<char> weights;
  std::vector<char> scales = std::vector<char>(size_t{64} << 20, 0x2c), operand = std::vector<char>(size_t{16} << 20, 1);
  std::vector<float> out = std::vector<float>(size_t{4} << 20);

  template <Format F>
  double seconds(int rows, int N, int K) {
    static const llmc_model model{};
    static const llmc_step_args step{};
    const Ctx ctx{&model, &step, 0, 0, threads};
    return best_of(rows > 16 ? 5 : 9, [&] {
      linear<F, Epilogue::none>(ctx, operand.data(), weights.data(), scales.data(), 32, nullptr, rows, N, K, out.data(), N);
    });
  }

  template <Format F>
  void run(const char* name) {
    for (const auto& [N, K] : {std::pair<int, int>{262144, 640}, {32768, 4096}}) {
      const double bytes = static_cast<double>(N) / kBlock * (block_stride(F, K) + scale_stride(F, K, 32));
      if (bytes > static_cast<double>(weights.size())) continue;
      const double took = seconds<F>(1, N, K);
      std::printf("gemv %-4s N=%-6d K=%-5d %6.2f ms %6.1f GB/s  %3.0f%% of read bandwidth\n", name, N, K, 1e3 * took, bytes / took / 1e9,
                  100 * bytes / took / read);
    }
    const Peak peak = instruction_peak<F>();
    for (const int rows : {16, 512}) {
      const double macs = static_cast<double>(rows) * 2048 * 2048 / seconds<F>(rows, 2048, 2048);
      std::printf("gemm %-4s rows=%-3d N=K=2048 %6.0f GFLOP/s  ", name, rows, 2 * macs / 1e9);
      if (peak.rate > 0) std::printf("%3.0f%% of the instruction's peak\n", 100 * macs / peak.width / peak.rate / threads);
      else std::printf("\n");
    }
  }
};

// One token of one sequence over `context` keys, in every layer of a pool that is larger than any cache.
template <int D, class KV>
static double decode_attention(int threads, int HQ, int HKV, int context, int64_t token_bytes) {
  constexpr int kLayers = 24;
  constexpr bool kRotate = KV::kPacked && !std::is_same_v<KV, KvFp8>;  // the default
  const int blocks = static_cast<int>(ceil_div(context, kBlock)), width = (HQ + 2 * HKV) * D;
  const int64_t layer_bytes = int64_t{2} * HKV * kBlock * token_bytes;
  const int64_t slot_bytes = int64_t{kSlotBlocks} * 2 * HKV * kBlock * D * 2;
  std::vector<char> pool(blocks * layer_bytes * kLayers, 0), slot(slot_bytes, 0);
  std::vector<char> workspace(attention_workspace_bytes(1, HQ, D, KV::kPacked, threads));
  std::vector<float> qkv(width, 0.5f), out(HQ * D), inv_freq(D / 2, 0.01f);
  std::vector<int32_t> table(blocks);
  for (int i = 0; i < blocks; ++i) table[i] = i * 37 % blocks;  // scattered
  const int32_t position = context - 1, query_start[2] = {0, 1}, context_len = context, zero_slot = 0;
  const llmc_model model{nullptr, nullptr, pool.data(), slot.data(), 1, threads};
  const llmc_step_args step{1, 1, 1, blocks, 0, nullptr, &position, query_start, &context_len, table.data(), nullptr, &zero_slot,
                            &zero_slot, nullptr};
  const Ctx ctx{&model, &step, 1, 0, threads};
  const double seconds = best_of(9, [&] {
    for (int layer = 0; layer < kLayers; ++layer) {
      const KvPlace place{layer * layer_bytes, layer_bytes * kLayers, 0, slot_bytes};
      rope_append<D, KV, kRotate>(ctx, qkv.data(), HQ, HKV, nullptr, nullptr, 0.0f, inv_freq.data(), D, 1.0f, place);
      attention_decode<D, KV>(ctx, qkv.data(), width, HQ, HKV, place, 0.1f, 0, 0.0f, out.data(), HQ * D, workspace.data());
      if constexpr (KV::kPacked) keep_newest<D>(ctx, qkv.data(), HQ, HKV, place);
    }
  });
  return seconds / kLayers;
}

template <int D>
static void run_attention(int threads, int HQ, int HKV) {
  for (const int context : {512, 2048, 8192}) {
    const auto report = [&](const char* name, double seconds, int64_t token_bytes) {
      const double bytes = 2.0 * HKV * context * static_cast<double>(token_bytes);
      std::printf("decode attention %-4s heads=%d/%d D=%d context=%-5d %7.1f us a layer, %5.1f GB/s\n", name, HQ, HKV, D, context,
                  seconds * 1e6, bytes / seconds / 1e9);
    };
    report("bf16", decode_attention<D, KvBf16>(threads, HQ, HKV, context, 2 * D), 2 * D);
    report("int8", decode_attention<D, KvInt8>(threads, HQ, HKV, context, D + 4), D + 4);
    report("fp8", decode_attention<D, KvFp8>(threads, HQ, HKV, context, D + 4), D + 4);
    report("int4", decode_attention<D, KvInt4>(threads, HQ, HKV, context, D / 32 * 18), D / 32 * 18);
  }
}

LLMC_EXPORT void benchmark(int threads) {
  Bench bench{threads, 0, std::vector<char>(size_t{512} << 20, 1)};
  bench.read = read_bandwidth(bench.weights, threads);
  std::printf("read %.1f GB/s, memcpy %.1f GB/s (read + written)\n", bench.read / 1e9, copy_bandwidth(bench.weights, threads) / 1e9);
  bench.run<Format::i8>("i8");
  bench.run<Format::i8g>("i8g");
  bench.run<Format::i6>("i6");
  bench.run<Format::i5>("i5");
  bench.run<Format::i4>("i4");
  bench.run<Format::i4a>("i4a");
  bench.run<Format::i3>("i3");
  bench.run<Format::bf16>("bf16");
  bench.run<Format::f16>("f16");
  bench.run<Format::f32>("f32");
  run_attention<256>(threads, 4, 1);
  run_attention<128>(threads, 32, 8);
  std::fflush(stdout);
}
