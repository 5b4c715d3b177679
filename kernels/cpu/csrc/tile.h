// The inner product of attention: a few rows of one matrix times a panel of another, in registers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vector.h"

namespace trident {

// A unit is what one lane processes per step along the depth: a float, or a pair of bfloat16.
#ifdef __AVX512BF16__
template <typename T>
constexpr bool kPairs = std::is_same_v<T, at::BFloat16>;
#else
template <typename T>
constexpr bool kPairs = false;
#endif

template <typename T>
constexpr int64_t kPerUnit = kPairs<T> ? 2 : 1;

// The number of units that hold n values.
template <typename T>
constexpr int64_t units_of(int64_t n) {
  return (n + kPerUnit<T> - 1) / kPerUnit<T>;
}

constexpr int64_t kRows = W == 16 ? 8 : 4;  // as many accumulators as fit into registers

template <bool PAIRS>
inline Vec step(Vec a, Vec b, Vec c) {
#ifdef __AVX512BF16__
  if constexpr (PAIRS) {
    return _mm512_dpbf16_ps(c, (__m512bh)__m512(a), (__m512bh)__m512(b));
  }
#endif
  return at::vec::fmadd(a, b, c);
}

// Writes a and b, 2 W values in all, as units.
template <typename T>
inline void store_units(float* to, Vec a, Vec b) {
#ifdef __AVX512BF16__
  if constexpr (kPairs<T>) {
    Vec(_mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(b, a))).store(to);
    return;
  }
#endif
  a.store(to);
  b.store(to + W);
}

// The first n <= W values of a row and of the next one, interleaved as units; b may be null.
template <typename T>
inline Vec column_units(const T* a, const T* b, int64_t n) {
#ifdef __AVX512BF16__
  if constexpr (kPairs<T>) {
    const __mmask16 some = static_cast<__mmask16>((1u << n) - 1);
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, a));
    if (b == nullptr) {
      return _mm512_castsi512_ps(low);
    }
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, b));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
#endif
  return widen(a, n);
}

// c[r, :] = c[r, :] * keep[r] + a[r, :] b for ROWS rows and one panel; without keep, c is written.
template <bool PAIRS, int64_t ROWS>
inline void multiply_tile(
    const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc,
    const float* keep) {
  Vec sum[ROWS][kVectors];
#pragma GCC unroll 8
  for (int64_t r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
    for (int64_t v = 0; v < kVectors; ++v) {
      sum[r][v] = keep == nullptr ? Vec(0.0f) : Vec(keep[r]) * Vec::loadu(c + r * ldc + v * W);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    const Vec left = Vec::loadu(b + k * ldb), right = Vec::loadu(b + k * ldb + W);
#pragma GCC unroll 8
    for (int64_t r = 0; r < ROWS; ++r) {
      const Vec value(a[r * lda + k]);
      sum[r][0] = step<PAIRS>(value, left, sum[r][0]);
      sum[r][1] = step<PAIRS>(value, right, sum[r][1]);
    }
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
    for (int64_t v = 0; v < kVectors; ++v) {
      sum[r][v].store(c + r * ldc + v * W);
    }
  }
}

template <bool PAIRS, int64_t ROWS>
void multiply_rows(
    int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
    int64_t columns, float* c, int64_t ldc, const float* keep) {
  if constexpr (ROWS > 0) {
    if (rows < ROWS) {
      return multiply_rows<PAIRS, ROWS - 1>(rows, a, lda, b, ldb, depth, columns, c, ldc, keep);
    }
    for (int64_t n = 0; n < columns; n += kColumns) {
      multiply_tile<PAIRS, ROWS>(a, lda, b + n, ldb, depth, c + n, ldc, keep);
    }
  }
}

// c [rows, columns] = c * keep + a [rows, depth] b [depth, columns]; columns are whole panels.
template <bool PAIRS>
void multiply(
    int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
    int64_t columns, float* c, int64_t ldc, const float* keep) {
  for (int64_t r = 0; r < rows; r += kRows) {
    multiply_rows<PAIRS, kRows>(
        std::min(kRows, rows - r), a + r * lda, lda, b, ldb, depth, columns, c + r * ldc, ldc,
        keep == nullptr ? nullptr : keep + r);
  }
}

}  // namespace trident
