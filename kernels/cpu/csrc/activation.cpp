// SiLU and GELU, alone (in which a result depends on its value alone) and of the gates of SwiGLU and
// GEGLU, computed in float32 and rounded once; the sigmoid of attention's output gate.
#include <ATen/Parallel.h>

#include <algorithm>

#include "activation.h"

namespace trident {
namespace {

template <typename T, Activation kind>
void apply(const PlainActivation<T>& a) {
  at::parallel_for(0, a.size, grain(4), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += W) {
      const int64_t n = std::min(W, end - i);
      store(a.out + i, activate<kind, T>(widen(a.x + i, n)), n);
    }
  });
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
        store(out + i, activate<kind, T>(widen(gate + i, n)) * widen(up + i, n), n);
      }
    }
  });
}

}  // namespace

template <typename T>
void plain_activation(const PlainActivation<T>& a) {
  for_activation(a.activation, [&](auto kind) { apply<T, kind()>(a); });
}

template <typename T>
void gated_activation(const GatedActivation<T>& a) {
  for_activation(a.activation, [&](auto kind) { apply<T, kind()>(a); });
}

template <typename T>
void sigmoid_gate(const SigmoidGate<T>& a) {
  const Vec one(1.0f);
  at::parallel_for(0, a.tokens * a.heads, grain(4 * a.dim), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* x = a.x + i * a.dim;
      const T* gate = a.gate + i / a.heads * a.gate_stride + i % a.heads * a.gate_head_stride;
      T* out = a.out + i * a.dim;
      for (int64_t j = 0; j < a.dim; j += W) {
        const int64_t n = std::min(W, a.dim - j);
        const Vec sigmoid = sigmoid_times<float>(one, widen(gate + j, n));  // to all bits
        store(out + j, widen(x + j, n) * rounded<T>(sigmoid), n);
      }
    }
  });
}

#define INSTANTIATE(T)                                          \
  template void plain_activation(const PlainActivation<T>&); \
  template void gated_activation(const GatedActivation<T>&); \
  template void sigmoid_gate(const SigmoidGate<T>&);
TRIDENT_FOR_EACH_DTYPE(INSTANTIATE)

}  // namespace trident
