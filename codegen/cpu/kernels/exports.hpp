// The C functions that every program library exports, but for llmc_step, which the generated program defines.
#pragma once

#include <setjmp.h>
#include <signal.h>

#include "cpu_level.hpp"
#include "sampling.hpp"
#include "self_test.hpp"

LLMC_EXPORT int32_t llmc_abi_version(void) { return LLMC_ABI_VERSION; }

LLMC_EXPORT int32_t llmc_cpu_level(void) { return llmc::cpu_level(); }

LLMC_EXPORT int32_t llmc_self_test(void) { return llmc::self_test(); }

LLMC_EXPORT int32_t llmc_sample(const float* logits, int32_t rows, int32_t vocab_size, const llmc_sampling* params,
                                int32_t num_threads, int32_t* token_ids, float* logprobs) {
  if (rows > 0 && vocab_size > 0) llmc::sample(logits, rows, vocab_size, params, num_threads, token_ids, logprobs);
  return 0;
}

namespace llmc {
inline thread_local sigjmp_buf* guard = nullptr;

inline void leave_guard(int number) {
  if (guard) siglongjmp(*guard, 1);
  signal(number, SIG_DFL);  // not ours: let it end the process as it would have
  raise(number);
}
}  // namespace llmc

LLMC_EXPORT int32_t llmc_guarded_call(int32_t (*function)(void)) {
  struct sigaction action = {}, previous;
  action.sa_handler = llmc::leave_guard;
  sigemptyset(&action.sa_mask);
  sigaction(SIGILL, &action, &previous);
  sigjmp_buf here;
  llmc::guard = &here;
  volatile int32_t result = -1;
  if (sigsetjmp(here, 1) == 0) result = function();
  llmc::guard = nullptr;
  sigaction(SIGILL, &previous, nullptr);
  return result;
}
