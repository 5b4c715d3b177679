// Activation functions of MLPs, in float32.
#pragma once

#include <type_traits>

#include "exponential.h"
#include "kernels.h"
#include "vector.h"

namespace trident {

// For a large negative x the exponential is infinite, and the quotient zero.
template <typename T>
inline Vec sigmoid_times(Vec x, Vec z) {
  return x / (Vec(1.0f) + exponential<T>(z.neg()));
}

// Of values that are rounded to T afterwards.
template <Activation kind, typename T>
inline Vec activate(Vec x) {
  if constexpr (kind == Activation::kSilu) {
    return sigmoid_times<T>(x, x);
  } else if constexpr (kind == Activation::kGelu) {
    return Vec(0.5f) * x * (Vec(1.0f) + (x * Vec(0.7071067811865476f)).erf());
  } else {
    // (1 + tanh(y)) / 2 is the sigmoid of 2 y, y = sqrt(2 / pi) (x + 0.044715 x^3).
    return sigmoid_times<T>(x, Vec(1.5957691216057308f) * (x + Vec(0.044715f) * x * x * x));
  }
}

template <Activation kind>
using Kind = std::integral_constant<Activation, kind>;

// Calls run with the activation's `Kind` as a compile-time constant.
template <typename Run>
void for_activation(Activation activation, Run run) {
  switch (activation) {
    case Activation::kSilu:
      return run(Kind<Activation::kSilu>{});
    case Activation::kGelu:
      return run(Kind<Activation::kGelu>{});
    case Activation::kGeluTanh:
      return run(Kind<Activation::kGeluTanh>{});
  }
}

}  // namespace trident
