// Paged causal attention: tiles of queries for prefill, splits over the keys for decode.
#pragma once

#include <atomic>

#include "attention_chunk.hpp"
#include "parallel.hpp"

namespace llmc {

constexpr int kPrefillRows = 32;   // rows of a prefill tile
constexpr int kDecodeRows = 8;     // rows of a decode tile
constexpr int kDecodeSlots = 256;  // partial results that a decode wave keeps

// Bytes of `workspace`; bounded whatever the context length. kv_layout.py computes the same.
inline int64_t attention_workspace_bytes(int max_tokens, int HQ, int D, bool packed, int threads) {
  const int64_t width = round_up(D, kBlock), chunk = packed ? kChunk * int64_t{D + 2} : 0;
  const auto state = [&](int64_t rows) { return round_up(rows * (width + 2), kBlock); };
  const int64_t prefill = threads * (kPrefillRows * (width + kChunk) + chunk + 2 * state(kPrefillRows));
  const int64_t decode = threads * (kDecodeRows * (width + kChunk) + chunk) + kDecodeSlots * state(kDecodeRows) +
                         int64_t{max_tokens} * HQ * (width + 2);
  return round_up(4 * (prefill > decode ? prefill : decode), 64);
}

// Finds tile number `index` of all tiles of ROWS rows, over sequences, kv heads and rows; later rows, which see more
// keys, come first. With BY_BLOCK a tile's tokens are of one KV block. `cursor` makes ascending lookups cheap.
template <int ROWS, bool BY_BLOCK>
class TileCursor {
 public:
  TileCursor(const AttentionArgs& a) : step_(*a.step), heads_(a.HKV), group_(a.HQ / a.HKV) {}

  bool find(int64_t index, RowTile* tile) {
    for (; sequence_ < step_.num_seqs; ++sequence_) {
      const int first_token = step_.query_start[sequence_], tokens = step_.query_start[sequence_ + 1] - first_token;
      // Rows come in spans, the first of which may be short: all rows at once, or those of one block.
      const int head = !BY_BLOCK || tokens == 0 ? tokens : min(tokens, kBlock - step_.positions[first_token] % kBlock);
      const int64_t of_head = ceil_div(int64_t{head} * group_, ROWS), of_span = ceil_div(int64_t{kBlock} * group_, ROWS);
      const int rest = tokens - head;
      const int64_t tiles = of_head + rest / kBlock * of_span + ceil_div(int64_t{rest % kBlock} * group_, ROWS);
      const int64_t here = tiles * heads_;
      if (index < base_ + here) {
        const int64_t local = index - base_, number = tiles - 1 - local % tiles;
        int span_begin = 0, span_tokens = head;
        int64_t in_span = number;
        if (number >= of_head) {
          const int span = static_cast<int>((number - of_head) / of_span);
          span_begin = head + span * kBlock;
          span_tokens = min(tokens - span_begin, kBlock);
          in_span = number - of_head - span * of_span;
        }
        const int first = static_cast<int>(in_span) * ROWS, left = span_tokens * group_ - first;
        *tile = {sequence_, static_cast<int>(local / tiles), span_begin * group_ + first, min(left, ROWS), group_};
        return true;
      }
      base_ += here;
    }
    return false;
  }

 private:
  static int min(int a, int b) { return a < b ? a : b; }

  const llmc_step_args& step_;
  int heads_, group_, sequence_ = 0;
  int64_t base_ = 0;
};

// qkv is [T, ldq] with the HQ rotated queries first, then keys and values; out is [T, ldo] with HQ * D columns. window and
// softcap: 0 is none.
template <int D, class KV>
void attention_prefill(const Ctx& ctx, const float* qkv, int ldq, int HQ, int HKV, KvPlace place, float scale, int window,
                       float softcap, float* out, int ldo, void* workspace) {
  const AttentionArgs args{ctx.model, ctx.step, place, qkv, ldq, HQ, HKV, scale, window, softcap, out, ldo};
  const PoolLayer<D, KV> cache(*ctx.model, place, HKV);
  using Scratch = TileScratch<D, KV>;
  constexpr int64_t kFloats = Scratch::floats(kPrefillRows) + 2 * State<D>::floats(kPrefillRows);
  std::atomic<int64_t> next{0};
  parallel(ctx.threads, [&](int thread, int) {
    float* memory = static_cast<float*>(workspace) + thread * kFloats;
    const Scratch scratch(memory, kPrefillRows);
    memory += Scratch::floats(kPrefillRows);
    const State<D> state(memory, kPrefillRows), part(memory + State<D>::floats(kPrefillRows), kPrefillRows);
    TileCursor<kPrefillRows, KV::kPacked> cursor(args);
    RowTile tile{};
    while (cursor.find(next++, &tile)) {
      load_queries<D, KV>(args, tile, scratch);
      for (int r = 0; r < tile.rows; ++r) clear_row(state, r);
      for (int chunk = tile.first_chunk(args); chunk < tile.chunk_end(args); ++chunk) {
        attend_chunk<D, KV>(args, cache, tile, chunk, scratch, part);
        for (int r = 0; r < tile.rows; ++r) merge_row(state, r, part, r);
      }
      for (int r = 0; r < tile.rows; ++r)
        finish_row(state, r, out + int64_t{tile.token(*ctx.step, r)} * ldo + tile.head(r) * D);
    }
  });
}

}  // namespace llmc

#include "attention_decode.hpp"
