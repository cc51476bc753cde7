// Picks the next token of each row of logits.
//
// Order of the filters, as in vLLM: temperature, min-p, top-k, top-p. min-p compares with the most likely token; top-p
// keeps the smallest set of the most likely tokens whose share of what min-p and top-k left is at least top_p. Equal
// logits rank by index. What is left is a cut in the ranking, found through a histogram and one sorted bucket, never by
// sorting the vocabulary. The draw walks the kept tokens in index order.
#pragma once

#include <algorithm>
#include <vector>

#include "parallel.hpp"
#include "random.hpp"
#include "simd.hpp"

namespace llmc {

constexpr int kMaxSegments = 256;  // partial sums of a row; their borders depend on the vocabulary alone

struct Segments {
  int length, count;
  explicit Segments(int vocab)
      : length(static_cast<int>(std::max<int64_t>(round_up(ceil_div(vocab, kMaxSegments), kBlock), 1024))),
        count(static_cast<int>(ceil_div(vocab, length))) {}
};

// Runs f(begin, end, segment) over a row.
template <class Function>
void each_segment(int threads, int vocab, const Segments& segments, Function&& f) {
  parallel_for(threads, segments.count, 16, [&](int64_t s) {
    const int begin = static_cast<int>(s) * segments.length;
    f(begin, std::min(begin + segments.length, vocab), static_cast<int>(s));
  });
}

// First index of the largest logit; NaN counts as -inf, and a row of nothing else gives 0.
inline int argmax(const float* x, int vocab, int threads) {
  const Segments segments(vocab);
  float best[kMaxSegments];
  each_segment(threads, vocab, segments, [&](int begin, int end, int s) {
    F16 top[4] = {set1(-kInfinity), set1(-kInfinity), set1(-kInfinity), set1(-kInfinity)};
    int i = begin;
    for (; i + 4 * kBlock <= end; i += 4 * kBlock)
      for (int j = 0; j < 4; ++j) top[j] = max(load(x + i + j * kBlock), top[j]);
    float largest = reduce_max(max(max(top[0], top[1]), max(top[2], top[3])));
    for (; i < end; ++i) largest = x[i] > largest ? x[i] : largest;
    best[s] = largest;
  });
  int winner = 0;
  for (int s = 1; s < segments.count; ++s)
    if (best[s] > best[winner]) winner = s;
  for (int i = winner * segments.length; i < vocab; ++i)
    if (x[i] == best[winner]) return i;
  return 0;
}

// exp((x - top) * scale) of 16 logits; 0 for NaN and -inf.
LLMC_INLINE F16 weights16(const float* x, int n, float top, float scale) {
  const F16 w = exp(max((load_some(x, n) - set1(top)) * set1(scale), set1(-kInfinity)));
  return n < kBlock ? keep_lanes(w, 0, n, 0.0f) : w;
}

// Sum of exp((x - top) * scale) over the row, and over each segment if `parts` is given.
inline double total_weight(const float* x, int vocab, float top, float scale, int threads, double* parts) {
  const Segments segments(vocab);
  double sums[kMaxSegments], total = 0;
  each_segment(threads, vocab, segments, [&](int begin, int end, int s) {
    F16 even = zero(), odd = zero();
    int i = begin;
    for (; i + 2 * kBlock <= end; i += 2 * kBlock) {
      even = even + weights16(x + i, kBlock, top, scale);
      odd = odd + weights16(x + i + kBlock, kBlock, top, scale);
    }
    for (; i < end; i += kBlock) even = even + weights16(x + i, end - i, top, scale);
    sums[s] = reduce_add(even + odd);
  });
  for (int s = 0; s < segments.count; ++s) {
    total += sums[s];
    if (parts) parts[s] = sums[s];
  }
  return total;
}

// A position in the ranking: the tokens kept are those with a larger logit, or the same and an index up to `index`.
struct Cut {
  float logit;
  int index;
  bool keeps(float x, int i) const { return x > logit || (x == logit && i <= index); }
};

// Whether all n logits at x are below `least`. Few tokens matter in most rows; whole vectors of others are passed over.
LLMC_INLINE bool all_below(const float* x, int n, float least) {
  return n == kBlock && reduce_max(max(load(x), set1(-kInfinity))) < least;
}

// The part of the vocabulary that the filters leave, for one row.
class Ranking {
 public:
  Ranking(const float* x, int vocab, float top, float scale, float min_p)
      : x_(x), vocab_(vocab), top_(top), scale_(scale), floor_(min_p) {
    std::fill(count_, count_ + kBuckets, 0);
    std::fill(mass_, mass_ + kBuckets, 0.0);
    each_weight(-kInfinity, [&](int, float w, int bucket) {
      ++count_[bucket];
      mass_[bucket] += w;
    });
  }

  // The cut after which the number of kept tokens reaches `count` or their weight reaches share * (weight kept by
  // `within`), whichever is first.
  Cut cut(int64_t count, double share, const Cut* within) {
    double total = 0;
    if (within) each_weight(within->logit, [&](int i, float w, int) { total += within->keeps(x_[i], i) ? w : 0; });
    else for (double mass : mass_) total += mass;
    const double goal = share * total;
    int64_t kept = 0;
    double weight = 0;
    int b = 0;
    while (b < kBuckets - 1 && kept + count_[b] < count && weight + mass_[b] < goal) {
      kept += count_[b];
      weight += mass_[b++];
    }
    thread_local std::vector<Cut> members;
    members.clear();
    const float least = b < kBuckets - 1 ? top_ - static_cast<float>(b + 2) / (scale_ * kPerUnit) : -kInfinity;
    each_weight(least, [&](int i, float, int bucket) {
      if (bucket == b) members.push_back({x_[i], i});
    });
    std::sort(members.begin(), members.end(), [](const Cut& p, const Cut& q) {
      return p.logit > q.logit || (p.logit == q.logit && p.index < q.index);
    });
    for (const Cut& member : members) {
      ++kept;
      weight += std::exp(static_cast<double>((member.logit - top_) * scale_));
      if (kept >= count || weight >= goal) return member;
    }
    return {-kInfinity, vocab_};
  }

 private:
  static constexpr int kBuckets = 1024;
  static constexpr float kPerUnit = 48.0f;  // buckets of one unit of log probability; the last takes all beyond 21

  // Calls f(index, weight, bucket) for each token that min-p leaves, at least for logits of `least` and more; bucket 0
  // holds the most likely.
  template <class Function>
  void each_weight(float least, Function&& f) const {
    for (int i = 0; i < vocab_; i += kBlock) {
      const int n = vocab_ - i < kBlock ? vocab_ - i : kBlock;
      if (all_below(x_ + i, n, least)) continue;
      float w[kBlock], bucket[kBlock];
      store(w, weights16(x_ + i, n, top_, scale_));
      // max(NaN, 0) is 0, but such a token has weight 0 and is skipped
      store(bucket, min(max((set1(top_) - load_some(x_ + i, n)) * set1(scale_ * kPerUnit), zero()), set1(kBuckets - 1)));
      for (int j = 0; j < n; ++j)
        if (w[j] > 0 && w[j] >= floor_) f(i + j, w[j], static_cast<int>(bucket[j]));
    }
  }

  const float* x_;
  int vocab_;
  float top_, scale_, floor_;
  int64_t count_[kBuckets];
  double mass_[kBuckets];
};

// One row: the token, and the log probability that the untempered softmax gives it.
inline int sample_row(const float* x, int vocab, const llmc_sampling& params, int threads, float* logprob) {
  const int best = argmax(x, vocab, threads);
  const float top = x[best];
  const bool usable = std::isfinite(top);
  int token = best;
  // A temperature so small that its inverse overflows is greedy.
  const float scale = params.temperature > 0 ? 1.0f / params.temperature : kInfinity;
  if (usable && std::isfinite(scale) && params.top_k != 1) {
    const double draw = uniform(params.seed, params.offset);
    const bool limit_k = params.top_k > 0 && params.top_k < vocab, limit_p = params.top_p < 1;
    double parts[kMaxSegments];
    const Segments segments(vocab);
    Cut cut{-kInfinity, vocab};
    if (limit_k || limit_p) {
      Ranking ranking(x, vocab, top, scale, params.min_p);
      if (limit_k) cut = ranking.cut(params.top_k, 2.0, nullptr);
      if (limit_p) {
        const Cut nucleus = ranking.cut(vocab, std::max(params.top_p, 0.0f), limit_k ? &cut : nullptr);
        if (!limit_k || cut.keeps(nucleus.logit, nucleus.index)) cut = nucleus;
      }
    }
    // Nothing filtered: a segment's weight is already known, and only one segment is walked token by token.
    const bool filtered = limit_k || limit_p || params.min_p > 0;
    double total = 0;
    const auto weigh = [&](int s, auto&& visit) {
      const int begin = s * segments.length, end = std::min(begin + segments.length, vocab);
      for (int i = begin; i < end; i += kBlock) {
        const int n = end - i < kBlock ? end - i : kBlock;
        if (all_below(x + i, n, cut.logit)) continue;
        float w[kBlock];
        store(w, weights16(x + i, n, top, scale));
        for (int j = 0; j < n; ++j)
          if (w[j] > 0 && w[j] >= params.min_p && cut.keeps(x[i + j], i + j)) visit(i + j, w[j]);
      }
    };
    if (filtered) {
      for (int s = 0; s < segments.count; ++s) {
        parts[s] = 0;
        weigh(s, [&](int, float w) { parts[s] += w; });
        total += parts[s];
      }
    } else {
      total = total_weight(x, vocab, top, scale, threads, parts);
    }
    double left = draw * total;
    int s = 0;
    while (s < segments.count - 1 && left >= parts[s]) left -= parts[s++];
    bool found = false;
    for (; s < segments.count && !found; ++s)
      weigh(s, [&](int i, float w) {
        if (found) return;
        token = i;  // rounding may leave a rest after the last token, which then stays
        left -= w;
        found = left < 0;
      });
  }
  if (logprob) {
    if (!usable) *logprob = top == kInfinity ? 0.0f : -kInfinity;
    else *logprob = static_cast<float>(static_cast<double>(x[token]) - top - std::log(total_weight(x, vocab, top, 1.0f, threads, nullptr)));
  }
  return token;
}

inline void sample(const float* logits, int rows, int vocab, const llmc_sampling* params, int threads, int32_t* tokens,
                   float* logprobs) {
  const int inner = rows >= threads ? 1 : threads;  // few rows: threads share the vocabulary instead
  parallel_for(inner == 1 ? threads : 1, rows, 1, [&](int64_t r) {
    tokens[r] = sample_row(logits + r * vocab, vocab, params[r], inner, logprobs ? logprobs + r : nullptr);
  });
}

}  // namespace llmc
