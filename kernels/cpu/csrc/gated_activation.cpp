// SwiGLU and GEGLU: computed in float32 and rounded once.
#include <ATen/Parallel.h>

#include <algorithm>

#include "kernels.h"
#include "vector.h"

namespace trident {
namespace {

// Of a large negative x the exponential is infinite, and the quotient zero.
inline Vec sigmoid_times(Vec x, Vec z) {
  return x / (Vec(1.0f) + z.neg().exp());
}

template <Activation kind>
inline Vec activate(Vec x) {
  if constexpr (kind == Activation::kSilu) {
    return sigmoid_times(x, x);
  } else if constexpr (kind == Activation::kGelu) {
    return Vec(0.5f) * x * (Vec(1.0f) + (x * Vec(0.7071067811865476f)).erf());
  } else {
    // (1 + tanh(y)) / 2 is the sigmoid of 2 y, y = sqrt(2 / pi) (x + 0.044715 x^3).
    return sigmoid_times(x, Vec(1.5957691216057308f) * (x + Vec(0.044715f) * x * x * x));
  }
}

template <typename T, Activation kind>
void apply(const GatedActivation<T>& a) {
  at::parallel_for(0, a.rows, grain(4 * a.size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = a.x + row * a.x_stride;
      const T* up = gate + a.size;
      T* out = a.out + row * a.size;
      for (int64_t i = 0; i < a.size; i += W) {
        const int64_t n = std::min(W, a.size - i);
        store(out + i, activate<kind>(widen(gate + i, n)) * widen(up + i, n), n);
      }
    }
  });
}

}  // namespace

template <typename T>
void gated_activation(const GatedActivation<T>& a) {
  switch (a.activation) {
    case Activation::kSilu:
      return apply<T, Activation::kSilu>(a);
    case Activation::kGelu:
      return apply<T, Activation::kGelu>(a);
    case Activation::kGeluTanh:
      return apply<T, Activation::kGeluTanh>(a);
  }
}

#define INSTANTIATE(T) template void gated_activation(const GatedActivation<T>&);
TRIDENT_FOR_EACH_DTYPE(INSTANTIATE)

}  // namespace trident
