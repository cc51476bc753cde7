// Decode attention: few queries, long contexts. All (tile, chunk) pairs are spread over the threads in waves, each wave
// keeps its partial results in a fixed number of slots, and they are merged in ascending order of chunks.
#pragma once

#include "attention.hpp"

namespace llmc {

// One (tile, chunk) pair, and where in the list of all of them its tile begins and ends.
struct DecodeItem {
  RowTile tile;
  int chunk;
  int64_t tile_index, tile_begin, tile_end;
};

// Walks all items in order; `find` takes ascending indices.
template <bool BY_BLOCK>
class DecodeCursor {
 public:
  DecodeCursor(const AttentionArgs& a) : args_(a), tiles_(a) { advance(); }

  bool find(int64_t index, DecodeItem* item) {
    while (valid_ && index >= end_) begin_ = end_, ++tile_index_, advance();
    if (!valid_) return false;
    *item = {tile_, tile_.first_chunk(args_) + static_cast<int>(index - begin_), tile_index_, begin_, end_};
    return true;
  }

 private:
  void advance() {
    valid_ = tiles_.find(tile_index_, &tile_);
    if (valid_) end_ = begin_ + tile_.chunk_end(args_) - tile_.first_chunk(args_);
  }

  const AttentionArgs& args_;
  TileCursor<kDecodeRows, BY_BLOCK> tiles_;
  RowTile tile_{};
  bool valid_ = false;
  int64_t tile_index_ = 0, begin_ = 0, end_ = 0;
};

template <int D, class KV>
void attention_decode(const Ctx& ctx, const float* qkv, int ldq, int HQ, int HKV, KvPlace place, float scale, int window,
                      float softcap, float* out, int ldo, void* workspace) {
  const AttentionArgs args{ctx.model, ctx.step, place, qkv, ldq, HQ, HKV, scale, window, softcap, out, ldo};
  const PoolLayer<D, KV> cache(*ctx.model, place, HKV);
  using Cursor = DecodeCursor<KV::kPacked>;
  constexpr int64_t kScratch = TileScratch<D, KV>::floats(kDecodeRows), kSlot = State<D>::floats(kDecodeRows);
  float* const slots = static_cast<float*>(workspace);
  float* const states = slots + kDecodeSlots * kSlot;  // one for each row of the step, in the order of the tiles
  float* const scratches = states + int64_t{ctx.T} * HQ * (State<D>::kWidth + 2);

  int64_t total = 0;
  {
    Cursor cursor(args);
    for (DecodeItem item{}; cursor.find(total, &item);) total = item.tile_end;
  }
  for (int64_t wave = 0; wave < total; wave += kDecodeSlots) {
    const int64_t wave_end = wave + kDecodeSlots < total ? wave + kDecodeSlots : total;
    std::atomic<int64_t> next{wave};
    parallel(wave_end - wave < ctx.threads ? static_cast<int>(wave_end - wave) : ctx.threads, [&](int thread, int) {
      const TileScratch<D, KV> scratch(scratches + thread * kScratch, kDecodeRows);
      Cursor cursor(args);
      int64_t loaded = -1;
      DecodeItem item{};
      for (int64_t index = next++; index < wave_end; index = next++) {
        cursor.find(index, &item);
        if (item.tile_index != loaded) load_queries<D, KV>(args, item.tile, scratch);
        loaded = item.tile_index;
        attend_chunk<D, KV>(args, cache, item.tile, item.chunk, scratch, State<D>(slots + (index - wave) * kSlot, kDecodeRows));
      }
    });
    Cursor cursor(args);
    DecodeItem item{};
    for (int64_t index = wave; index < wave_end; ++index) {
      cursor.find(index, &item);
      const RowTile& tile = item.tile;
      const int64_t first = int64_t{ctx.step->query_start[tile.sequence]} * HQ +
                            int64_t{tile.kv_head} * tile.group *
                                (ctx.step->query_start[tile.sequence + 1] - ctx.step->query_start[tile.sequence]) +
                            tile.first_row;
      const State<D> state(states + first * (State<D>::kWidth + 2), tile.rows);
      const State<D> part(slots + (index - wave) * kSlot, kDecodeRows);
      for (int r = 0; r < tile.rows; ++r) {
        if (index == item.tile_begin) clear_row(state, r);
        merge_row(state, r, part, r);
        if (index == item.tile_end - 1)
          finish_row(state, r, out + int64_t{tile.token(*ctx.step, r)} * ldo + tile.head(r) * D);
      }
    }
  }
}

}  // namespace llmc
