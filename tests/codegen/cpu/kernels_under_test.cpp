// C entry points to the kernel templates, for ctypes. One library for each level.
#include "llmc_cpu.hpp"

using namespace llmc;

LLMC_EXPORT int32_t llmc_step(const llmc_model*, const llmc_step_args*) { return 0; }

LLMC_EXPORT int32_t test_validate(const llmc_model* model, const llmc_step_args* step, int vocab) {
  return validate(*model, *step, vocab);
}

LLMC_EXPORT int64_t test_operand_bytes(int format, int k, int group) {
  return operand_bytes(static_cast<Format>(format), k, group);
}

LLMC_EXPORT int64_t test_workspace_bytes(int tokens, int heads, int dim, int packed, int threads) {
  return attention_workspace_bytes(tokens, heads, dim, packed, threads);
}

static Ctx context(const llmc_model* model, const llmc_step_args* step, int threads) {
  static const llmc_model no_model{};
  static const llmc_step_args no_step{};
  const llmc_step_args* s = step ? step : &no_step;
  return {model ? model : &no_model, s, s->num_tokens, s->num_logit_rows, threads};
}

// Gated epilogues for a format of each kind of tile, and where AMX is emulated the formats with AMX tiles alone: enough, and quick
// to compile.
template <Format F>
constexpr bool kGated = F == Format::f32 || F == Format::bf16 || F == Format::i8 || F == Format::i8g || F == Format::i5a;

template <Format F>
static void run_linear(const Ctx& ctx, int epilogue, const void* x, const void* w, const void* scale, int group,
                       const float* bias, int rows, int N, int K, float* out, int ldo) {
  const auto run = [&](auto kernel) { kernel(ctx, x, w, scale, group, bias, rows, N, K, out, ldo); };
  if (static_cast<Epilogue>(epilogue) == Epilogue::none) return run(linear<F, Epilogue::none>);
  if constexpr (kGated<F>) switch (static_cast<Epilogue>(epilogue)) {
      case Epilogue::glu_silu: return run(linear<F, Epilogue::glu_silu>);
      case Epilogue::glu_gelu_tanh: return run(linear<F, Epilogue::glu_gelu_tanh>);
      case Epilogue::glu_gelu: return run(linear<F, Epilogue::glu_gelu>);
      default: break;
    }
}

#define WITH_FORMAT(name, call)           \
  case Format::name: {                    \
    constexpr Format F = Format::name;    \
    call;                                 \
  } break;

#ifdef LLMC_AMX_EMULATION
#define BY_FORMAT(format, call)                                                   \
  switch (static_cast<Format>(format)) {                                          \
    WITH_FORMAT(bf16, call) WITH_FORMAT(i8, call) default: break;                 \
  }
#else
#define BY_FORMAT(format, call)                                                                                        \
  switch (static_cast<Format>(format)) {                                                                               \
    WITH_FORMAT(f32, call) WITH_FORMAT(f16, call) WITH_FORMAT(bf16, call) WITH_FORMAT(i8, call) WITH_FORMAT(i8g, call) \
    WITH_FORMAT(i3, call) WITH_FORMAT(i4, call) WITH_FORMAT(i5, call) WITH_FORMAT(i6, call) WITH_FORMAT(i3a, call)     \
    WITH_FORMAT(i4a, call) WITH_FORMAT(i5a, call) WITH_FORMAT(i6a, call) WITH_FORMAT(i8a, call)                        \
  }
#endif

// One format for each kind of operand.
#define BY_OPERAND(format, call)                                                                               \
  switch (static_cast<Format>(format)) {                                                                       \
    WITH_FORMAT(f32, call) WITH_FORMAT(bf16, call) WITH_FORMAT(i8, call) WITH_FORMAT(i8g, call) default: break; \
  }

LLMC_EXPORT void test_linear(int format, int epilogue, const void* operand, const void* data, const void* scale, int group,
                             const float* bias, int rows, int N, int K, float* out, int ldo, int threads) {
  const Ctx ctx = context(nullptr, nullptr, threads);
  BY_FORMAT(format, run_linear<F>(ctx, epilogue, operand, data, scale, group, bias, rows, N, K, out, ldo))
}

LLMC_EXPORT void test_pack_rows(int format, const float* x, int rows, int K, int group, void* operand, int threads) {
  const Ctx ctx = context(nullptr, nullptr, threads);
  BY_FORMAT(format, pack_rows<F>(ctx, x, rows, K, group, operand))
}

LLMC_EXPORT void test_embedding(int format, const llmc_step_args* step, const void* data, const void* scale, int group,
                                int vocab, int K, float multiplier, float* out, int threads) {
  const Ctx ctx = context(nullptr, step, threads);
  BY_FORMAT(format, embedding<F>(ctx, data, scale, group, vocab, K, multiplier, out))
}

LLMC_EXPORT void test_gather_rows(const llmc_step_args* step, const float* x, int H, float* out) {
  gather_rows(context(nullptr, step, 1), x, H, out);
}

LLMC_EXPORT void test_rms_norm(const float* x, const float* weight, float eps, int rows, int H, float* out, int threads) {
  rms_norm(context(nullptr, nullptr, threads), x, weight, eps, rows, H, out);
}

template <class Out>
static void run_residual_norm(int post, int residual_on, int rows, int H, const float* x, const float* post_weight,
                              float post_eps, float* residual, const float* weight, float eps, Out out, int threads) {
  const Ctx ctx = context(nullptr, nullptr, threads);
  if (post && residual_on) residual_norm<true, true>(ctx, rows, H, x, post_weight, post_eps, residual, weight, eps, out);
  if (post && !residual_on) residual_norm<true, false>(ctx, rows, H, x, post_weight, post_eps, residual, weight, eps, out);
  if (!post && residual_on) residual_norm<false, true>(ctx, rows, H, x, post_weight, post_eps, residual, weight, eps, out);
  if (!post && !residual_on) residual_norm<false, false>(ctx, rows, H, x, post_weight, post_eps, residual, weight, eps, out);
}

// operand_format: -1 writes floats.
LLMC_EXPORT void test_residual_norm(int post, int residual_on, int operand_format, int group, int rows, int H,
                                    const float* x, const float* post_weight, float post_eps, float* residual,
                                    const float* weight, float eps, void* out, int threads) {
  if (operand_format < 0)
    return run_residual_norm(post, residual_on, rows, H, x, post_weight, post_eps, residual, weight, eps,
                             OutF32{static_cast<float*>(out)}, threads);
  BY_OPERAND(operand_format, run_residual_norm(post, residual_on, rows, H, x, post_weight, post_eps, residual, weight, eps,
                                               (OutOperand<F>{out, group}), threads))
}

struct RopeArgs {
  float* qkv;
  int HQ, HKV;
  const float *q_norm, *k_norm;
  float eps;
  const float* inv_freq;
  int rotary_dim;
  float attention_scaling;
  KvPlace place;
};

struct AttentionCall {
  const float* qkv;
  int ldq, HQ, HKV;
  KvPlace place;
  float scale;
  int window;
  float softcap;
  float* out;
  int ldo;
  void* workspace;
};

template <int D, class KV>
static void run_rope(const Ctx& ctx, const RopeArgs& a, bool rotate) {
  const auto append = [&](auto kernel) {
    kernel(ctx, a.qkv, a.HQ, a.HKV, a.q_norm, a.k_norm, a.eps, a.inv_freq, a.rotary_dim, a.attention_scaling, a.place);
  };
  if constexpr (KV::kPacked)
    if (rotate) return append(rope_append<D, KV, true>);
  append(rope_append<D, KV>);
}

template <int D, class KV>
static void run_attention(const Ctx& ctx, const AttentionCall& a, int decode) {
  const auto kernel = decode ? attention_decode<D, KV> : attention_prefill<D, KV>;
  kernel(ctx, a.qkv, a.ldq, a.HQ, a.HKV, a.place, a.scale, a.window, a.softcap, a.out, a.ldo, a.workspace);
  if constexpr (KV::kPacked) keep_newest<D>(ctx, a.qkv, a.HQ, a.HKV, a.place);
}

// kv: 0 f32, 1 bf16, 2 fp8, 3 int8, 4 int4. Not every head size has every type, to keep this quick to compile.
template <int D, class KV>
constexpr bool kUnderTest = !KV::kPacked || D == (std::is_same_v<KV, KvInt4> ? 80 : 20);

#define IF_UNDER_TEST(D, KV, name, ...)                          \
  if constexpr (kUnderTest<D, KV>) return name<D, KV>(__VA_ARGS__), 0; \
  else return 1;

#define BY_KV(D, kv, name, ...)                         \
  switch (kv) {                                         \
    case 0: IF_UNDER_TEST(D, KvF32, name, __VA_ARGS__)  \
    case 1: IF_UNDER_TEST(D, KvBf16, name, __VA_ARGS__) \
    case 2: IF_UNDER_TEST(D, KvFp8, name, __VA_ARGS__)  \
    case 3: IF_UNDER_TEST(D, KvInt8, name, __VA_ARGS__) \
    case 4: IF_UNDER_TEST(D, KvInt4, name, __VA_ARGS__) \
    default: return 1;                                  \
  }

#ifdef LLMC_AMX_EMULATION  // attention has no use for AMX
#define BY_HEAD(D, kv, name, ...) return 1;
#else
#define BY_HEAD(D, kv, name, ...)              \
  switch (D) {                                 \
    case 20: BY_KV(20, kv, name, __VA_ARGS__)  \
    case 80: BY_KV(80, kv, name, __VA_ARGS__)  \
    case 256: BY_KV(256, kv, name, __VA_ARGS__) \
    default: return 1;                         \
  }
#endif

LLMC_EXPORT int test_rope_append(const llmc_model* model, const llmc_step_args* step, int D, int kv, int rotate,
                                 const RopeArgs* a) {
  const Ctx ctx = context(model, step, model->num_threads);
  BY_HEAD(D, kv, run_rope, ctx, *a, rotate)
}

LLMC_EXPORT int test_attention(const llmc_model* model, const llmc_step_args* step, int D, int kv, int decode,
                               const AttentionCall* a) {
  const Ctx ctx = context(model, step, model->num_threads);
  BY_HEAD(D, kv, run_attention, ctx, *a, decode)
}

LLMC_EXPORT int32_t test_illegal_instruction(void) {
#if defined(__x86_64__)
  __asm__ volatile("ud2");
#else
  __builtin_trap();
#endif
  return 0;
}

LLMC_EXPORT int32_t test_seven(void) { return 7; }
