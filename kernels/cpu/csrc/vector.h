// One vector register of floats, and its loads and stores for all supported dtypes.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace trident {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t W = Vec::size();

// Columns of a panel, which a product computes at once; weights are packed in such panels.
constexpr int64_t kVectors = 2;
constexpr int64_t kColumns = kVectors * W;

template <typename T>
inline Vec widen(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return Vec::loadu(from);
  } else {
    Vec out;
    if constexpr (std::is_same_v<T, at::BFloat16>) {
      at::vec::load_fp32_from_bf16(from, out);
    } else {
      at::vec::load_fp32_from_fp16(from, out);
    }
    return out;
  }
}

// The first n <= W values, zero-padded.
template <typename T>
inline Vec widen(const T* from, int64_t n) {
  if (n == W) {
    return widen(from);
  }
  T whole[W] = {};
  std::memcpy(whole, from, n * sizeof(T));
  return widen(whole);
}

template <typename T>
inline auto narrow(Vec v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else if constexpr (std::is_same_v<T, at::BFloat16>) {
    return at::vec::convert_float_bfloat16(v, v);
  } else {
    return at::vec::convert_float_half(v, v);
  }
}

// Rounds to T and writes the first n <= W values.
template <typename T>
inline void store(T* to, Vec v, int64_t n = W) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    const __mmask16 some = static_cast<__mmask16>((1u << n) - 1);
    return _mm256_mask_storeu_epi16(to, some, (__m256i)_mm512_cvtneps_pbh(v));
  }
#endif
  narrow<T>(v).store(to, static_cast<int>(n));
}

// v rounded to T.
template <typename T>
inline Vec rounded(Vec v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
#ifdef __AVX512BF16__
  } else if constexpr (std::is_same_v<T, at::BFloat16>) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v));
    return _mm512_castsi512_ps(_mm512_slli_epi32(low, 16));
#endif
  } else {
    T whole[at::vec::Vectorized<T>::size()];
    narrow<T>(v).store(whole);
    return widen(whole);
  }
}

inline double sum_of_lanes(Vec v) {
  float lanes[W];
  v.store(lanes);
  double sum = 0.0;
  for (const float lane : lanes) {
    sum += lane;
  }
  return sum;
}

// 1 / sqrt(mean + eps) of `size` squares, summed by lane. An error in a row's factor accumulates
// over the layers, so it is rounded once, from double.
inline Vec inverse_rms(Vec squares, int64_t size, float eps) {
  const double mean = sum_of_lanes(squares) / static_cast<double>(size);
  return Vec(static_cast<float>(1.0 / std::sqrt(mean + eps)));
}

// Rows per task, so that a task is worth waking a thread.
inline int64_t grain(int64_t row_size) {
  constexpr int64_t kValues = 1 << 14;
  return row_size < kValues ? kValues / row_size : 1;
}

}  // namespace trident
