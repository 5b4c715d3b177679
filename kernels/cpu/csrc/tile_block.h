// A task of a product with packed weights on AMX: some groups of rows times one panel. For
// linear.cpp and experts.cpp alone.
//
// A panel is as the unit wants its second operand: 16 units of it are two tiles, side by side. Two
// groups of rows times these two tiles keep four tiles of sums busy. The rows of a task pass one
// slab of the panel after the other, so that the slab stays in the L1 cache; a sum still runs over
// the depth in order, and depends on its own row alone. From one row on this is no slower than the
// products of vectors: for few rows both wait for memory.
#pragma once

#include "tile_rows.h"

#ifdef TRIDENT_TILES

namespace trident {
namespace {

constexpr int64_t kStepBytes = 2 * kTileBytes;  // of a panel, for a tile along the depth
constexpr int64_t kStepLines = kStepBytes / 64;
constexpr int64_t kSlabSteps = 8;  // half of the cache: rows and sums pass through the other
constexpr int64_t kTaskBytes = 1 << 20;  // of a task's rows, which stay in the L2 cache
constexpr int64_t kChunkSteps = 128;     // of deep rows, so that a task has enough of them
constexpr int64_t kChunkPanels = 8;      // that each chunk of the rows is multiplied with
// What is prefetched lies so far ahead: where rows pass a slab once, into the L1 cache.
constexpr int64_t kNear = 4 * kStepBytes, kFar = 16 * kStepBytes;

// Memory to prefetch, some lines with each step.
struct Ahead {
  const char* next;
  int64_t lines_per_step;
};

// Adds to the tiles of sums one or two groups of rows times some steps of a panel.
template <typename Tiles, int GROUPS, bool NEAR>
inline void multiply_steps(
    const char* first, const char* second, const Tiled& rows, const char* panel, int64_t steps,
    Ahead& ahead) {
  for (int64_t k = 0; k < steps; ++k, panel += kStepBytes) {
    load_tile<6>(panel, 2 * kTileRowBytes);
    load_tile<4>(first + k * rows.tile_bytes, rows.row_stride);
    Tiles::template multiply<0, 4, 6>();
    if constexpr (GROUPS == 2) {
      load_tile<5>(second + k * rows.tile_bytes, rows.row_stride);
      Tiles::template multiply<2, 5, 6>();
    }
    load_tile<7>(panel + kTileRowBytes, 2 * kTileRowBytes);
    Tiles::template multiply<1, 4, 7>();
    if constexpr (GROUPS == 2) {
      Tiles::template multiply<3, 5, 7>();
    }
    for (int64_t i = 0; i < ahead.lines_per_step; ++i, ahead.next += 64) {
      _mm_prefetch(ahead.next, NEAR ? _MM_HINT_T0 : _MM_HINT_T1);
    }
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

// How the product of all groups of rows is divided: the most groups, panels and steps at a time of
// a task.
struct TileTasks {
  TileTasks(const Tiled& rows, int64_t all)
      : groups(std::max<int64_t>(2, all + all % 2)), panels(1), steps(rows.steps) {
    const int64_t step_bytes = rows.height * kTileRowBytes;
    if (all * steps * step_bytes > kTaskBytes) {
      steps = std::min(steps, kChunkSteps);
      const int64_t chunk = steps * step_bytes;
      groups = std::min(groups, std::max<int64_t>(2, kTaskBytes / chunk / 2 * 2));
      panels = rows.steps > kChunkSteps ? kChunkPanels : 1;
    }
  }

  int64_t groups, panels, steps;
};

// One thread's tasks of a product.
template <typename Rows>
class TileWorker {
 public:
  TileWorker(const Rows& rows, const TileTasks& tasks)
      : rows_(rows),
        tasks_(tasks),
        use_(rows.height),
        sums_(std::make_unique_for_overwrite<Sums[]>(tasks.groups * tasks.panels + 2)),
        rest_(std::make_unique<Rest[]>(tasks.panels)) {}

  // Multiplies the groups from begin to end with adjacent panels of `weight`, and prefetches what
  // follows in memory, evenly over the time that this takes.
  void run(
      const auto& groups, int64_t begin, int64_t end, const void* weight, int64_t first_panel,
      int64_t end_panel, const auto& finish) {
    const int64_t panel_bytes = rows_.units * kColumns * 4, steps = rows_.units / kTileUnits;
    const char* const first = static_cast<const char*>(weight) + first_panel * panel_bytes;
    const int64_t panels = end_panel - first_panel, pairs = (end - begin + 1) / 2;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t whole = steps * kStepBytes;
      std::memcpy(rest_[panel].units, first + panel * panel_bytes + whole, panel_bytes - whole);
    }
    // The sums of one pair stay in tiles.
    const int64_t chunks = pairs == 1 ? 1 : std::max<int64_t>(1, (steps - 1) / tasks_.steps + 1);
    Pair before{};  // whose sums are complete
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t from = chunk * steps / chunks, to = (chunk + 1) * steps / chunks;
      const int64_t slabs = pairs == 1 ? 1 : std::max<int64_t>(1, (to - from - 1) / kSlabSteps + 1);
      for (int64_t panel = 0; panel < panels; ++panel) {
        const char* const weights = first + panel * panel_bytes;
        for (int64_t i = 0; i < slabs; ++i) {
          Slab slab{weights, from + i * (to - from) / slabs, from + (i + 1) * (to - from) / slabs};
          slab.is_first = slab.begin == 0;
          slab.is_last = slab.end == steps;
          Ahead ahead{
              weights + slab.begin * kStepBytes + (pairs == 1 ? kNear : kFar),
              (kStepLines + pairs - 1) / pairs};
          for (int64_t group = begin; group < end; group += 2) {
            Sums* const sums = sums_.get() + panel * tasks_.groups + group - begin;
            const Pair pair{sums, panel, group, std::min<int64_t>(2, end - group)};
            if (pair.count == 2) {
              pairs == 1 ? multiply<2, true>(groups, slab, pair, ahead)
                         : multiply<2, false>(groups, slab, pair, ahead);
            } else {
              pairs == 1 ? multiply<1, true>(groups, slab, pair, ahead)
                         : multiply<1, false>(groups, slab, pair, ahead);
            }
            // One pair later, while the unit multiplies.
            finish_pair(groups, before, first_panel, finish);
            before = slab.is_last ? pair : Pair{};
          }
        }
      }
    }
    finish_pair(groups, before, first_panel, finish);
  }

 private:
  using Tiles = typename Rows::Tiles;
  using Sums = TileSums<typename Tiles::Sum>;

  struct alignas(64) Rest {
    char units[kStepBytes];  // the last ones of a panel, and zeros
  };
  struct Slab {
    const char* panel;
    int64_t begin, end;  // steps
    bool is_first, is_last;
  };
  struct Pair {
    Sums* sums;
    int64_t panel, group, count;
  };

  template <int GROUPS, bool NEAR>
  void multiply(const auto& groups, const Slab& slab, const Pair& pair, Ahead& ahead) {
    if (slab.is_first) {
      zero_sums<GROUPS>();
    } else {
      pair.sums[0].template load<0>();
      if constexpr (GROUPS == 2) {
        pair.sums[1].template load<2>();
      }
    }
    const char* first = rows_.group(groups, pair.group) + slab.begin * rows_.tile_bytes;
    const char* second = first;
    if constexpr (GROUPS == 2) {
      second = rows_.group(groups, pair.group + 1) + slab.begin * rows_.tile_bytes;
    }
    const int64_t steps = slab.end - slab.begin;
    multiply_steps<Tiles, GROUPS, NEAR>(
        first, second, rows_, slab.panel + slab.begin * kStepBytes, steps, ahead);
    if (slab.is_last && rows_.units % kTileUnits != 0) {
      const int64_t bytes = steps * rows_.tile_bytes;
      multiply_steps<Tiles, GROUPS, NEAR>(
          first + bytes, second + bytes, rows_, rest_[pair.panel].units, 1, ahead);
    }
    pair.sums[0].template store<0>();
    if constexpr (GROUPS == 2) {
      pair.sums[1].template store<2>();
    }
  }

  void finish_pair(
      const auto& groups, const Pair& pair, int64_t first_panel, const auto& finish) const {
    const int64_t panel = first_panel + pair.panel;
    for (int64_t i = 0; i < pair.count; ++i) {
      const int64_t row = groups.begin(pair.group + i), size = groups.size(pair.group + i);
      for (int64_t r = 0; r < size; ++r) {
        const auto* sums = pair.sums[i].sums[r];
        finish(
            row + r, panel, rows_.value(row + r, panel * kColumns, vector(sums)),
            rows_.value(row + r, panel * kColumns + W, vector(sums + W)));
      }
    }
  }
  static Vec vector(const float* from) {
    return Vec::loadu(from);
  }
  static Ints vector(const int32_t* from) {
    return Ints::loadu(from);
  }

  const Rows& rows_;
  const TileTasks& tasks_;
  TilesInUse use_;
  std::unique_ptr<Sums[]> sums_;  // of each panel and group
  std::unique_ptr<Rest[]> rest_;
};

}  // namespace
}  // namespace trident
#endif
