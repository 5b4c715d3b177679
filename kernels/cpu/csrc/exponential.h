// The exponential function, of results that are rounded to fewer bits.
#pragma once

#include <type_traits>

#include "vector.h"

namespace trident {

// e^x, accurate to 18 bits if what is made of it is rounded to T, which has fewer.
template <typename T>
inline Vec exponential(Vec x) {
  if constexpr (std::is_same_v<T, float>) {
    return x.exp();
  } else {
#ifdef CPU_CAPABILITY_AVX512
    // 2^(whole + rest), the rest by a polynomial with the least relative error on [-1/2, 1/2].
    const __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    const __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(power, whole);
    __m512 sum = _mm512_set1_ps(0.009582853f);
    for (const float factor : {0.055906426f, 0.24024099f, 0.69312418f, 1.0f}) {
      sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor));
    }
    // Less is 0, without the time that denormal numbers take; NaN stays.
    const __mmask16 some = _mm512_cmp_ps_mask(power, _mm512_set1_ps(-126.0f), _CMP_NLE_UQ);
    return _mm512_maskz_scalef_ps(some, sum, whole);
#else
    return x.exp_u20();
#endif
  }
}

}  // namespace trident
