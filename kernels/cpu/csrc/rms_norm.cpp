// RMS normalisation, alone and fused with the residual addition; a row is read from memory once.
#include <ATen/Parallel.h>

#include <algorithm>

#include "kernels.h"
#include "vector.h"

namespace trident {
namespace {

template <typename T>
void normalise_row(const RmsNorm<T>& a, int64_t row) {
  const T* x = a.x + row * a.x_stride;
  T* out = a.out + row * a.size;
  Vec squares(0.0f);
  if (a.residual != nullptr) {
    const T* residual = a.residual + row * a.residual_stride;
    T* total = a.total + row * a.size;
    for (int64_t i = 0; i < a.size; i += W) {
      const int64_t n = std::min(W, a.size - i);
      const Vec sum = rounded<T>(widen(x + i, n) + widen(residual + i, n));
      store(total + i, sum, n);
      squares = at::vec::fmadd(sum, sum, squares);
    }
    x = total;
  } else {
    for (int64_t i = 0; i < a.size; i += W) {
      const Vec value = widen(x + i, std::min(W, a.size - i));
      squares = at::vec::fmadd(value, value, squares);
    }
  }
  const Vec scale = inverse_rms(squares, a.size, a.eps);
  for (int64_t i = 0; i < a.size; i += W) {
    const int64_t n = std::min(W, a.size - i);
    const Vec normed = widen(x + i, n) * scale;
    const Vec weight = widen(a.weight + i, n);
    store(out + i, a.unit_offset ? normed * (Vec(1.0f) + weight) : rounded<T>(normed) * weight, n);
  }
}

}  // namespace

template <typename T>
void rms_norm(const RmsNorm<T>& a) {
  at::parallel_for(0, a.rows, grain(a.size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      normalise_row(a, row);
    }
  });
}

#define INSTANTIATE(T) template void rms_norm(const RmsNorm<T>&);
TRIDENT_FOR_EACH_DTYPE(INSTANTIATE)

}  // namespace trident
