// The units of keys and values, as the products of attention read them. For attention_rows.h,
// attention_tiles.h and paged_attention.cpp alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tile.h"

namespace trident {
namespace {

// W units of a row of `dim` values, from unit u on; zero-padded.
template <typename T>
inline Vec load_units(const T* row, int64_t u, int64_t dim) {
  const int64_t left = dim - u * kPerUnit<T>;
  if constexpr (kPairs<T>) {
    if (left >= 2 * W) {
      return Vec::loadu(reinterpret_cast<const float*>(row + 2 * u));
    }
    T whole[2 * W] = {};
    std::memcpy(whole, row + 2 * u, left * sizeof(T));
    return Vec::loadu(reinterpret_cast<const float*>(whole));
  } else {
    return widen(row + u, std::min(W, left));
  }
}

// Writes the columns of W rows as rows, `stride` apart.
inline void store_transposed(const Vec (&rows)[W], float* to, int64_t stride) {
#ifdef CPU_CAPABILITY_AVX512
  // By pairs of rows, by fours, and then by quarters of registers.
  __m512 a[W], b[W];
#pragma GCC unroll 8
  for (int64_t i = 0; i < W; i += 2) {
    a[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < W; i += 4) {
    b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < 4; ++i) {
    const __m512 low = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
    const __m512 high = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
    const __m512 low2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
    const __m512 high2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
    _mm512_storeu_ps(to + i * stride, _mm512_shuffle_f32x4(low, low2, 0x88));
    _mm512_storeu_ps(to + (i + 4) * stride, _mm512_shuffle_f32x4(high, high2, 0x88));
    _mm512_storeu_ps(to + (i + 8) * stride, _mm512_shuffle_f32x4(low, low2, 0xdd));
    _mm512_storeu_ps(to + (i + 12) * stride, _mm512_shuffle_f32x4(high, high2, 0xdd));
  }
#else
  alignas(64) float square[W * W];
  for (int64_t i = 0; i < W; ++i) {
    rows[i].store(square + i * W);
  }
  at::vec::transpose_mxn<float, W, W>(square, W, to, stride);
#endif
}

// Values i to i + 2 W - 1 of two rows of `dim` values, of which there may be less, as units with a
// value of both; `second` may be null, which stands for zeros. Without pairs it is not used.
template <typename T>
inline void pair_units(
    const T* first, const T* second, int64_t i, int64_t dim, Vec& left, Vec& right) {
#ifdef __AVX512BF16__
  if constexpr (kPairs<T>) {
    if (i + 2 * W <= dim) {
      alignas(64) static constexpr uint16_t kInOrder[2][2 * W] = {
          {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
           8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
          {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
           24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
      const __m512i a = _mm512_loadu_si512(first + i);
      const __m512i b = second == nullptr ? __m512i{} : _mm512_loadu_si512(second + i);
      const auto in_order = [&](int half) {
        return _mm512_permutex2var_epi16(a, _mm512_load_si512(kInOrder[half]), b);
      };
      left = _mm512_castsi512_ps(in_order(0));
      right = _mm512_castsi512_ps(in_order(1));
      return;
    }
  }
#endif
  const auto units = [&](int64_t from) {
    const int64_t n = std::clamp<int64_t>(dim - from, 0, W);
    return n == 0 ? Vec(0.0f)
                  : column_units(first + from, second == nullptr ? nullptr : second + from, n);
  };
  left = units(i);
  right = units(i + W);
}

}  // namespace
}  // namespace trident
