// A tile of keys and its values on AMX, for a few queries: with their group at most 16 rows for each
// KV head. For paged_attention.cpp alone.
//
// Both products read the cache in place. Keys are the unit's first operand; queries are columns, and
// as many KV heads as fit share a tile of them, each in columns of its own: the others are 0 there.
// Values are the second operand, whose pairs should be of two keys but are of two dimensions: so each
// row of weights comes twice, with zeros at the second and the first places, and gives the sums of the
// even and of the odd dimensions.
#pragma once

#include "amx.h"

#ifdef TRIDENT_TILES
#include <algorithm>
#include <cstdint>

#include "attention_keys.h"
#include "attention_packing.h"
#include "attention_scratch.h"
#include "attention_softmax.h"
#include "attention_tasks.h"
#include "attention_tiles.h"
#include "kernels.h"

namespace trident {
namespace {

template <typename T>
class GroupAttention {
 public:
  // The first of the task's queries is at `position`.
  GroupAttention(
      const PagedAttention<T>& a, const Layout<T>& layout, const Scratch<T>& s, const Task& task,
      int64_t position)
      : a_(a),
        layout_(layout),
        s_(s),
        rows_(task.count * layout.group),
        runs_(2 * rows_ > kTileRows ? 2 : 1),
        kv_heads_(task.kv_heads),
        heads_(std::min(layout.heads_per_tile(task.count), task.kv_heads)) {
    for (int64_t i = 0; i < W; ++i) {
      own_[i] = static_cast<int32_t>(position + i % rows_ / layout.group);
    }
  }

  // Writes the queries, of which query(head, row) is one, as columns.
  void pack_queries(const auto& query) {
    for (int64_t head = 0; head < kv_heads_; ++head) {
      const int64_t first = head % heads_ * rows_;
      for (int64_t u = 0; u < layout_.units; u += W) {
        Vec columns[W];
        for (int64_t i = 0; i < W; ++i) {
          const int64_t row = i - first;
          columns[i] = row >= 0 && row < rows_ ? load_units(query(head, row), u, a_.dim) : Vec(0.0f);
        }
        store_transposed(columns, s_.query + (head * layout_.units + u) * W, W);
      }
    }
  }

  // Adds the tile, whose first position is `key`, to the results. Spreads evenly over its work calls of
  // fetch(head, heads, begin, end), which prefetch these heads of keys begin to end of the next tile.
  void attend(const KeyRows& tile, int64_t key, const auto& fetch) {
    for (int64_t head = 0; head < kv_heads_; head += heads_) {
      const int64_t some = std::min(heads_, kv_heads_ - head);
      int64_t fetched = 0;
      const auto fetch_until = [&](int64_t end) {
        fetch(head, some, fetched, end);
        fetched = end;
      };
      score(tile, head, some, fetch_until);
      weigh(tile, head, some, key, fetch_until);
    }
  }

  // Writes the results as rows.
  void finish() {
    const __m512i order = _mm512_set_epi32(
        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(order, _mm512_set1_epi32(W / 2));
    for (int64_t head = 0; head < kv_heads_; ++head) {
      float* out = s_.out + (head / heads_ * W + head % heads_ * rows_) * layout_.dim;
      for (int64_t row = 0; row < rows_; ++row) {
        const float* even = sums(head) + row * pairs();
        for (int64_t i = 0; i < pairs(); i += W, out += 2 * W) {
          const __m512 a = _mm512_loadu_ps(even + i);
          const __m512 b = _mm512_loadu_ps(even + rows_ * pairs() + i);
          _mm512_storeu_ps(out, _mm512_permutex2var_ps(a, order, b));
          _mm512_storeu_ps(out + W, _mm512_permutex2var_ps(a, high, b));
        }
      }
    }
  }

 private:
  int64_t pairs() const {
    return layout_.dim / 2;
  }
  // [2 rows, pairs]: those of the even dimensions and of the odd ones.
  float* sums(int64_t head) const {
    return s_.columns + head * runs_ * kTileRows * pairs();
  }

  void score(const KeyRows& tile, int64_t head, int64_t some, const auto& fetch_until) {
    const KeyRuns runs = key_runs(a_, layout_, tile, a_.key_cache + head * a_.dim, s_.keys);
    const float* const query = s_.query + head * layout_.units * W;
    const auto columns = [&](int64_t k) { return query + k * kTileUnits * W; };
    for (int64_t j = 0; j < tile.count; j += 2 * kTileRows) {
      fetch_until((j + 2 * kTileRows) / 4);
      const char* const* keys = runs.keys + j / kTileRows;
      multiply_tiles<2, 1, false>(
          keys[0], keys[1], runs.row_bytes, columns, W, some * layout_.units / kTileUnits,
          s_.scores + j * W, W);
    }
  }

  // Turns the scores into weights, and adds the values with these.
  void weigh(
      const KeyRows& tile, int64_t head, int64_t some, int64_t key, const auto& fetch_until) {
    const __m512i own = _mm512_sub_epi32(
        _mm512_loadu_si512(own_), _mm512_set1_epi32(static_cast<int32_t>(key)));
    const int64_t place = head / heads_ * W;
    ColumnSoftmax<T, W> softmax(a_, s_.scores, tile.count, own, s_.maximum + place);
    // Rows of queries, with pairs of keys that are 16 apart.
    alignas(64) float weights[kHalves][W * W];
    for (int64_t half = 0; half < kHalves; ++half) {
      Vec pairs[W];
#pragma GCC unroll 16
      for (int64_t i = 0; i < W; ++i) {
        fetch_until(kKeys / 4 + half * W + i + 1);
        const Vec first = softmax.weight(half * 2 * W + i);
        pairs[i] = interleaved(first, softmax.weight(half * 2 * W + i + W));
      }
      store_transposed(pairs, weights[half], W);
    }
    alignas(64) float keep[W];
    const Vec factors = softmax.finish(s_.sum + place);
    factors.store(keep);
    const bool is_less = _mm512_cmp_ps_mask(factors, Vec(1.0f), _CMP_NEQ_UQ) != 0;
    for (int64_t h = 0; h < some; ++h) {
      fetch_until(kKeys - (some - 1 - h) * kKeys / 4 / some);
      if (is_less) {
        shrink(sums(head + h), keep + h * rows_);
      }
      split(weights[0] + h * rows_ * W);
      add_values(tile, head + h);
    }
  }

  void shrink(float* sums, const float* factors) {
    for (int64_t row = 0; row < 2 * rows_; ++row) {
      const Vec factor(factors[row % rows_]);
      for (int64_t i = row * pairs(); i < (row + 1) * pairs(); i += W) {
        (Vec::loadu(sums + i) * factor).store(sums + i);
      }
    }
  }

  // Writes each row of weights twice: with zeros for the second dimensions, and for the first ones.
  void split(const float* weights) {
    const __m512i first = _mm512_set1_epi32(0xffff);
    for (int64_t row = 0; row < rows_; ++row) {
      float* const even = s_.weights + row * kKeys;
      float* const odd = even + rows_ * kKeys;
      for (int64_t half = 0; half < kHalves; ++half) {
        const __m512i both = _mm512_loadu_si512(weights + half * W * W + row * W);
        const int64_t i = half * 2 * W;
        _mm512_storeu_si512(even + i, _mm512_and_si512(both, first));
        _mm512_storeu_si512(even + i + W, _mm512_srli_epi32(both, 16));
        _mm512_storeu_si512(odd + i, _mm512_slli_epi32(both, 16));
        _mm512_storeu_si512(odd + i + W, _mm512_andnot_si512(first, both));
      }
    }
  }

  void add_values(const KeyRows& tile, int64_t head) {
    const T* const values = a_.value_cache + head * a_.dim;
    // What is not there may be NaN, which weights of 0 do not remove.
    const bool in_place = layout_.in_place && tile.count == kKeys && tile.skipped == 0;
    if (!in_place) {
      copy_rows(tile, values, a_.dim, pairs(), s_.values);
    }
    const float* runs[kKeys / kTileRows];
    for (int64_t i = 0; i < kKeys / kTileRows; ++i) {
      runs[i] = in_place ? reinterpret_cast<const float*>(values + tile.rows[i * kTileRows])
                         : s_.values + i * kTileRows * pairs();
    }
    const int64_t stride = in_place ? a_.kv_heads * a_.dim / 2 : pairs();
    for (int64_t i = 0; i < pairs(); i += 2 * W) {
      const auto add = [&]<int RUNS, int COLUMNS>() {
        const char* const rows = reinterpret_cast<const char*>(s_.weights);
        multiply_tiles<RUNS, COLUMNS, true>(
            rows, rows + kTileRows * kKeys * 4, kKeys * 4, [&](int64_t k) { return runs[k] + i; },
            stride, (tile.count + kTileRows - 1) / kTileRows, sums(head) + i, pairs());
      };
      if (i + W < pairs()) {
        runs_ == 1 ? add.template operator()<1, 2>() : add.template operator()<2, 2>();
      } else {
        runs_ == 1 ? add.template operator()<1, 1>() : add.template operator()<2, 1>();
      }
    }
  }

  static constexpr int64_t kHalves = kKeys / (2 * W);

  const PagedAttention<T>& a_;
  const Layout<T>& layout_;
  const Scratch<T>& s_;
  int64_t rows_, runs_;         // queries of a KV head, and the tiles of rows that they are twice
  int64_t kv_heads_, heads_;    // those that share tiles of columns

  int32_t own_[W];
};

}  // namespace
}  // namespace trident
#endif
