// A tile of keys and its values for queries that are rows. For attention_worker.h alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention_keys.h"
#include "attention_packing.h"
#include "attention_scratch.h"
#include "attention_tasks.h"
#include "exponential.h"
#include "kernels.h"
#include "tile.h"

namespace trident {
namespace {

template <typename T>
class RowAttention {
 public:
  RowAttention(const PagedAttention<T>& a, const Layout<T>& layout, const Scratch<T>& s)
      : a_(a), layout_(layout), s_(s) {}

  // Adds the tile, whose first position is `key`, to the results of a KV head's rows, of which the
  // query of the first is at `position`. Calls fetch(cache, head, begin, end) for keys begin to end of
  // the next tile, a few at a time.
  void attend(
      const KeyRows& tile, int64_t head, int64_t first, int64_t rows, int64_t key,
      int64_t position, const auto& fetch) {
    const int64_t columns = round_up(tile.count, kColumns);
    pack_keys(tile, head, columns, fetch);
    score(first, rows, columns);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t own = position + row / layout_.group;
      const int64_t low = a_.window ? std::max<int64_t>(0, own - a_.window + 1 - key) : 0;
      softmax(
          s_.scores + row * kKeys, first + row, std::min(low, tile.count),
          std::clamp<int64_t>(own + 1 - key, 0, tile.count));
    }
    pack_values(tile, head, fetch);
    add_values(first, rows, tile.count);
  }

 private:
  int64_t units() const {
    return units_of<T>(a_.dim);
  }

  void score(int64_t first, int64_t rows, int64_t columns) {
    const float* query = s_.query + first * layout_.units;
    multiply<kPairs<T>>(
        rows, query, layout_.units, s_.keys, kKeys, units(), columns, s_.scores, kKeys, nullptr);
  }

  void add_values(int64_t first, int64_t rows, int64_t keys) {
    float* out = s_.out + first * layout_.dim;
    multiply<kPairs<T>>(
        rows, s_.scores, kKeys, s_.values, layout_.dim, units_of<T>(keys), layout_.dim, out,
        layout_.dim, s_.keep + first);
  }

  // Transposes keys into columns, W at a time, and prefetches as many of the next tile; the last
  // call prefetches the rest.
  void pack_keys(const KeyRows& tile, int64_t head, int64_t columns, const auto& fetch) {
    for (int64_t j = 0; j < columns; j += W) {
      fetch(a_.key_cache, head, j, j + W < columns ? j + W : kKeys);
      const int64_t some = std::clamp<int64_t>(tile.count - j, 0, W);
      for (int64_t u = 0; u < units(); u += W) {
        Vec rows[W];
#pragma GCC unroll 16
        for (int64_t i = 0; i < W; ++i) {
          const T* row = a_.key_cache + tile.rows[j + i] + head * a_.dim;
          rows[i] = i < some ? load_units(row, u, a_.dim) : Vec(0.0f);
        }
        store_transposed(rows, s_.keys + u * kKeys + j, kKeys);
      }
    }
  }

  // Packs values into rows of units, zeros for keys that there are not, and prefetches those of the
  // next tile likewise.
  void pack_values(const KeyRows& tile, int64_t head, const auto& fetch) {
    const T* values = a_.value_cache + head * a_.dim;
    const int64_t count = tile.count;
    for (int64_t j = 0; j < count; j += kPerUnit<T>) {
      fetch(a_.value_cache, head, j, j + kPerUnit<T> < count ? j + kPerUnit<T> : kKeys);
      const T* second = j + 1 < count ? values + tile.rows[j + 1] : nullptr;
      for (int64_t i = 0; i < layout_.dim; i += 2 * W) {
        Vec left, right;
        pair_units(values + tile.rows[j], second, i, a_.dim, left, right);
        float* to = s_.values + j / kPerUnit<T> * layout_.dim + i;
        left.store(to);
        right.store(to + W);
      }
    }
  }

  // Turns a row's scores into weights for keys [low, high) of the tile; the others get 0.
  void softmax(float* scores, int64_t row, int64_t low, int64_t high) {
    if (low >= high) {
      std::fill_n(scores, kKeys, 0.0f);
      s_.keep[row] = 1.0f;
      return;
    }
    Vec scale(a_.scale);
    if (a_.soft_cap > 0) {
      const Vec inner(a_.scale / a_.soft_cap), cap(a_.soft_cap);
      for (int64_t j = 0; j < kKeys; j += W) {
        ((Vec::loadu(scores + j) * inner).tanh() * cap).store(scores + j);
      }
      scale = Vec(1.0f);
    }
    std::fill_n(scores, low, kNothing);
    std::fill(scores + high, scores + kKeys, kNothing);
    Vec values[kKeys / W];
    Vec largest(kNothing);
    for (int64_t i = 0; i < kKeys / W; ++i) {
      values[i] = Vec::loadu(scores + i * W) * scale;
      largest = at::vec::clamp_min(values[i], largest);
    }
    const float before = s_.maximum[row], maximum = std::max(before, largest.reduce_max());
    const Vec shift(maximum);
    Vec sum(0.0f);
    for (int64_t i = 0; i < kKeys / W; i += 2) {
      const Vec left = exponential<T>(values[i] - shift);
      const Vec right = exponential<T>(values[i + 1] - shift);
      sum += left + right;
      store_units<T>(scores + i * W / kPerUnit<T>, left, right);
    }
    s_.keep[row] = maximum == before ? 1.0f : std::exp(before - maximum);
    s_.sum[row] = s_.sum[row] * s_.keep[row] + sum.reduce_add();
    s_.maximum[row] = maximum;
  }

  const PagedAttention<T>& a_;
  const Layout<T>& layout_;
  const Scratch<T>& s_;
};

}  // namespace
}  // namespace trident
