// A tile of keys and its values on AMX. For attention_rows.h and attention_worker.h alone.
//
// Many queries are columns: keys are the unit's first operand where they lie in the cache, and the
// softmax of a query runs down a lane of a register. So does the second product: values, transposed,
// times the weights, in pairs of keys as the softmax leaves them.
#pragma once

#include "amx.h"

#ifdef TRIDENT_TILES
#include <algorithm>
#include <cstdint>

#include "attention_packing.h"
#include "attention_scratch.h"
#include "attention_tasks.h"
#include "exponential.h"
#include "kernels.h"

namespace trident {
namespace {

// c (+)= a b for one or two runs of 16 rows, and one or two of 16 columns. A step is 16 units deep.
template <int RUNS, int COLUMNS, bool ADDS>
inline void multiply_tiles(
    const char* first, const char* second, int64_t row_bytes, const float* b, int64_t ldb,
    int64_t steps, float* c, int64_t ldc) {
  float* const below = c + kTileRows * ldc;
  if constexpr (ADDS) {
    load_tile<0>(c, ldc * 4);
    if constexpr (COLUMNS == 2) {
      load_tile<1>(c + W, ldc * 4);
    }
    if constexpr (RUNS == 2) {
      load_tile<2>(below, ldc * 4);
    }
    if constexpr (RUNS == 2 && COLUMNS == 2) {
      load_tile<3>(below + W, ldc * 4);
    }
  } else {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
  }
  for (int64_t k = 0; k < steps; ++k, b += kTileUnits * ldb) {
    load_tile<6>(b, ldb * 4);
    load_tile<4>(first + k * kTileRowBytes, row_bytes);
    BFloat16Tiles::multiply<0, 4, 6>();
    if constexpr (RUNS == 2) {
      load_tile<5>(second + k * kTileRowBytes, row_bytes);
      BFloat16Tiles::multiply<2, 5, 6>();
    }
    if constexpr (COLUMNS == 2) {
      load_tile<7>(b + W, ldb * 4);
      BFloat16Tiles::multiply<1, 4, 7>();
      if constexpr (RUNS == 2) {
        BFloat16Tiles::multiply<3, 5, 7>();
      }
    }
  }
  store_tile<0>(c, ldc * 4);
  if constexpr (COLUMNS == 2) {
    store_tile<1>(c + W, ldc * 4);
  }
  if constexpr (RUNS == 2) {
    store_tile<2>(below, ldc * 4);
  }
  if constexpr (RUNS == 2 && COLUMNS == 2) {
    store_tile<3>(below + W, ldc * 4);
  }
}

// c (+)= a b, for a tile of rows: a [16, depth], b [depth, columns]. Columns are whole panels, and the
// depth whole tiles.
template <bool ADDS>
void multiply_rows_on_tiles(
    const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, int64_t columns,
    float* c, int64_t ldc) {
  const char* rows = reinterpret_cast<const char*>(a);
  for (int64_t n = 0; n < columns; n += 2 * W) {
    multiply_tiles<1, 2, ADDS>(rows, rows, lda * 4, b + n, ldb, depth / kTileUnits, c + n, ldc);
  }
}

// The queries of one KV head of a task: columns, padded to whole tiles.
struct QueryColumns {
  float* query;   // [units, places]
  float* out;     // [dim, places], sums of values
  float* maximum;  // [places]
  float* sum;     // [places]
  int64_t rows, places;
  int64_t position;  // of the first query

  int64_t position_of(int64_t row, int64_t group) const {
    return position + std::min(row, rows - 1) / group;
  }
};

// Where the keys of a tile are, 16 by 16, and how many there are from position `first` on.
struct KeyTile {
  const char* keys[kKeys / kTileRows];
  int64_t row_bytes, first, count;
};

template <typename T>
class TileAttention {
 public:
  TileAttention(const PagedAttention<T>& a, const Layout<T>& layout, const Scratch<T>& s)
      : a_(a), layout_(layout), values_(s.values), scores_(s.scores), weights_(s.scores + kBlock) {}

  // Writes the values of a head, those of key j at value(j), in pairs of keys, transposed; zeros for
  // keys that there are not. With each pair, calls fetch(j).
  void pack_values(int64_t count, const auto& value, const auto& fetch) {
    for (int64_t step = 0; step < steps(count); ++step) {
      for (int64_t i = 0; i < a_.dim; i += 2 * W) {
        Vec left[W], right[W];
        for (int64_t pair = 0; pair < W; ++pair) {
          const int64_t j = 2 * (step * W + pair);
          left[pair] = right[pair] = Vec(0.0f);
          if (j < count) {
            const T* second = j + 1 < count ? value(j + 1) : nullptr;
            pair_units(value(j), second, i, a_.dim, left[pair], right[pair]);
            if (i == 0) {
              fetch(j);
            }
          }
        }
        float* const to = values_ + i * kPairs + step * W;
        store_transposed(left, to, kPairs);
        store_transposed(right, to + W * kPairs, kPairs);
      }
    }
  }

  // Adds the tile, whose values are packed, to the results.
  void attend(const QueryColumns& q, const KeyTile& tile) {
    for (int64_t column = 0; column < q.places; column += 2 * W) {
      const bool is_seen = q.position_of(column + 2 * W - 1, layout_.group) >= tile.first;
      if (!is_seen) {
        continue;
      }
      if (column + W < q.places) {
        attend_some<2>(q, tile, column);
      } else {
        attend_some<1>(q, tile, column);
      }
    }
  }

 private:
  static constexpr int64_t kPairs = kKeys / 2;
  static constexpr int64_t kBlock = kKeys * 2 * W;  // scores of two vectors of columns

  static int64_t steps(int64_t count) {
    return (count + 2 * W - 1) / (2 * W);
  }

  template <int COLUMNS>
  void attend_some(const QueryColumns& q, const KeyTile& tile, int64_t column) {
    constexpr int64_t kStride = 2 * W;
    const float* query = q.query + column;
    const int64_t query_steps = layout_.units / kTileUnits;
    int64_t run = 0;
    for (; run + kTileRows < tile.count; run += 2 * kTileRows) {
      const char* const* keys = tile.keys + run / kTileRows;
      multiply_tiles<2, COLUMNS, false>(
          keys[0], keys[1], tile.row_bytes, query, q.places, query_steps, scores_ + run * kStride,
          kStride);
    }
    if (run < tile.count) {
      const char* keys = tile.keys[run / kTileRows];
      multiply_tiles<1, COLUMNS, false>(
          keys, keys, tile.row_bytes, query, q.places, query_steps, scores_ + run * kStride,
          kStride);
    }
    for (int64_t v = 0; v < COLUMNS; ++v) {
      weigh(q, tile, column + v * W, scores_ + v * W, weights_ + v * W);
    }
    for (int64_t i = 0; i < layout_.dim; i += 2 * kTileRows) {
      const float* values = values_ + i * kPairs;
      multiply_tiles<2, COLUMNS, true>(
          reinterpret_cast<const char*>(values),
          reinterpret_cast<const char*>(values + kTileRows * kPairs), kPairs * 4, weights_, kStride,
          steps(tile.count), q.out + i * q.places + column, q.places);
    }
  }

  // Turns the scores of 16 columns into weights, in pairs of keys.
  void weigh(
      const QueryColumns& q, const KeyTile& tile, int64_t column, float* scores, float* weights) {
    constexpr int64_t kStride = 2 * W;
    const bool is_limited = limit(q, tile, column, scores);
    const Vec scale(is_limited ? 1.0f : a_.scale);
    const Vec before = Vec::loadu(q.maximum + column);
    Vec most[4] = {Vec(kNothing), Vec(kNothing), Vec(kNothing), Vec(kNothing)};
    int64_t j = 0;
    for (; j + 4 <= tile.count; j += 4) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; ++i) {
        most[i] = _mm512_max_ps(Vec::loadu(scores + (j + i) * kStride), most[i]);
      }
    }
    for (; j < tile.count; ++j) {
      most[0] = _mm512_max_ps(Vec::loadu(scores + j * kStride), most[0]);
    }
    const Vec largest = _mm512_max_ps(
        Vec(_mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]))) * scale,
        before);
    // What has seen no key yet has no maximum.
    const __mmask16 none = _mm512_cmp_ps_mask(largest, Vec(kNothing), _CMP_EQ_OQ);
    const Vec shift = _mm512_mask_mov_ps(largest, none, Vec(0.0f));
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
        19, 3, 18, 2, 17, 1, 16, 0);
    Vec sum(0.0f);
    const auto weight = [&](int64_t k) {
      return exponential<T>(Vec(_mm512_fmsub_ps(Vec::loadu(scores + k * kStride), scale, shift)));
    };
    const auto put = [&](int64_t k, Vec first, Vec second) {
      sum = sum + (first + second);
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
      _mm512_storeu_si512(weights + k / 2 * kStride, _mm512_permutexvar_epi16(order, both));
    };
    for (j = 0; j + 2 <= tile.count; j += 2) {
      put(j, weight(j), weight(j + 1));
    }
    for (; j < round_up(tile.count, 2 * W); j += 2) {
      put(j, j < tile.count ? weight(j) : Vec(0.0f), Vec(0.0f));
    }
    const Vec keep = (before - shift).exp();
    (Vec::loadu(q.sum + column) * keep + sum).store(q.sum + column);
    largest.store(q.maximum + column);
    if (_mm512_cmp_ps_mask(keep, Vec(1.0f), _CMP_NEQ_UQ) != 0) {
      for (int64_t i = 0; i < a_.dim; ++i) {
        float* out = q.out + i * q.places + column;
        (Vec::loadu(out) * keep).store(out);
      }
    }
  }

  // Scales and caps the scores of 16 columns, where there is a cap or a key that a query does not see,
  // whose score becomes -inf; returns whether it did.
  bool limit(const QueryColumns& q, const KeyTile& tile, int64_t column, float* scores) {
    constexpr int64_t kStride = 2 * W;
    const Vec scale(a_.scale);
    int32_t own[W];
    for (int64_t i = 0; i < W; ++i) {
      own[i] = static_cast<int32_t>(q.position_of(column + i, layout_.group) - tile.first);
    }
    const bool is_whole =
        own[0] + 1 >= tile.count && (a_.window == 0 || own[W - 1] - a_.window + 1 <= 0);
    if (is_whole && a_.soft_cap == 0 && a_.scale > 0) {
      return false;
    }
    const __m512i last = _mm512_loadu_si512(own);
    const int64_t window = a_.window == 0 ? kNoWindow : a_.window;
    const __m512i before = _mm512_sub_epi32(last, _mm512_set1_epi32(static_cast<int32_t>(window)));
    for (int64_t j = 0; j < tile.count; ++j) {
      Vec score = Vec::loadu(scores + j * kStride) * scale;
      if (a_.soft_cap > 0) {
        const Vec cap(a_.soft_cap);
        score = (score / cap).tanh() * cap;
      }
      if (!is_whole) {
        const __m512i key = _mm512_set1_epi32(static_cast<int32_t>(j));
        const __mmask16 seen =
            _mm512_cmple_epi32_mask(key, last) & _mm512_cmpgt_epi32_mask(key, before);
        score = _mm512_mask_mov_ps(Vec(kNothing), seen, score);
      }
      score.store(scores + j * kStride);
    }
    return true;
  }

  static constexpr int64_t kNoWindow = 1 << 30;

  const PagedAttention<T>& a_;
  const Layout<T>& layout_;
  float *values_, *scores_, *weights_;
};

}  // namespace
}  // namespace trident
#endif
