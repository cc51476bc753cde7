// Attention of a tile of rows over one aligned chunk of keys: the arithmetic that prefill and decode share.
//
// A row is one (token, query head); the rows of a tile share a kv head, so that a key or value is loaded once for all
// of them. A chunk yields (m, l, O): the largest score, the sum of exp(score - m), and that sum weighted by the values.
// Chunks are merged in ascending order, as in FlashAttention. Chunk borders are absolute positions, and keys that a row
// does not see add exact zeros, so a row gets the same bits in any tile, batch or phase.
//
// Packed keys and values are unpacked to bf16 once for a tile and chunk (attention_unpack.hpp). Which of them are read in
// 16 bit depends on the block that a query is in, so a tile of such a program has rows of one block alone.
#pragma once

#include <type_traits>

#include "kv_packed.hpp"

namespace llmc {

constexpr int kChunk = 128;  // keys
constexpr int kChunkBlocks = kChunk / kBlock;

struct AttentionArgs {
  const llmc_model* model;
  const llmc_step_args* step;
  KvPlace place;
  const float* qkv;
  int ldq, HQ, HKV;
  float scale;
  int window;
  float softcap;
  float* out;
  int ldo;
};

// Rows [first_row, first_row + rows) of the (token, head of kv_head) pairs of one sequence.
struct RowTile {
  int sequence, kv_head, first_row, rows, group;  // group: query heads of one kv head

  LLMC_INLINE int token(const llmc_step_args& step, int r) const {
    return step.query_start[sequence] + (first_row + r) / group;
  }
  LLMC_INLINE int head(int r) const { return kv_head * group + (first_row + r) % group; }
  // Keys [begin, end) that row r sees.
  LLMC_INLINE int begin(const AttentionArgs& a, int r) const {
    const int oldest = a.step->positions[token(*a.step, r)] - a.window + 1;
    return a.window > 0 && oldest > 0 ? oldest : 0;
  }
  LLMC_INLINE int end(const AttentionArgs& a, int r) const { return a.step->positions[token(*a.step, r)] + 1; }
  LLMC_INLINE int first_chunk(const AttentionArgs& a) const { return begin(a, 0) / kChunk; }
  LLMC_INLINE int chunk_end(const AttentionArgs& a) const { return static_cast<int>(ceil_div(end(a, rows - 1), kChunk)); }
};

// Where a tile's partial result or running state lies: D floats of O for each row, then m and l.
template <int D>
struct State {
  static constexpr int kWidth = static_cast<int>(round_up(D, kBlock));
  float *sum, *m, *l;
  State(float* p, int rows) : sum(p), m(p + rows * kWidth), l(m + rows) {}
  static constexpr int64_t floats(int rows) { return round_up(int64_t{rows} * (kWidth + 2), kBlock); }
};

// Scratch of one thread: the tile's queries as attention computes with them, its scores and, for packed types, a chunk's
// unpacked keys and values with their scales.
template <int D, class KV>
struct TileScratch {
  static constexpr int kWidth = static_cast<int>(round_up(D, kBlock));
  float *queries, *scores, *chunk;
  TileScratch(float* p, int rows) : queries(p), scores(p + rows * kWidth), chunk(scores + rows * kChunk) {}
  static constexpr int64_t floats(int rows) {
    return int64_t{rows} * (kWidth + kChunk) + (KV::kPacked ? kChunk * int64_t{D + 2} : 0);
  }

  LLMC_INLINE UnpackedBlock block(int b) const {
    uint16_t* const keys = reinterpret_cast<uint16_t*>(chunk);
    float* const scales = chunk + kChunk * D;
    return {keys + b * D * kBlock, keys + (kChunkBlocks + b) * D * kBlock, scales + b * kBlock, scales + kChunk + b * kBlock};
  }
};

// The blocks of a chunk as attention reads them: values from `packed` where that is not null. With scales, [128 keys] each,
// numbers are yet to be multiplied by them.
template <class Element>
struct ChunkView {
  const Element *keys[kChunkBlocks], *values[kChunkBlocks];
  const uint8_t* packed[kChunkBlocks];
  const float *key_scale, *value_scale;
};

// Calls f(first, constant count) for pieces of `rows` that are powers of two, at most LARGEST.
template <int LARGEST, class Function>
LLMC_INLINE void each_rows(int rows, Function&& f) {
  int r = 0;
  for (; r + LARGEST <= rows; r += LARGEST) f(r, std::integral_constant<int, LARGEST>{});
  if constexpr (LARGEST > 4) {
    if (rows - r >= 4) f(r, std::integral_constant<int, 4>{}), r += 4;
  }
  if constexpr (LARGEST > 2) {
    if (rows - r >= 2) f(r, std::integral_constant<int, 2>{}), r += 2;
  }
  if (rows - r >= 1) f(r, std::integral_constant<int, 1>{});
}

template <int D, class KV>
LLMC_NOINLINE void load_queries(const AttentionArgs& a, const RowTile& tile, TileScratch<D, KV> scratch) {
  using Arithmetic = typename KV::Arithmetic;
  for (int r = 0; r < tile.rows; ++r) {
    const float* q = a.qkv + int64_t{tile.token(*a.step, r)} * a.ldq + tile.head(r) * D;
    auto* out = reinterpret_cast<typename Arithmetic::Element*>(scratch.queries) + r * D;
    for (int d = 0; d < D; ++d) out[d] = Arithmetic::narrow(q[d]);
  }
}

// scores[r][16 keys] = q[r] . k, for ROWS rows and one block of keys. Blocks are scattered over the pool in pieces too
// small for the hardware to foresee, so the values of this block and the keys of the next are fetched alongside.
template <int D, class KV, int ROWS>
LLMC_INLINE void score_block(const typename KV::Element* q, const typename KV::Element* keys,
                             const typename KV::Element* values, const typename KV::Element* next_keys, float* scores) {
  F16 acc[ROWS];
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r) acc[r] = zero();
  if constexpr (KV::kPairs) {
    for (int d = 0; d < D; d += 2) {
      __builtin_prefetch(values + d * kBlock);
      __builtin_prefetch(next_keys + d * kBlock);
      LLMC_UNROLL for (int r = 0; r < ROWS; ++r) acc[r] = dot_bf16(acc[r], keys + d * kBlock, load_u32(q + r * D + d));
    }
  } else {
    for (int d = 0; d < D; ++d) {
      __builtin_prefetch(values + d * kBlock);
      __builtin_prefetch(next_keys + d * kBlock);
      const F16 k = load(keys + d * kBlock);
      LLMC_UNROLL for (int r = 0; r < ROWS; ++r) acc[r] = fma(set1(q[r * D + d]), k, acc[r]);
    }
  }
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r) store(scores + r * kChunk, acc[r]);
}

// Turns a row's scores into exp(score - m); keys outside of [begin, end) become 0. Offsets are within the chunk.
LLMC_INLINE void softmax_row(const AttentionArgs& a, float* scores, int first_block, int end_block, int begin, int end,
                             float* m, float* l) {
  F16 largest = set1(-kInfinity), total = zero();
  for (int b = first_block; b < end_block; ++b) {
    F16 s = load(scores + b * kBlock) * set1(a.scale);
    if (a.softcap > 0) s = set1(a.softcap) * tanh(s / set1(a.softcap));
    const int low = begin - b * kBlock, high = end - b * kBlock;
    if (low > 0 || high < kBlock) {
      const int from = low < 0 ? 0 : low > kBlock ? kBlock : low, to = high < 0 ? 0 : high > kBlock ? kBlock : high;
      s = keep_lanes(s, from, to, -kInfinity);
    }
    largest = max(s, largest);
    store(scores + b * kBlock, s);
  }
  *m = reduce_max(largest);
  const F16 base = set1(*m == -kInfinity ? 0.0f : *m);  // nothing seen: all exponents become 0, not NaN
  for (int b = first_block; b < end_block; ++b) {
    const F16 p = exp(load(scores + b * kBlock) - base);
    total = total + p;
    store(scores + b * kBlock, p);
  }
  *l = reduce_add(total);
}

// out[r][channels from C on] = sum over keys [begin, end) of the chunk of weight[r][key] * value[key].
template <int D, class KV, int ROWS, int C = 0>
LLMC_INLINE void weigh_values(const ChunkView<typename KV::Arithmetic::Element>& view, const float* weights, int begin, int end,
                              float* out) {
#ifdef LLMC_AVX512
  constexpr int kSpan = 64;  // channels: 4 vectors x 4 rows of accumulators
#else
  constexpr int kSpan = 32;
#endif
  constexpr int kVectors = static_cast<int>(ceil_div(D - C < kSpan ? D - C : kSpan, kBlock));
  F16 acc[ROWS][kVectors];
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int v = 0; v < kVectors; ++v) acc[r][v] = zero();
  for (int key = begin; key < end;) {
    const int b = key / kBlock, stop = end < (b + 1) * kBlock ? end : (b + 1) * kBlock;
    const auto each_key = [&](auto&& load_value) {
      for (; key < stop; ++key) {
        F16 value[kVectors];
        LLMC_UNROLL for (int v = 0; v < kVectors; ++v) value[v] = load_value(key % kBlock * D + C + v * kBlock, D - C - v * kBlock);
        LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
          LLMC_UNROLL for (int v = 0; v < kVectors; ++v)
            acc[r][v] = fma(set1(weights[r * kChunk + key]), value[v], acc[r][v]);
      }
    };
    if constexpr (KV::kExact) {
      if (view.packed[b]) {
        each_key([&](int i, int) { return KV::load(view.packed[b] + i); });
        continue;
      }
    }
    each_key([&](int i, int n) { return KV::Arithmetic::load_values(view.values[b] + i, n); });
  }
  LLMC_UNROLL for (int r = 0; r < ROWS; ++r)
    LLMC_UNROLL for (int v = 0; v < kVectors; ++v) store(out + r * State<D>::kWidth + C + v * kBlock, acc[r][v]);
  if constexpr (C + kSpan < D) weigh_values<D, KV, ROWS, C + kSpan>(view, weights, begin, end, out);
}

// The blocks [first_block, end_block) of a chunk where the pool has them.
template <int D, class KV>
LLMC_INLINE ChunkView<typename KV::Element> open_chunk(const AttentionArgs& a, const KvLayer<D, KV>& cache, const RowTile& tile,
                                                       int chunk, int first_block, int end_block, TileScratch<D, KV>) {
  const int32_t* blocks = a.step->block_table + int64_t{tile.sequence} * a.step->max_blocks + chunk * kChunkBlocks;
  ChunkView<typename KV::Element> view{};
  for (int b = first_block; b < end_block; ++b)
    view.keys[b] = cache.keys(blocks[b], tile.kv_head), view.values[b] = cache.values(blocks[b], tile.kv_head);
  return view;
}

}  // namespace llmc

#include "attention_unpack.hpp"

namespace llmc {

// scores[r][blocks] *= scale[blocks]
LLMC_INLINE void multiply_scores(float* scores, const float* scale, int rows, int first_block, int end_block) {
  for (int b = first_block; b < end_block; ++b) {
    const F16 factor = load(scale + b * kBlock);
    for (int r = 0; r < rows; ++r) {
      float* const s = scores + r * kChunk + b * kBlock;
      store(s, load(s) * factor);
    }
  }
}

// The partial result of one chunk, into `part`.
template <int D, class KV>
LLMC_NOINLINE void attend_chunk(const AttentionArgs& a, const PoolLayer<D, KV>& cache, const RowTile& tile, int chunk,
                                TileScratch<D, KV> scratch, State<D> part) {
#ifdef LLMC_AVX512
  constexpr int kScoreRows = 8, kValueRows = 4;
#else
  constexpr int kScoreRows = 4, kValueRows = 2;
#endif
  using Arithmetic = typename KV::Arithmetic;
  using Element = typename Arithmetic::Element;
  const int origin = chunk * kChunk;
  const int first = tile.begin(a, 0) - origin, last = tile.end(a, tile.rows - 1) - origin;
  const int begin = first > 0 ? first : 0, end = last < kChunk ? last : kChunk;  // keys that any row of the tile sees
  const int first_block = begin / kBlock, end_block = static_cast<int>(ceil_div(end, kBlock));
  const ChunkView<Element> view = open_chunk(a, cache, tile, chunk, first_block, end_block, scratch);

  each_rows<kScoreRows>(tile.rows, [&](int r, auto count) {
    const Element* q = reinterpret_cast<const Element*>(scratch.queries) + r * D;
    for (int b = first_block; b < end_block; ++b)
      score_block<D, Arithmetic, count()>(q, view.keys[b], view.values[b], view.keys[b + 1 < end_block ? b + 1 : b],
                                          scratch.scores + r * kChunk + b * kBlock);
  });
  if (view.key_scale) multiply_scores(scratch.scores, view.key_scale, tile.rows, first_block, end_block);
  for (int r = 0; r < tile.rows; ++r)
    softmax_row(a, scratch.scores + r * kChunk, first_block, end_block, tile.begin(a, r) - origin, tile.end(a, r) - origin,
                part.m + r, part.l + r);
  if (view.value_scale) multiply_scores(scratch.scores, view.value_scale, tile.rows, first_block, end_block);
  each_rows<kValueRows>(tile.rows, [&](int r, auto count) {
    weigh_values<D, KV, count()>(view, scratch.scores + r * kChunk, begin, end, part.sum + r * State<D>::kWidth);
  });
}

// One row: state <- state merged with the next chunk's partial result.
template <int D>
LLMC_INLINE void merge_row(State<D> state, int r, State<D> part, int p) {
  if (part.m[p] == -kInfinity) return;  // the row sees nothing of this chunk
  const float m = state.m[r] > part.m[p] ? state.m[r] : part.m[p];
  float factors[kBlock] = {state.m[r] - m, part.m[p] - m};
  store(factors, exp(load(factors)));
  state.m[r] = m;
  state.l[r] = state.l[r] * factors[0] + part.l[p] * factors[1];
  float* sum = state.sum + r * State<D>::kWidth;
  const float* add = part.sum + p * State<D>::kWidth;
  for (int d = 0; d < D; d += kBlock)
    store(sum + d, fma(load(sum + d), set1(factors[0]), load(add + d) * set1(factors[1])));
}

template <int D>
LLMC_INLINE void clear_row(State<D> state, int r) {
  state.m[r] = -kInfinity;
  state.l[r] = 0.0f;
  for (int d = 0; d < D; d += kBlock) store(state.sum + r * State<D>::kWidth + d, zero());
}

template <int D>
LLMC_INLINE void finish_row(State<D> state, int r, float* out) {
  const F16 inverse = set1(1.0f / state.l[r]);
  for (int d = 0; d < D; d += kBlock) store_some(out + d, load(state.sum + r * State<D>::kWidth + d) * inverse, D - d);
}

}  // namespace llmc
