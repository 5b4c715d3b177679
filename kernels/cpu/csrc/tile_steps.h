// Steps along the depth of a product on AMX, and their sums. For tile_block.h alone.
#pragma once

#include "tile_rows.h"

#ifdef TRIDENT_TILES

namespace trident {
namespace {

constexpr int64_t kStepBytes = 2 * kTileBytes;  // of a panel, for a tile along the depth
constexpr int64_t kStepLines = kStepBytes / 64;

// Memory to prefetch, some lines with each step.
struct Ahead {
  const char* next;
  int64_t lines_per_step;
};

// How a task reads: a panel once for one pair of groups, or slab by slab for several, which are read
// in place or packed.
enum class Reading { kOnce, kInPlace, kPacked };

template <int TILE, Reading READING>
inline void load_rows(const char* from, int64_t stride) {
  if constexpr (READING == Reading::kPacked) {
    stream_tile<TILE>(from, stride);
  } else {
    load_tile<TILE>(from, stride);
  }
}

// Adds to the tiles of sums one or two groups of rows times some steps of a panel, and calls
// meanwhile() with each step, while the unit multiplies.
template <typename Tiles, int GROUPS, Reading READING>
inline void multiply_steps(
    const char* first, const char* second, const Tiled& rows, const char* panel, int64_t steps,
    Ahead& ahead, const auto& meanwhile) {
  for (int64_t k = 0; k < steps; ++k, panel += kStepBytes) {
    load_tile<6>(panel, 2 * kTileRowBytes);
    load_rows<4, READING>(first + k * rows.tile_bytes, rows.row_stride);
    Tiles::template multiply<0, 4, 6>();
    if constexpr (GROUPS == 2) {
      load_rows<5, READING>(second + k * rows.tile_bytes, rows.row_stride);
      Tiles::template multiply<2, 5, 6>();
    }
    load_tile<7>(panel + kTileRowBytes, 2 * kTileRowBytes);
    Tiles::template multiply<1, 4, 7>();
    if constexpr (GROUPS == 2) {
      Tiles::template multiply<3, 5, 7>();
    }
    for (int64_t i = 0; i < ahead.lines_per_step; ++i, ahead.next += 64) {
      _mm_prefetch(ahead.next, READING == Reading::kOnce ? _MM_HINT_T0 : _MM_HINT_T1);
    }
    meanwhile();
  }
}

template <int GROUPS>
inline void zero_sums() {
  zero_tile<0>();
  zero_tile<1>();
  if constexpr (GROUPS == 2) {
    zero_tile<2>();
    zero_tile<3>();
  }
}

// Of one group of rows and a panel.
template <typename Sum>
struct alignas(64) TileSums {
  static constexpr int64_t kStride = kColumns * sizeof(Sum);

  Sum sums[kTileRows][kColumns];

  template <int LEFT>
  void load() const {
    load_tile<LEFT>(sums[0], kStride);
    load_tile<LEFT + 1>(sums[0] + W, kStride);
  }
  template <int LEFT>
  void store() {
    store_tile<LEFT>(sums[0], kStride);
    store_tile<LEFT + 1>(sums[0] + W, kStride);
  }
};

}  // namespace
}  // namespace trident
#endif
