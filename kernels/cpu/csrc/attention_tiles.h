// A tile of keys and its values on AMX, for many queries. For attention_groups.h and
// paged_attention.cpp alone.
//
// Many queries are columns: keys are the unit's first operand where they lie in the cache, and the
// softmax of a query runs down a lane of a register. So does the second product: values, transposed,
// times the weights, in pairs of keys as the softmax leaves them.
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
#include "kernels.h"

namespace trident {
namespace {

// c (+)= a b for one or two runs of 16 rows, and one or two of 16 columns. A step is 16 units deep,
// and b(step) is where its rows of b are.
template <int RUNS, int COLUMNS, bool ADDS>
inline void multiply_tiles(
    const char* first, const char* second, int64_t row_bytes, const auto& b, int64_t ldb,
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
  for (int64_t k = 0; k < steps; ++k) {
    const float* const right = b(k);
    load_tile<6>(right, ldb * 4);
    load_tile<4>(first + k * kTileRowBytes, row_bytes);
    BFloat16Tiles::multiply<0, 4, 6>();
    if constexpr (RUNS == 2) {
      load_tile<5>(second + k * kTileRowBytes, row_bytes);
      BFloat16Tiles::multiply<2, 5, 6>();
    }
    if constexpr (COLUMNS == 2) {
      load_tile<7>(right + W, ldb * 4);
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

struct KeyTile {
  KeyRuns runs;
  int64_t first, count;  // the first position, and the number of keys
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
    const auto query = [&](int64_t k) { return q.query + k * kTileUnits * q.places + column; };
    const auto weights = [&](int64_t k) { return weights_ + k * kTileUnits * kStride; };
    const int64_t query_steps = layout_.units / kTileUnits;
    int64_t run = 0;
    for (; run + kTileRows < tile.count; run += 2 * kTileRows) {
      const char* const* keys = tile.runs.keys + run / kTileRows;
      multiply_tiles<2, COLUMNS, false>(
          keys[0], keys[1], tile.runs.row_bytes, query, q.places, query_steps, scores_ + run * kStride,
          kStride);
    }
    if (run < tile.count) {
      const char* keys = tile.runs.keys[run / kTileRows];
      multiply_tiles<1, COLUMNS, false>(
          keys, keys, tile.runs.row_bytes, query, q.places, query_steps, scores_ + run * kStride,
          kStride);
    }
    for (int64_t v = 0; v < COLUMNS; ++v) {
      weigh(q, tile, column + v * W, scores_ + v * W, weights_ + v * W);
    }
    for (int64_t i = 0; i < layout_.dim; i += 2 * kTileRows) {
      const float* values = values_ + i * kPairs;
      multiply_tiles<2, COLUMNS, true>(
          reinterpret_cast<const char*>(values),
          reinterpret_cast<const char*>(values + kTileRows * kPairs), kPairs * 4, weights, kStride,
          steps(tile.count), q.out + i * q.places + column, q.places);
    }
  }

  // Turns the scores of 16 columns into weights, in pairs of keys.
  void weigh(
      const QueryColumns& q, const KeyTile& tile, int64_t column, float* scores, float* weights) {
    constexpr int64_t kStride = 2 * W;
    int32_t own[W];
    for (int64_t i = 0; i < W; ++i) {
      own[i] = static_cast<int32_t>(q.position_of(column + i, layout_.group) - tile.first);
    }
    ColumnSoftmax<T, kStride> softmax(
        a_, scores, tile.count, _mm512_loadu_si512(own), q.maximum + column);
    for (int64_t j = 0; j < round_up(tile.count, 2 * W); j += 2) {
      const Vec first = softmax.weight(j);
      interleaved(first, softmax.weight(j + 1)).store(weights + j / 2 * kStride);
    }
    const Vec keep = softmax.finish(q.sum + column);
    if (_mm512_cmp_ps_mask(keep, Vec(1.0f), _CMP_NEQ_UQ) != 0) {
      for (int64_t i = 0; i < a_.dim; ++i) {
        float* out = q.out + i * q.places + column;
        (Vec::loadu(out) * keep).store(out);
      }
    }
  }

  const PagedAttention<T>& a_;
  const Layout<T>& layout_;
  float *values_, *scores_, *weights_;
};

}  // namespace
}  // namespace trident
#endif
