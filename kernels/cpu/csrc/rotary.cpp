// QK-norm, rotary embedding and the KV cache write, in one pass.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "vector.h"

namespace trident {
namespace {

// The values of one head, normalised if there is a weight.
template <typename T>
struct Head {
  const T* x;
  const T* weight;
  bool unit_offset;
  Vec scale;

  Head(const Rotary<T>& a, const T* x, const T* weight)
      : x(x), weight(weight), unit_offset(a.unit_offset), scale(1.0f) {
    if (weight != nullptr) {
      Vec squares(0.0f);
      for (int64_t i = 0; i < a.dim; i += W) {
        const Vec value = widen(x + i, std::min(W, a.dim - i));
        squares = at::vec::fmadd(value, value, squares);
      }
      scale = inverse_rms(squares, a.dim, a.eps);
    }
  }

  Vec at(int64_t i, int64_t n) const {
    const Vec value = widen(x + i, n);
    if (weight == nullptr) {
      return value;
    }
    const Vec factor = widen(weight + i, n);
    return rounded<T>(
        unit_offset ? value * scale * (Vec(1.0f) + factor) : rounded<T>(value * scale) * factor);
  }
};

template <typename T>
void rotate(
    const Rotary<T>& a, const Head<T>& head, int64_t token, float factor, float* wide, T* out) {
  const float* cos = a.cos + token * a.half;
  const float* sin = a.sin + token * a.half;
  if (a.interleaved) {
    for (int64_t i = 0; i < 2 * a.half; i += W) {
      const int64_t n = std::min(W, 2 * a.half - i);
      store(wide + i, head.at(i, n), n);
    }
    for (int64_t i = 0; i < a.half; ++i) {
      const float first = wide[2 * i], second = wide[2 * i + 1];
      const float c = cos[i] * factor, s = sin[i] * factor;
      wide[2 * i] = first * c - second * s;
      wide[2 * i + 1] = second * c + first * s;
    }
    for (int64_t i = 0; i < 2 * a.half; i += W) {
      const int64_t n = std::min(W, 2 * a.half - i);
      store(out + i, widen(wide + i, n), n);
    }
  } else {
    for (int64_t i = 0; i < a.half; i += W) {
      const int64_t n = std::min(W, a.half - i);
      const Vec first = head.at(i, n), second = head.at(a.half + i, n);
      const Vec c = widen(cos + i, n) * Vec(factor), s = widen(sin + i, n) * Vec(factor);
      store(out + i, first * c - second * s, n);
      store(out + a.half + i, second * c + first * s, n);
    }
  }
  for (int64_t i = 2 * a.half; i < a.dim; i += W) {
    const int64_t n = std::min(W, a.dim - i);
    store(out + i, head.at(i, n) * Vec(factor), n);
  }
}

}  // namespace

template <typename T>
void rotary_and_cache(const Rotary<T>& a) {
  const int64_t values = (a.heads + 2 * a.kv_heads) * a.dim;
  at::parallel_for(0, a.tokens, grain(values), [&](int64_t begin, int64_t end) {
    std::vector<float> wide(a.dim);
    for (int64_t token = begin; token < end; ++token) {
      const float factor = a.query_scale == nullptr ? 1.0f : a.query_scale[token];
      for (int64_t h = 0; h < a.heads; ++h) {
        const T* x = a.query + token * a.query_stride + h * a.query_head_stride;
        T* out = a.out + (token * a.heads + h) * a.dim;
        rotate(a, Head<T>(a, x, a.query_norm), token, factor, wide.data(), out);
      }
      if (a.slots[token] < 0) {
        continue;
      }
      const int64_t slot = a.slots[token] * a.kv_heads * a.dim;
      for (int64_t h = 0; h < a.kv_heads; ++h) {
        const T* x = a.key + token * a.key_stride + h * a.dim;
        T* out = a.key_cache + slot + h * a.dim;
        rotate(a, Head<T>(a, x, a.key_norm), token, 1.0f, wide.data(), out);
      }
      const T* value = a.value + token * a.value_stride;
      std::memcpy(a.value_cache + slot, value, a.kv_heads * a.dim * sizeof(T));
    }
  });
}

#define INSTANTIATE(T) template void rotary_and_cache(const Rotary<T>&);
TRIDENT_FOR_EACH_DTYPE(INSTANTIATE)

}  // namespace trident
