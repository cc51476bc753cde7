// The C structs and prototypes of a program library, as docs/bundle.md specifies them.
#pragma once

#include <cstdint>

#define LLMC_ABI_VERSION 2
#define LLMC_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {

typedef struct {
  const void* const* weights;
  void* arena;
  void* kv_pool;
  void* kv_slots;
  int32_t max_tokens, num_threads;
} llmc_model;

typedef struct {
  int32_t phase;
  int32_t num_tokens, num_seqs, max_blocks, num_logit_rows;
  const int32_t *token_ids, *positions, *query_start, *context_len, *block_table, *logit_rows;
  const int32_t *slots, *slot_start;
  float* logits;
} llmc_step_args;

typedef struct {
  float temperature;
  int32_t top_k;
  float top_p, min_p;
  uint64_t seed, offset;
} llmc_sampling;

}  // extern "C"

LLMC_EXPORT int32_t llmc_abi_version(void);
LLMC_EXPORT int32_t llmc_step(const llmc_model*, const llmc_step_args*);  // defined by the generated program
LLMC_EXPORT int32_t llmc_sample(const float* logits, int32_t rows, int32_t vocab_size, const llmc_sampling*,
                                int32_t num_threads, int32_t* token_ids, float* logprobs);
LLMC_EXPORT int32_t llmc_cpu_level(void);
LLMC_EXPORT int32_t llmc_self_test(void);
LLMC_EXPORT int32_t llmc_guarded_call(int32_t (*)(void));

namespace llmc {

enum StepError : int32_t { kOk = 0, kTooManyTokens = 1, kBadPhase = 2, kIdOutOfRange = 3 };

// Checks what a kernel would otherwise turn into an out-of-bounds access. Returns a StepError.
inline int validate(const llmc_model& model, const llmc_step_args& step, int vocab) {
  if (step.num_tokens < 0 || step.num_tokens > model.max_tokens) return kTooManyTokens;
  if (step.num_logit_rows < 0 || step.num_logit_rows > model.max_tokens) return kTooManyTokens;
  for (int t = 0; t < step.num_tokens; ++t)
    if (step.token_ids[t] < 0 || step.token_ids[t] >= vocab) return kIdOutOfRange;
  for (int r = 0; r < step.num_logit_rows; ++r)
    if (step.logit_rows[r] < 0 || step.logit_rows[r] >= step.num_tokens) return kIdOutOfRange;
  return kOk;
}

}  // namespace llmc
