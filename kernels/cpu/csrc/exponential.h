// The exponential function, of results that are rounded to fewer bits.
#pragma once

#include <type_traits>

#include "vector.h"

namespace trident {

constexpr float kLog2OfE = 1.44269504f;

#ifdef CPU_CAPABILITY_AVX512
// 2^x, accurate to 18 bits.
inline Vec power_of_two(Vec x) {
  // The fraction's power is a polynomial with the least relative error on [0, 1] that is 1 at 0; the
  // last instruction takes the whole part of x itself.
  const __m512 fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 sum = _mm512_set1_ps(0.01342669f);
  for (const float factor : {0.05224247f, 0.24128021f, 0.69304484f, 1.0f}) {
    sum = _mm512_fmadd_ps(sum, fraction, _mm512_set1_ps(factor));
  }
  // Less is 0, without the time that denormal numbers take; NaN stays.
  const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLE_UQ);
  return _mm512_maskz_scalef_ps(some, sum, x);
}
#endif

// e^x, accurate to 18 bits if what is made of it is rounded to T, which has fewer.
template <typename T>
inline Vec exponential(Vec x) {
  if constexpr (std::is_same_v<T, float>) {
    return x.exp();
  } else {
#ifdef CPU_CAPABILITY_AVX512
    return power_of_two(x * Vec(kLog2OfE));
#else
    return x.exp_u20();
#endif
  }
}

}  // namespace trident
