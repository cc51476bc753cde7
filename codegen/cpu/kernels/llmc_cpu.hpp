// All a generated program includes. The other C functions of a library are in exports.cpp, compiled once for all programs.
#pragma once

#include "attention.hpp"
#include "embedding.hpp"
#include "linear.hpp"
#include "norm.hpp"
#include "rope_append.hpp"
