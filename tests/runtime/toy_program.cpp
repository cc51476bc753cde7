// A program library without a model: it keeps token ids in the KV pool, and the logits of a row are a hash of every
// token that it finds there, through the block table, at positions up to the row's own. Any mistake of the scheduler,
// the block tables, chunking or preemption therefore changes the tokens that come out.
#include <cmath>
#include <csignal>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <vector>

#ifndef TOY_VOCAB
#define TOY_VOCAB 300
#endif
#ifndef TOY_LEVEL
#define TOY_LEVEL 0
#endif
#ifndef TOY_SELF_TEST
#define TOY_SELF_TEST 0
#endif
#ifndef TOY_ABI
#define TOY_ABI 2
#endif

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

static const int kBlockBytes = 128;  // the least a block may have; the first half holds 16 token ids

static uint64_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

int32_t llmc_abi_version(void) { return TOY_ABI; }
int32_t llmc_cpu_level(void) { return TOY_LEVEL; }

int32_t llmc_self_test(void) {
#if TOY_SELF_TEST == -1
  std::raise(SIGILL);
#endif
  return TOY_SELF_TEST;
}

static sigjmp_buf jump;
static void on_signal(int) { siglongjmp(jump, 1); }

int32_t llmc_guarded_call(int32_t (*function)(void)) {
  struct sigaction action, old;
  std::memset(&action, 0, sizeof action);
  action.sa_handler = on_signal;
  sigaction(SIGILL, &action, &old);
  int32_t result = sigsetjmp(jump, 1) ? -1 : function();
  sigaction(SIGILL, &old, nullptr);
  return result;
}

int32_t llmc_step(const llmc_model* model, const llmc_step_args* args) {
  if (args->num_tokens > model->max_tokens) return 1;
  if (args->phase < 0 || args->phase > 1) return 2;
  if (args->phase == 0 && args->num_tokens != args->num_seqs) return 2;  // phase 0 is decode
  const float* weight = static_cast<const float*>(model->weights[0]);
  int32_t* pool = static_cast<int32_t*>(model->kv_pool);
  int32_t* scratch = static_cast<int32_t*>(model->arena);
  std::vector<int> sequence_of(args->num_tokens);
  for (int b = 0; b < args->num_seqs; ++b) {
    for (int t = args->query_start[b]; t < args->query_start[b + 1]; ++t) {
      int position = args->positions[t];
      if (args->token_ids[t] < 0 || args->token_ids[t] >= TOY_VOCAB) return 3;
      if (position >= args->context_len[b]) return 10;
      sequence_of[t] = b;
      scratch[t] = args->token_ids[t];
      int block = args->block_table[b * args->max_blocks + position / 16];
      if (block < 0) return 11;
      pool[block * (kBlockBytes / 4) + position % 16] = scratch[t];
    }
    if (args->positions[args->query_start[b + 1] - 1] + 1 != args->context_len[b]) return 12;
  }
  for (int r = 0; r < args->num_logit_rows; ++r) {
    int t = args->logit_rows[r], b = sequence_of[t];
    uint64_t state = static_cast<uint64_t>(weight[0]);
    for (int p = 0; p <= args->positions[t]; ++p) {
      int block = args->block_table[b * args->max_blocks + p / 16];
      state = mix(state * 31 + static_cast<uint64_t>(pool[block * (kBlockBytes / 4) + p % 16]) + 1);
    }
    float* row = args->logits + static_cast<int64_t>(r) * TOY_VOCAB;
    for (int v = 0; v < TOY_VOCAB; ++v) row[v] = static_cast<float>(mix(state + v) % 100003) / 10000.0f;
  }
  return 0;
}

// Greedy, or a draw from the softmax; top_k 1 is greedy too. Nothing of min_p and top_p: sampling is tested elsewhere.
int32_t llmc_sample(const float* logits, int32_t rows, int32_t vocab, const llmc_sampling* sampling, int32_t,
                    int32_t* token_ids, float*) {
  for (int r = 0; r < rows; ++r) {
    const float* row = logits + static_cast<int64_t>(r) * vocab;
    int best = 0;
    for (int v = 1; v < vocab; ++v)
      if (row[v] > row[best]) best = v;
    token_ids[r] = best;
    if (sampling[r].temperature == 0.0f || sampling[r].top_k == 1) continue;
    double total = 0;
    for (int v = 0; v < vocab; ++v) total += std::exp((row[v] - row[best]) / sampling[r].temperature);
    double left = total * (mix(mix(sampling[r].seed) + sampling[r].offset) % 1000000) / 1e6;
    for (int v = 0; v < vocab; ++v) {
      left -= std::exp((row[v] - row[best]) / sampling[r].temperature);
      if (left < 0) {
        token_ids[r] = v;
        break;
      }
    }
  }
  return 0;
}

}  // extern "C"
