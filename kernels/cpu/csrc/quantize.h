// Quantisation of activations to 8-bit integers. For linear_rows.h, scaled_groups.h and tile_rows.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

#include "vector.h"

namespace trident {
namespace {

using Ints = at::vec::Vectorized<int32_t>;

// Writes the first n <= W values, which fit into Value.
template <typename Value>
inline void store_integers(Value* to, Ints values, int64_t n) {
#ifdef CPU_CAPABILITY_AVX512
  if constexpr (sizeof(Value) == 1) {
    const __mmask16 some = static_cast<__mmask16>((1u << n) - 1);
    return _mm512_mask_cvtepi32_storeu_epi8(to, some, values);
  }
#endif
  int32_t lanes[W];
  values.store(lanes);
  if (n == W) {
    std::copy_n(lanes, W, to);  // a compile-time length
  } else {
    std::copy_n(lanes, n, to);
  }
}

inline int32_t largest_of(Ints values) {
#ifdef CPU_CAPABILITY_AVX512
  return _mm512_reduce_max_epi32(values);
#else
  int32_t lanes[W];
  values.store(lanes);
  return *std::max_element(lanes, lanes + W);
#endif
}

inline int32_t sum_of(Ints values) {
#ifdef CPU_CAPABILITY_AVX512
  return _mm512_reduce_add_epi32(values);
#else
  int32_t lanes[W];
  values.store(lanes);
  return std::accumulate(lanes, lanes + W, 0);
#endif
}

// The value of a step, and the sum of the steps of all values.
struct Quantized {
  float scale;
  int32_t sum;
};

// Quantises `size` values to 127 steps of their largest magnitude; if that is not finite, the scale
// is NaN. place(i) is where those of values i to i + W - 1 go.
inline Quantized quantize(const auto* x, int64_t size, const auto& place) {
  // Magnitudes compare alike as integers and as floats, with NaN above infinity.
  Ints largest(0);
  for (int64_t i = 0; i < size; i += W) {
    const Vec sizes = widen(x + i, std::min(W, size - i)).abs();
    largest = at::vec::maximum(largest, at::vec::cast<int32_t>(sizes));
  }
  const float most = std::bit_cast<float>(largest_of(largest));
  const Vec per_step(most > 0.0f ? 127.0f / most : 0.0f);
  Ints sum(0);
  for (int64_t i = 0; i < size; i += W) {
    const int64_t n = std::min(W, size - i);
    const Ints whole = at::vec::convert_to_int_of_same_size((widen(x + i, n) * per_step).round());
    sum = sum + whole;
    store_integers(place(i), whole, n);
  }
  return {
      std::isfinite(most) ? most / 127.0f : std::numeric_limits<float>::quiet_NaN(), sum_of(sum)};
}

}  // namespace
}  // namespace trident
