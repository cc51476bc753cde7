// All a generated program includes: the kernels, and the exported C functions but llmc_step.
#pragma once

#include "attention.hpp"
#include "embedding.hpp"
#include "linear.hpp"
#include "norm.hpp"
#include "rope_append.hpp"

#include "exports.hpp"
