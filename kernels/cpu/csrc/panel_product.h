// The inner product of linear layers: a few rows times a panel of output channels, in registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "vector.h"

namespace trident {

// A unit is 32 bits along the depth of the weights: a float, two bfloat16, or four unsigned
// integers, whose zero point is accounted for in the initial sums, or eight of 4 bits, the low bits
// of the bytes before the high ones. A product takes a unit in kSteps steps, each with 32 bits of a
// row, converted to `Value`.
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
using Units = __m512i;
constexpr int64_t kMostRows = 12;  // with two vectors each, 24 of 32 registers
#else
using Units = __m256i;
constexpr int64_t kMostRows = 6;  // with two vectors each, 12 of 16 registers
#endif

inline Units load_units(const int32_t* from) {
  return *reinterpret_cast<const Units*>(from);  // aligned
}

// What a product has that takes a unit at once.
struct WholeUnits {
  static constexpr int64_t kSteps = 1;

  static Units weights(const int32_t* from, int64_t) {
    return load_units(from);
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

struct BFloat16Product : WholeUnits {
  using Sums = __m512;
  using Value = at::BFloat16;

  static Sums add(Sums sums, int32_t x, Units weights) {
    return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(x));
  }
};

struct Float32Product : WholeUnits {
  using Sums = __m512;
  using Value = float;

  static Sums add(Sums sums, int32_t x, Units weights) {
    return _mm512_fmadd_ps(
        _mm512_castsi512_ps(_mm512_set1_epi32(x)), _mm512_castsi512_ps(weights), sums);
  }
};

struct Int8Product : WholeUnits {
  using Sums = __m512i;
  using Value = int8_t;
  static constexpr int64_t kValues = 4;
  static constexpr float kZero = 128.0f;

  static Units whole(Sums sums) {
    return sums;
  }

  static Sums add(Sums sums, int32_t x, Units weights) {
    // With the intrinsic, GCC 12 copies the sums to another register and back.
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(_mm512_set1_epi32(x)));
    return sums;
  }
};

struct Int4Product : Int8Product {
  static constexpr int64_t kValues = 8, kSteps = 2;
  static constexpr float kZero = 8.0f;

  static Units weights(const int32_t* from, int64_t step) {
    const Units units = load_units(from);
    return _mm512_and_si512(
        step == 0 ? units : _mm512_srli_epi32(units, 4), _mm512_set1_epi8(15));
  }
};

#else

struct Float32Product : WholeUnits {
  using Sums = __m256;
  using Value = float;

  static Sums add(Sums sums, int32_t x, Units weights) {
    // With the intrinsics here and below, GCC 12 runs out of registers.
    asm("vfmadd231ps %2, %1, %0" : "+x"(sums) : "x"(_mm256_set1_epi32(x)), "x"(weights));
    return sums;
  }
};

// In float32, one value of the pair after the other.
struct BFloat16Product : Float32Product {
  static constexpr int64_t kSteps = 2;

  static Units weights(const int32_t* from, int64_t step) {
    const Units units = load_units(from);
    return step == 0 ? _mm256_slli_epi32(units, 16)
                     : _mm256_and_si256(units, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000)));
  }
};

// With 16-bit pairs: the 8-bit instruction sums products in 16 bits, which overflows.
struct Int8Product {
  using Sums = __m256i;
  using Value = int16_t;
  static constexpr int64_t kValues = 4, kSteps = 2;
  static constexpr float kZero = 128.0f;

  static Units whole(Sums sums) {
    return sums;
  }

  static Units weights(const int32_t* from, int64_t step) {
    // Each 128-bit half is shuffled separately; -1 gives zero.
    const auto pair = [](char i) { return _mm256_setr_epi8(
        i, -1, i + 1, -1, i + 4, -1, i + 5, -1, i + 8, -1, i + 9, -1, i + 12, -1, i + 13, -1,
        i, -1, i + 1, -1, i + 4, -1, i + 5, -1, i + 8, -1, i + 9, -1, i + 12, -1, i + 13, -1); };
    return _mm256_shuffle_epi8(load_units(from), step == 0 ? pair(0) : pair(2));
  }
  static Sums add(Sums sums, int32_t x, Units weights) {
    const __m256i products = _mm256_madd_epi16(weights, _mm256_set1_epi32(x));
    asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(products));
    return sums;
  }
};

// Sums of 16 bits hold those of kGroup values: 2 * 15 * 127 * kGroup / 4 < 2^15.
struct Int4Product {
  using Sums = __m256i;
  using Value = int8_t;
  static constexpr int64_t kValues = 8, kSteps = 2;
  static constexpr float kZero = 8.0f;

  static Units weights(const int32_t* from, int64_t step) {
    const Units units = load_units(from);
    return _mm256_and_si256(
        step == 0 ? units : _mm256_srli_epi32(units, 4), _mm256_set1_epi8(15));
  }
  static Sums add(Sums sums, int32_t x, Units weights) {
    const __m256i products = _mm256_maddubs_epi16(weights, _mm256_set1_epi32(x));
    asm("vpaddw %1, %0, %0" : "+x"(sums) : "x"(products));
    return sums;
  }
  static Units whole(Sums sums) {
    return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
  }
};

#endif

// Adds to sums the products of ROWS rows, x [units, kSteps, ROWS], with a panel [units, kColumns].
// With each unit, next_lines cache lines from `next` on are prefetched.
//
// Not inlined: together with the epilogue, GCC 12 spills some of the sums.
template <typename Product, int64_t ROWS>
[[gnu::noinline]] void multiply_panel(
    typename Product::Sums (&sums)[ROWS][kVectors], const int32_t* x, const int32_t* panel,
    int64_t units, const char* next, int64_t next_lines) {
  typename Product::Sums own[ROWS][kVectors];
#pragma GCC unroll 12
  for (int64_t r = 0; r < ROWS; ++r) {
    own[r][0] = sums[r][0];
    own[r][1] = sums[r][1];
  }
  for (int64_t k = 0; k < units; ++k, panel += kColumns) {
    for (int64_t i = 0; i < next_lines; ++i, next += 64) {
      _mm_prefetch(next, _MM_HINT_T1);
    }
#pragma GCC unroll 2
    for (int64_t step = 0; step < Product::kSteps; ++step, x += ROWS) {
      const Units left = Product::weights(panel, step), right = Product::weights(panel + W, step);
#pragma GCC unroll 12
      for (int64_t r = 0; r < ROWS; ++r) {
        own[r][0] = Product::add(own[r][0], x[r], left);
        own[r][1] = Product::add(own[r][1], x[r], right);
      }
    }
  }
#pragma GCC unroll 12
  for (int64_t r = 0; r < ROWS; ++r) {
    sums[r][0] = own[r][0];
    sums[r][1] = own[r][1];
  }
}

}  // namespace trident
