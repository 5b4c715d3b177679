// The inner product of linear layers: a few rows times a panel of output channels, in registers.
#pragma once

#include <cstdint>
#include <immintrin.h>
#include <type_traits>

#include "vector.h"

// Registers of 32-bit units, and the operations on them that AVX2 and AVX-512 both have.
// What runs in the inner loop for each row is written in assembly: GCC 12 copies sums to other
// registers and back with the intrinsics, or runs out of registers.
namespace trident {

#ifdef CPU_CAPABILITY_AVX512
using Units = __m512i;
using FloatUnits = __m512;
constexpr int64_t kMostRows = 12;  // with two vectors each, 24 of 32 registers

inline Units broadcast(int32_t x) {
  return _mm512_set1_epi32(x);
}
inline FloatUnits as_floats(Units x) {
  return _mm512_castsi512_ps(x);
}
inline Units common_bits(Units a, Units b) {
  return _mm512_and_si512(a, b);
}
inline Units shifted_left(Units x, int bits) {
  return _mm512_slli_epi32(x, bits);
}
inline Units shifted_right(Units x, int bits) {
  return _mm512_srli_epi32(x, bits);
}
// The low 16 bits of each unit as a half, widened.
inline Units widened_halves(Units x) {
  return _mm512_castps_si512(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)));
}
// In each part of 128 bits separately.
inline Units shuffled(Units x, __m128i order) {
  return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(order));
}
// Sums of two products of 16-bit integers.
inline Units products_of_16_bits(Units a, Units b) {
  return _mm512_madd_epi16(a, b);
}
// Sums of two products of unsigned with signed 8-bit integers, in 16 bits.
inline Units products_of_8_bits(Units a, Units b) {
  return _mm512_maddubs_epi16(a, b);
}
#else
using Units = __m256i;
using FloatUnits = __m256;
constexpr int64_t kMostRows = 6;  // with two vectors each, 12 of 16 registers

inline Units broadcast(int32_t x) {
  return _mm256_set1_epi32(x);
}
inline FloatUnits as_floats(Units x) {
  return _mm256_castsi256_ps(x);
}
inline Units common_bits(Units a, Units b) {
  return _mm256_and_si256(a, b);
}
inline Units shifted_left(Units x, int bits) {
  return _mm256_slli_epi32(x, bits);
}
inline Units shifted_right(Units x, int bits) {
  return _mm256_srli_epi32(x, bits);
}
// The low 16 bits of each unit as a half, widened.
inline Units widened_halves(Units x) {
  const __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0xd8);
  return _mm256_castps_si256(_mm256_cvtph_ps(_mm256_castsi256_si128(packed)));
}
// In each part of 128 bits separately.
inline Units shuffled(Units x, __m128i order) {
  return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(order));
}
// Sums of two products of 16-bit integers.
inline Units products_of_16_bits(Units a, Units b) {
  return _mm256_madd_epi16(a, b);
}
// Sums of two products of unsigned with signed 8-bit integers, in 16 bits.
inline Units products_of_8_bits(Units a, Units b) {
  return _mm256_maddubs_epi16(a, b);
}
#endif

inline Units load_units(const int32_t* from) {
  return *reinterpret_cast<const Units*>(from);  // aligned
}

inline FloatUnits add_products(FloatUnits sums, Units a, Units b) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(sums) : "v"(as_floats(a)), "v"(as_floats(b)));
  return sums;
}
inline Units add_32_bits(Units sums, Units x) {
  asm("vpaddd %1, %0, %0" : "+v"(sums) : "v"(x));
  return sums;
}
inline Units add_16_bits(Units sums, Units x) {
  asm("vpaddw %1, %0, %0" : "+v"(sums) : "v"(x));
  return sums;
}

#ifdef __AVX512BF16__
inline FloatUnits add_pairs(FloatUnits sums, Units a, Units b) {
  return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}
#endif

// Adds four products of unsigned with signed 8-bit integers.
#if defined(__AVX512VNNI__)
#define TRIDENT_VNNI
inline Units add_fours(Units sums, Units a, Units b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
  return sums;
}
#elif defined(__AVXVNNI__)
#define TRIDENT_VNNI
inline Units add_fours(Units sums, Units a, Units b) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
  return sums;
}
#endif

}  // namespace trident

namespace trident {

// A unit is 32 bits along the depth of the weights: a float, two bfloat16 or halves, or four unsigned
// integers, whose zero point is accounted for in the initial sums, or eight of 4 bits, the low bits
// of the bytes before the high ones. A product takes a unit in kSteps steps, each with 32 bits of a
// row, converted to `Value`. Sums of integers begin with start(sum), and are whole(sums, sum).

// What a product has that takes a unit at once.
struct WholeUnits {
  static constexpr int64_t kSteps = 1;

  static Units weights(const int32_t* from, int64_t) {
    return load_units(from);
  }
};

struct Float32Product : WholeUnits {
  using Sums = FloatUnits;
  using Value = float;

  static Sums add(Sums sums, int32_t x, Units weights) {
    return add_products(sums, broadcast(x), weights);
  }
};

#ifdef __AVX512BF16__
struct BFloat16Product : WholeUnits {
  using Sums = FloatUnits;
  using Value = at::BFloat16;

  static Sums add(Sums sums, int32_t x, Units weights) {
    return add_pairs(sums, weights, broadcast(x));
  }
};
#else
// In float32, one value of the pair after the other.
struct BFloat16Product : Float32Product {
  static constexpr int64_t kSteps = 2;

  static Units weights(const int32_t* from, int64_t step) {
    const Units units = load_units(from);
    return step == 0 ? shifted_left(units, 16)
                     : common_bits(units, broadcast(static_cast<int32_t>(0xffff0000)));
  }
};
#endif

// In float32, one value of the pair after the other.
struct HalfProduct : Float32Product {
  static constexpr int64_t kSteps = 2;

  static Units weights(const int32_t* from, int64_t step) {
    const Units units = load_units(from);
    return widened_halves(step == 0 ? units : shifted_right(units, 16));
  }
};

// That of weights of T.
template <typename T>
using ProductOf = std::conditional_t<
    std::is_same_v<T, float>, Float32Product,
    std::conditional_t<std::is_same_v<T, at::Half>, HalfProduct, BFloat16Product>>;

// Units of eight integers, four by four.
struct Unpacked4Bits {
  static constexpr int64_t kValues = 8, kSteps = 2;
  static constexpr int32_t kZero = 8;

  static Units weights(const int32_t* from, int64_t step) {
    const Units units = load_units(from);
    return common_bits(step == 0 ? units : shifted_right(units, 4), broadcast(0x0f0f0f0f));
  }
};

#ifdef TRIDENT_VNNI
struct Int8Product : WholeUnits {
  using Sums = Units;
  using Value = int8_t;
  static constexpr int64_t kValues = 4;
  static constexpr int32_t kZero = 128;

  static Sums start(int32_t sum) {
    return broadcast(sum);
  }
  static Units whole(Sums sums, int32_t) {
    return sums;
  }
  static Sums add(Sums sums, int32_t x, Units weights) {
    return add_fours(sums, weights, broadcast(x));
  }
};

struct Int4Product : Unpacked4Bits {
  using Sums = Units;
  using Value = int8_t;

  static Sums start(int32_t sum) {
    return broadcast(sum);
  }
  static Units whole(Sums sums, int32_t) {
    return sums;
  }
  static Sums add(Sums sums, int32_t x, Units weights) {
    return add_fours(sums, weights, broadcast(x));
  }
};
#else
// With 16-bit pairs: the 8-bit instruction sums products in 16 bits, which overflows.
struct Int8Product {
  using Sums = Units;
  using Value = int16_t;
  static constexpr int64_t kValues = 4, kSteps = 2;
  static constexpr int32_t kZero = 128;

  static Sums start(int32_t sum) {
    return broadcast(sum);
  }
  static Units whole(Sums sums, int32_t) {
    return sums;
  }
  static Units weights(const int32_t* from, int64_t step) {
    const auto pair = [](char i) {  // -1 gives zero
      return _mm_setr_epi8(
          i, -1, i + 1, -1, i + 4, -1, i + 5, -1, i + 8, -1, i + 9, -1, i + 12, -1, i + 13, -1);
    };
    return shuffled(load_units(from), step == 0 ? pair(0) : pair(2));
  }
  static Sums add(Sums sums, int32_t x, Units weights) {
    return add_32_bits(sums, products_of_16_bits(weights, broadcast(x)));
  }
};

// Sums of 16 bits hold those of kGroup values: 2 * 15 * 127 * kGroup / 4 < 2^15.
struct Int4Product : Unpacked4Bits {
  using Sums = Units;
  using Value = int8_t;

  static Sums start(int32_t) {
    return Units{};
  }
  static Units whole(Sums sums, int32_t start) {
    return add_32_bits(products_of_16_bits(sums, broadcast(0x00010001)), broadcast(start));
  }
  static Sums add(Sums sums, int32_t x, Units weights) {
    return add_16_bits(sums, products_of_8_bits(weights, broadcast(x)));
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
