// The C functions that are the same in every program library: sampling, level detection, self-test.
#include "exports.hpp"
