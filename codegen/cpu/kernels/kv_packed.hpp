// Packed keys and values (fp8, int8, int4): how a token is written to the pool and a block is read as bfloat16.
//
// Every token is packed by itself when it is written, so a block never changes what it says of a token. Blocks are laid
// out like those of kv_pool.hpp: keys with tokens side by side, values with channels side by side, scales behind both.
#pragma once

#include "kv_convert.hpp"
#include "kv_pool.hpp"

namespace llmc {

constexpr int kKvGroup = 32;  // channels of an int4 key or value that share a scale

// Eight-bit types: number times scale, a float for each token and head. The numbers are exact in bfloat16, so attention
// computes with them and multiplies scores and weights by the scales.
struct KvInt8 {
  using Arithmetic = KvBf16;
  static constexpr bool kPacked = true, kExact = true;
  static constexpr float kLargest = 127.0f;
  LLMC_INLINE static F16 load(const void* p) { return load_i8(p); }
  LLMC_INLINE static uint8_t pack(float x) { return static_cast<uint8_t>(static_cast<int32_t>(round_to_integer(x))); }
};

struct KvFp8 {
  using Arithmetic = KvBf16;
  static constexpr bool kPacked = true, kExact = true;
  static constexpr float kLargest = 448.0f;
  LLMC_INLINE static F16 load(const void* p) { return load_e4m3(p); }
  LLMC_INLINE static uint8_t pack(float x) { return float_to_e4m3(x); }
};

// (nibble - 8) * scale, a bfloat16 for each token, head and group of channels; rounded to bfloat16 when read. The number of
// largest magnitude is -8 times the scale, whose sign follows: of the 16 steps none is lost.
struct KvInt4 {
  using Arithmetic = KvBf16;
  static constexpr bool kPacked = true, kExact = false;
};

// A block of one head as attention reads it: bf16 in the layout of the pool, and what numbers are yet to be multiplied by.
struct UnpackedBlock {
  uint16_t *keys, *values;
  float *key_scale, *value_scale;  // [16 tokens]
};

template <int D>
LLMC_INLINE float largest_magnitude(const float* x) {
  F16 largest = zero();
  for (int d = 0; d < D; d += kBlock) largest = max(abs(load_some(x + d, D - d)), largest);
  return reduce_max(largest);
}

// Where the blocks of a layer are. `part` below is the head of a key, or heads + the head of a value.
struct LayerBlocks {
  uint8_t* base;
  int64_t block_bytes;
  int heads;

  LayerBlocks(const llmc_model& model, const KvPlace& place, int kv_heads)
      : base(static_cast<uint8_t*>(model.kv_pool) + place.layer_offset), block_bytes(place.block_bytes), heads(kv_heads) {}
};

// A layer of the pool, for the eight-bit types.
template <int D, class KV>
struct PackedLayer : LayerBlocks {
  using LayerBlocks::LayerBlocks;

  LLMC_INLINE uint8_t* data(int64_t block, int part) const {
    return base + block * block_bytes + int64_t{part} * D * kBlock;
  }
  LLMC_INLINE float* scales(int64_t block, int part) const {
    return reinterpret_cast<float*>(data(block, 2 * heads)) + part * kBlock;
  }

  LLMC_INLINE void write(int64_t block, int head, int token, const float* key, const float* value) const {
    write_part(data(block, head) + token, kBlock, scales(block, head) + token, key);
    write_part(data(block, heads + head) + token * D, 1, scales(block, heads + head) + token, value);
  }

  // Leaves values as they are if `keys_only`. Blocks are scattered over the pool in pieces too small for the hardware to
  // foresee, so the values of this one and the keys of the next are fetched alongside.
  LLMC_INLINE void unpack(int64_t block, int64_t next, int head, bool keys_only, const UnpackedBlock& out) const {
    const uint8_t *keys = data(block, head), *values = data(block, heads + head), *next_keys = data(next, head);
    for (int d = 0; d < D; d += 2) {
      __builtin_prefetch(values + d * kBlock);
      __builtin_prefetch(next_keys + d * kBlock);
      store_exact_pairs(out.keys + d * kBlock, KV::load(keys + d * kBlock), KV::load(keys + (d + 1) * kBlock));
    }
    if (!keys_only)
      for (int i = 0; i < D * kBlock; i += kBlock) store_bf16(out.values + i, KV::load(values + i));
    store(out.key_scale, load(scales(block, head)));
    store(out.value_scale, load(scales(block, heads + head)));
  }

 private:
  LLMC_INLINE static void write_part(uint8_t* out, int stride, float* scale, const float* x) {
    const float amax = largest_magnitude<D>(x);
    const bool tiny = amax < 1e-30f;  // its inverse would overflow; such a head is zero
    const float inverse = tiny ? 0.0f : KV::kLargest / amax;
    for (int d = 0; d < D; ++d) out[d * stride] = KV::pack(x[d] * inverse);
    *scale = tiny ? 0.0f : amax / KV::kLargest;
  }
};

template <int D>
struct PackedLayer<D, KvInt4> : LayerBlocks {
  using LayerBlocks::LayerBlocks;
  static constexpr int kGroups = static_cast<int>(ceil_div(D, kKvGroup));
  static constexpr int kRow = kGroups * kKvGroup / 2;  // bytes of a token's nibbles

  // Keys: [D/2][16], channel 2i in the low nibble of row i, 2i + 1 in the high one. Values: [16][groups][16], channel j of
  // a group in the low nibble of byte j, 16 + j in the high one.
  LLMC_INLINE uint8_t* data(int64_t block, int part) const {
    return base + block * block_bytes + int64_t{part} * kRow * kBlock;
  }
  // Keys: [groups][16 tokens], values: [16 tokens][groups].
  LLMC_INLINE uint16_t* scales(int64_t block, int part) const {
    return reinterpret_cast<uint16_t*>(data(block, 2 * heads)) + part * kGroups * kBlock;
  }

  LLMC_INLINE void write(int64_t block, int head, int token, const float* key, const float* value) const {
    uint8_t* keys = data(block, head) + token;
    uint16_t* key_scales = scales(block, head) + token;
    uint8_t* values = data(block, heads + head) + token * kRow;
    uint16_t* value_scales = scales(block, heads + head) + token * kGroups;
    for (int g = 0; g < kGroups; ++g) {
      uint8_t codes[kKvGroup];
      pack_group(key + g * kKvGroup, width(g), codes, key_scales + g * kBlock);
      for (int i = 0; i < kKvGroup / 2; ++i)
        keys[(g * kKvGroup / 2 + i) * kBlock] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
      pack_group(value + g * kKvGroup, width(g), codes, value_scales + g);
      for (int i = 0; i < kKvGroup / 2; ++i)
        values[g * kKvGroup / 2 + i] = static_cast<uint8_t>(codes[i] | codes[kKvGroup / 2 + i] << 4);
    }
  }

  LLMC_INLINE void unpack(int64_t block, int64_t next, int head, bool, const UnpackedBlock& out) const {
    const uint8_t *keys = data(block, head), *values = data(block, heads + head), *next_keys = data(next, head);
    const uint16_t *key_scales = scales(block, head), *value_scales = scales(block, heads + head);
    for (int g = 0; g < kGroups; ++g) {
      const F16 scale = load_bf16(key_scales + g * kBlock);
      for (int d = g * kKvGroup; d < width(g) + g * kKvGroup; d += 2) {
        __builtin_prefetch(values + d / 2 * kBlock);
        __builtin_prefetch(next_keys + d / 2 * kBlock);
        F16 even, odd;
        load_nibbles(keys + d / 2 * kBlock, &even, &odd);
        store_pairs(out.keys + d * kBlock, even * scale, odd * scale);
      }
    }
    for (int t = 0; t < kBlock; ++t)
      for (int g = 0; g < kGroups; ++g) {
        const F16 scale = set1(bf16_to_float(value_scales[t * kGroups + g]));
        F16 low, high;
        load_nibbles(values + t * kRow + g * kKvGroup / 2, &low, &high);
        uint16_t* const row = out.values + t * D + g * kKvGroup;
        store_lanes(row, low * scale, width(g));
        if (width(g) > kBlock) store_lanes(row + kBlock, high * scale, width(g) - kBlock);
      }
  }

 private:
  static constexpr int width(int g) { return D - g * kKvGroup < kKvGroup ? D - g * kKvGroup : kKvGroup; }

  LLMC_INLINE static void store_lanes(uint16_t* p, F16 x, int n) { n >= kBlock ? store_bf16(p, x) : store_bf16(p, x, n); }

  // The codes are chosen for the scale as it is stored. Channels beyond the head get the code of zero.
  LLMC_INLINE static void pack_group(const float* x, int n, uint8_t* codes, uint16_t* scale) {
    float extreme = 0.0f;
    for (int i = 0; i < n; ++i) extreme = std::fabs(x[i]) > std::fabs(extreme) ? x[i] : extreme;
    *scale = float_to_bf16(std::fabs(extreme) > 1e-30f ? extreme / -8.0f : 0.0f);
    const float step = bf16_to_float(*scale), inverse = step != 0.0f ? 1.0f / step : 0.0f;
    for (int i = 0; i < kKvGroup; ++i) {
      const float code = i < n ? round_to_integer(x[i] * inverse) + 8.0f : 8.0f;
      codes[i] = static_cast<uint8_t>(code < 0.0f ? 0.0f : code > 15.0f ? 15.0f : code);
    }
  }
};

template <int D, class KV, bool PACKED>
struct SelectLayer {
  using Type = KvLayer<D, KV>;
};
template <int D, class KV>
struct SelectLayer<D, KV, true> {
  using Type = PackedLayer<D, KV>;
};
template <int D, class KV>
using PoolLayer = typename SelectLayer<D, KV, KV::kPacked>::Type;

}  // namespace llmc
