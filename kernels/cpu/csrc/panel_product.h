// The inner product of linear layers: a few rows times a panel of output channels, in registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "vector.h"

namespace trident {

constexpr int64_t kVectors = 2;             // of a panel
constexpr int64_t kColumns = kVectors * W;  // as `kernels.cpu.linear` packs them
constexpr int64_t kMostRows = 12;           // with two vectors each, 24 of 32 registers

// A unit is 32 bits along the depth: a pair of bfloat16, or four integers.
struct BFloat16Product {
  using Sums = __m512;
  static Sums step(Sums sums, int32_t x, __m512i weights) {
    return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(x));
  }
};

// The weights are unsigned; what their zero point adds is in the sums from the start.
struct Int8Product {
  using Sums = __m512i;
  static Sums step(Sums sums, int32_t x, __m512i weights) {
    // For the intrinsic, GCC 12 copies the sums to another register and back.
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(_mm512_set1_epi32(x)));
    return sums;
  }
};

// Adds the products of ROWS rows, x [units, ROWS], with a panel [units, kColumns] to the sums. With
// each unit, some lines of memory from `next` on are fetched into the cache.
template <typename Product, int64_t ROWS>
inline void multiply_panel(
    typename Product::Sums (&sums)[ROWS][kVectors], const int32_t* x, const int32_t* panel,
    int64_t units, const char* next, int64_t next_lines) {
  for (int64_t k = 0; k < units; ++k) {
    const __m512i left = _mm512_load_si512(panel + k * kColumns);
    const __m512i right = _mm512_load_si512(panel + k * kColumns + W);
    for (int64_t i = 0; i < next_lines; ++i, next += 64) {
      _mm_prefetch(next, _MM_HINT_T1);
    }
#pragma GCC unroll 12
    for (int64_t r = 0; r < ROWS; ++r) {
      const int32_t value = x[k * ROWS + r];
      sums[r][0] = Product::step(sums[r][0], value, left);
      sums[r][1] = Product::step(sums[r][1], value, right);
    }
  }
}

}  // namespace trident
