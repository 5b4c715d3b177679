// The products of attention on AMX. For attention_worker.h alone.
#pragma once

#include "amx.h"

#ifdef TRIDENT_TILES
#include <cstdint>

#include "vector.h"

namespace trident {
namespace {

// For two runs of rows, or one, and two columns of tiles.
template <int RUNS, bool ADDS>
inline void multiply_runs(
    int64_t height, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
    float* c, int64_t ldc) {
  if constexpr (ADDS) {
    load_tile<0>(c, ldc * 4);
    load_tile<1>(c + W, ldc * 4);
  } else {
    zero_tile<0>();
    zero_tile<1>();
  }
  float* const below = c + height * ldc;
  if constexpr (RUNS == 2 && ADDS) {
    load_tile<2>(below, ldc * 4);
    load_tile<3>(below + W, ldc * 4);
  } else if constexpr (RUNS == 2) {
    zero_tile<2>();
    zero_tile<3>();
  }
  for (int64_t k = 0; k < depth; k += kTileUnits) {
    load_tile<6>(b + k * ldb, ldb * 4);
    load_tile<4>(a + k, lda * 4);
    BFloat16Tiles::multiply<0, 4, 6>();
    if constexpr (RUNS == 2) {
      load_tile<5>(a + height * lda + k, lda * 4);
      BFloat16Tiles::multiply<2, 5, 6>();
    }
    load_tile<7>(b + k * ldb + W, ldb * 4);
    BFloat16Tiles::multiply<1, 4, 7>();
    if constexpr (RUNS == 2) {
      BFloat16Tiles::multiply<3, 5, 7>();
    }
  }
  store_tile<0>(c, ldc * 4);
  store_tile<1>(c + W, ldc * 4);
  if constexpr (RUNS == 2) {
    store_tile<2>(below, ldc * 4);
    store_tile<3>(below + W, ldc * 4);
  }
}

// c [rows, columns] = a [rows, depth] b [depth, columns], or c += if ADDS. The tiles in use have
// tile_height(rows) rows, and so many more may be read and written as the last one has; columns are
// whole panels, and the depth whole tiles.
template <bool ADDS>
void multiply_on_tiles(
    int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb,
    int64_t depth, int64_t columns, float* c, int64_t ldc) {
  const int64_t height = tile_height(rows);
  int64_t row = 0;
  for (; row + height < rows; row += 2 * height) {
    for (int64_t n = 0; n < columns; n += kColumns) {
      multiply_runs<2, ADDS>(height, a + row * lda, lda, b + n, ldb, depth, c + row * ldc + n, ldc);
    }
  }
  if (row < rows) {
    for (int64_t n = 0; n < columns; n += kColumns) {
      multiply_runs<1, ADDS>(height, a + row * lda, lda, b + n, ldb, depth, c + row * ldc + n, ldc);
    }
  }
}

}  // namespace
}  // namespace trident
#endif
