// Paged causal attention: tiles of queries for prefill, splits over the keys for decode.
#pragma once

#include <atomic>

#include "attention_chunk.hpp"
#include "parallel.hpp"

namespace llmc {

constexpr int kPrefillRows = 32;   // rows of a prefill tile
constexpr int kDecodeRows = 8;     // rows of a decode tile
constexpr int kDecodeSlots = 256;  // partial results that a decode wave keeps

// Bytes of `workspace`; bounded whatever the context length. packing.py computes the same.
inline int64_t attention_workspace_bytes(int max_tokens, int HQ, int /*HKV*/, int D, int /*context_length*/, int threads) {
  const int64_t width = round_up(D, kBlock);
  const auto state = [&](int64_t rows) { return round_up(rows * (width + 2), kBlock); };
  const int64_t prefill = threads * (kPrefillRows * (width + kChunk) + 2 * state(kPrefillRows));
  const int64_t decode = threads * kDecodeRows * (width + kChunk) + kDecodeSlots * state(kDecodeRows) +
                         int64_t{max_tokens} * HQ * (width + 2);
  return round_up(4 * (prefill > decode ? prefill : decode), 64);
}

// Finds tile number `index` of all tiles of ROWS rows, over sequences, kv heads and rows; later rows, which see more
// keys, come first. `cursor` makes ascending lookups cheap.
template <int ROWS>
class TileCursor {
 public:
  TileCursor(const AttentionArgs& a) : step_(*a.step), heads_(a.HKV), group_(a.HQ / a.HKV) {}

  bool find(int64_t index, RowTile* tile) {
    for (; sequence_ < step_.num_seqs; ++sequence_) {
      const int rows = (step_.query_start[sequence_ + 1] - step_.query_start[sequence_]) * group_;
      const int64_t tiles = ceil_div(rows, ROWS), here = tiles * heads_;
      if (index < base_ + here) {
        const int64_t local = index - base_, number = tiles - 1 - local % tiles;
        const int first = static_cast<int>(number) * ROWS;
        *tile = {sequence_, static_cast<int>(local / tiles), first, rows - first < ROWS ? rows - first : ROWS, group_};
        return true;
      }
      base_ += here;
    }
    return false;
  }

 private:
  const llmc_step_args& step_;
  int heads_, group_, sequence_ = 0;
  int64_t base_ = 0;
};

// qkv is [T, ldq] with the HQ rotated queries first; out is [T, ldo] with HQ * D columns. window and softcap: 0 is none.
template <int D, class KV>
void attention_prefill(const Ctx& ctx, const float* qkv, int ldq, int HQ, int HKV, int64_t layer_offset,
                       int64_t block_bytes, float scale, int window, float softcap, float* out, int ldo,
                       void* workspace) {
  const AttentionArgs args{ctx.step, qkv, ldq, HQ, HKV, scale, window, softcap, out, ldo};
  const KvLayer<D, KV> cache(ctx, layer_offset, block_bytes, HKV);
  constexpr int64_t kFloats = TileScratch<D>::floats(kPrefillRows) + 2 * State<D>::floats(kPrefillRows);
  std::atomic<int64_t> next{0};
  parallel(ctx.threads, [&](int thread, int) {
    float* memory = static_cast<float*>(workspace) + thread * kFloats;
    const TileScratch<D> scratch(memory, kPrefillRows);
    memory += TileScratch<D>::floats(kPrefillRows);
    const State<D> state(memory, kPrefillRows), part(memory + State<D>::floats(kPrefillRows), kPrefillRows);
    TileCursor<kPrefillRows> cursor(args);
    RowTile tile{};
    while (cursor.find(next++, &tile)) {
      load_queries<D, KV>(args, tile, scratch);
      for (int r = 0; r < tile.rows; ++r) clear_row(state, r);
      for (int chunk = tile.first_chunk(args); chunk < tile.chunk_end(args); ++chunk) {
        attend_chunk(args, cache, tile, chunk, scratch, part);
        for (int r = 0; r < tile.rows; ++r) merge_row(state, r, part, r);
      }
      for (int r = 0; r < tile.rows; ++r)
        finish_row(state, r, out + int64_t{tile.token(*ctx.step, r)} * ldo + tile.head(r) * D);
    }
  });
}

}  // namespace llmc

#include "attention_decode.hpp"
