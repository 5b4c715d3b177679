// The place of the first of the largest values of each row; NaN is larger than any number.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

#include "operators.h"
#include "vector.h"

namespace trident::operators {
namespace {

int64_t argmax_of(const float* x, int64_t size) {
  Vec most(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    most = at::vec::maximum(most, widen(x + i));  // keeps NaN
  }
  float lanes[W];
  most.store(lanes);
  const auto is_less = [](float a, float b) { return a < b || (b != b && a == a); };
  float largest = *std::max_element(lanes, lanes + W, is_less);
  for (; i < size; ++i) {
    largest = std::max(largest, x[i], is_less);
  }
  const auto is_it = [&](float value) { return value == largest || (value != value && largest != largest); };
  return std::find_if(x, x + size, is_it) - x;
}

}  // namespace

Tensor argmax(const Tensor& x) {
  const int64_t rows = x.size(0), size = x.size(1);
  Tensor out = at::empty({rows}, x.options().dtype(at::kLong));
  at::parallel_for(0, rows, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* values = x.const_data_ptr<float>() + row * x.stride(0);
      out.mutable_data_ptr<int64_t>()[row] = argmax_of(values, size);
    }
  });
  return out;
}

}  // namespace trident::operators
