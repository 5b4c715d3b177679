// The index of the largest value.
#pragma once

#include <algorithm>
#include <limits>

#include "vector.h"

namespace trident {

// Returns the first index of the largest of `size` > 0 values; NaN is larger than any number.
inline int64_t argmax_of(const float* x, int64_t size) {
  Vec most(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    most = at::vec::maximum(most, widen(x + i));  // propagates NaN
  }
  float lanes[W];
  most.store(lanes);
  const auto is_less = [](float a, float b) { return a < b || (b != b && a == a); };
  float largest = *std::max_element(lanes, lanes + W, is_less);
  for (; i < size; ++i) {
    largest = std::max(largest, x[i], is_less);
  }
  const auto is_it = [&](float value) {
    return value == largest || (value != value && largest != largest);
  };
  return std::find_if(x, x + size, is_it) - x;
}

}  // namespace trident
