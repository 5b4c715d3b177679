// Registers of 32-bit units, and the operations on them that AVX2 and AVX-512 both have. For
// panel_product.h alone.
//
// What runs in the inner loop for each row is written in assembly: GCC 12 copies sums to other
// registers and back with the intrinsics, or runs out of registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

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
