// A task of a product with packed weights on AMX: some groups of rows times one panel. For
// linear_products.h and experts.cpp alone.
//
// A panel is as the unit wants its second operand: 16 units of it are two tiles, side by side. Two
// groups of rows times these two tiles keep four tiles of sums busy. The rows of a task pass one
// slab of the panel after the other, so that the slab stays in the L1 cache; a sum still runs over
// the depth in order, and depends on its own row alone. From one row on this is no slower than the
// products of vectors: for few rows both wait for memory.
#pragma once

#include "tile_panels.h"
#include "tile_steps.h"

#ifdef TRIDENT_TILES
#include <optional>

namespace trident {
namespace {

constexpr int64_t kManyPairs = 8;  // of groups of rows
constexpr int64_t kTaskBytes = 1 << 20;  // of a task's rows, which stay in the L2 cache
// Each part of a weight that comes into the cache is multiplied with at least so many groups of
// rows: of rows too deep for that, a task takes one chunk of their depth after the other, and
// multiplies each with several panels.
constexpr int64_t kEnoughGroups = 16, kChunkGroups = 32, kChunkPanels = 8;
// What is prefetched lies so far ahead: where rows pass a slab once, into the L1 cache.
constexpr int64_t kNear = 4 * kStepBytes, kFar = 16 * kStepBytes;

// How the product of all groups of rows is divided: the most groups, panels and steps at a time of
// a task.
struct TileTasks {
  TileTasks(const Tiled& rows, int64_t all)
      : groups(std::max<int64_t>(2, all + all % 2)), panels(1), steps(rows.steps) {
    const int64_t step_bytes = rows.height * kTileRowBytes;
    const int64_t whole = kTaskBytes / std::max<int64_t>(1, steps * step_bytes);
    if (whole >= std::min(groups, kEnoughGroups)) {
      groups = std::min(groups, whole / 2 * 2);
    } else {
      groups = std::min(groups, kChunkGroups);
      steps = std::max<int64_t>(1, kTaskBytes / (groups * step_bytes));
      panels = kChunkPanels;
    }
  }

  int64_t groups, panels, steps;
};

// One thread's tasks of a product. Results are made of complete sums while others are summed, in the
// next task too, and of the last ones when the worker ends.
template <typename Rows, typename Panels, typename Groups, typename Finish>
class TileWorker {
 public:
  TileWorker(const auto& a, const Rows& rows, const Groups& groups, const TileTasks& tasks)
      : rows_(rows),
        panels_(a, rows),
        groups_(groups),
        tasks_(tasks),
        use_(rows.height),
        sums_(std::make_unique_for_overwrite<Sums[]>((tasks.panels + 1) * tasks.groups)),
        rest_(std::make_unique<Rest[]>(tasks.panels)) {}

  ~TileWorker() {
    finish_rows(complete_.rows);
  }
  TileWorker(const TileWorker&) = delete;
  TileWorker& operator=(const TileWorker&) = delete;

  // Multiplies the groups from begin to end with adjacent panels, and prefetches what follows in
  // memory, evenly over the time that this takes.
  void run(
      int64_t begin, int64_t end, int64_t first_panel, int64_t end_panel, const Finish& finish) {
    const int64_t steps = rows_.units / kTileUnits, rest = rows_.units % kTileUnits;
    const int64_t panels = end_panel - first_panel, pairs = (end - begin + 1) / 2;
    for (int64_t panel = 0; panel < panels && rest > 0; ++panel) {
      const char* const from = panels_.steps(first_panel + panel, steps, steps);
      std::memcpy(rest_[panel].units, from, rest * kColumns * 4);
    }
    // One pair passes a panel at once, and its sums stay in tiles.
    const bool at_once = pairs == 1 && Panels::kAreInPlace;
    const int64_t chunks = at_once ? 1 : std::max<int64_t>(1, (steps - 1) / tasks_.steps + 1);
    const int64_t most = pairs < kManyPairs || rows_.is_in_place() ? kSlabSteps : kLongSlabSteps;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t from = chunk * steps / chunks, to = (chunk + 1) * steps / chunks;
      const int64_t slabs = at_once ? 1 : std::max<int64_t>(1, (to - from - 1) / most + 1);
      const int64_t time = pairs < kManyPairs ? to - from : (to - from) / slabs;
      rows_per_step_ = (2 * kTileRows - 1) / std::max<int64_t>(1, time) + 1;
      for (int64_t panel = 0; panel < panels; ++panel) {
        Sums* const sums = sums_of(panel);
        for (int64_t i = 0; i < slabs; ++i) {
          Slab slab{from + i * (to - from) / slabs, from + (i + 1) * (to - from) / slabs};
          slab.weights = panels_.steps(first_panel + panel, slab.begin, slab.end);
          slab.rest = slab.end == steps && rest > 0 ? rest_[panel].units : nullptr;
          Ahead ahead{
              slab.weights + (at_once ? kNear : kFar),
              Panels::kAreInPlace ? (kStepLines + pairs - 1) / pairs : 0};
          for (int64_t group = begin; group < end; group += 2) {
            Sums* const pair = sums + group - begin;
            if (at_once) {
              multiply_pair<Reading::kOnce>(slab, group, end, pair, ahead);
            } else if (rows_.is_in_place()) {
              multiply_pair<Reading::kInPlace>(slab, group, end, pair, ahead);
            } else {
              multiply_pair<Reading::kPacked>(slab, group, end, pair, ahead);
            }
            if (slab.end == steps) {
              const int64_t row = groups_.begin(group);
              if (group == begin) {
                finish_rows(complete_.rows);
                complete_ = {pair, group, 0, row, 0, first_panel + panel};
                finish_.emplace(finish);
              }
              complete_.rows += groups_.begin(std::min(group + 2, end)) - row;
            }
          }
        }
      }
    }
    turn_ = (turn_ + panels) % (tasks_.panels + 1);
  }

 private:
  using Tiles = typename Rows::Tiles;
  using Sums = TileSums<typename Tiles::Sum>;

  struct alignas(64) Rest {
    char units[kStepBytes];  // the last ones of a panel, and zeros
  };
  struct Slab {
    int64_t begin, end;  // steps
    const char* weights = nullptr;
    const char* rest = nullptr;  // of the panel, if it follows
  };
  // Sums of a panel that are complete, without those that have been used.
  struct Complete {
    const Sums* sums;  // of the group
    int64_t group, next;  // row of the group
    int64_t row, rows, panel;
  };

  // The sums of the panel before are not those of any panel of this task.
  Sums* sums_of(int64_t panel) const {
    return sums_.get() + (turn_ + panel) % (tasks_.panels + 1) * tasks_.groups;
  }

  template <Reading READING>
  void multiply_pair(
      const Slab& slab, int64_t group, int64_t end, Sums* sums, Ahead& ahead) {
    if (end - group > 1) {
      multiply<2, READING>(slab, group, sums, ahead);
    } else {
      multiply<1, READING>(slab, group, sums, ahead);
    }
  }

  template <int GROUPS, Reading READING>
  void multiply(const Slab& slab, int64_t group, Sums* sums, Ahead& ahead) {
    if (slab.begin == 0) {
      zero_sums<GROUPS>();
    } else {
      sums[0].template load<0>();
      if constexpr (GROUPS == 2) {
        sums[1].template load<2>();
      }
    }
    const char* first = rows_.group(groups_, group) + slab.begin * rows_.tile_bytes;
    const char* second = first;
    if constexpr (GROUPS == 2) {
      second = rows_.group(groups_, group + 1) + slab.begin * rows_.tile_bytes;
    }
    const int64_t steps = slab.end - slab.begin;
    const auto meanwhile = [&] { finish_rows(rows_per_step_); };
    multiply_steps<Tiles, GROUPS, READING>(
        first, second, rows_, slab.weights, steps, ahead, meanwhile);
    if (slab.rest != nullptr) {
      const int64_t bytes = steps * rows_.tile_bytes;
      multiply_steps<Tiles, GROUPS, READING>(
          first + bytes, second + bytes, rows_, slab.rest, 1, ahead, meanwhile);
    }
    sums[0].template store<0>();
    if constexpr (GROUPS == 2) {
      sums[1].template store<2>();
    }
  }

  // Makes results of so many rows of complete sums, or of all there are.
  void finish_rows(int64_t most) {
    for (Complete& c = complete_; most > 0 && c.rows > 0; --most, --c.rows) {
      if (c.next == groups_.size(c.group)) {
        ++c.group;
        ++c.sums;
        c.next = 0;
      }
      const auto* sums = c.sums->sums[c.next++];
      const int64_t row = c.row++, column = c.panel * kColumns;
      (*finish_)(
          row, c.panel, rows_.value(row, column, vector(sums)),
          rows_.value(row, column + W, vector(sums + W)));
    }
  }
  static Vec vector(const float* from) {
    return Vec::loadu(from);
  }
  static Ints vector(const int32_t* from) {
    return Ints::loadu(from);
  }

  const Rows& rows_;
  const Panels panels_;
  const Groups& groups_;
  const TileTasks& tasks_;
  TilesInUse use_;
  std::unique_ptr<Sums[]> sums_;  // of each group, of a task's panels and the panel before
  std::unique_ptr<Rest[]> rest_;
  int64_t turn_ = 0;  // where the next task's sums begin, in panels
  Complete complete_{};
  std::optional<Finish> finish_;  // of `complete_`
  int64_t rows_per_step_ = 1;
};

}  // namespace
}  // namespace trident
#endif
