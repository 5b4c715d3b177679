// Matrix products with packed weights, in floating point, int8, or integers scaled in groups: with
// vectors, or with AMX where it is and multiplies what is asked.
//
// A panel is a block of output channels, stored in the order in which it is read: unit by unit
// along the depth, each unit for all channels of the panel. Rows are packed the same way, in groups
// of as many as fit into registers. A task multiplies one panel with some groups, and prefetches
// the next panel into the cache. A sum runs over the whole depth in order, whatever the other rows,
// the groups and the threads are.
//
// For linear_*.cpp alone: a file per dtype, so that they are compiled at once.
#pragma once

#include <algorithm>

#include "activation.h"
#include "linear.h"
#include "linear_block.h"
#include "linear_rows.h"
#include "scaled_tiles.h"
#include "shares.h"
#include "tile_block.h"

namespace trident {
namespace {

// Epilogue: adds the bias and stores the results of a row and a panel.
template <typename In, typename Out>
class Plain {
 public:
  explicit Plain(const Linear<In, Out>& a) : a_(a) {}

  void operator()(int64_t row, int64_t panel, Vec left, Vec right) const {
    Out* out = a_.out + row * a_.out_features;
    store_panel(out, a_.bias, a_.out_features, panel * kColumns, left, right);
  }

 private:
  const Linear<In, Out>& a_;
};

// Epilogue: the first half of a panel are gates, the second half the values they multiply.
template <typename T, Activation kind>
class Gated {
 public:
  explicit Gated(const Linear<T, T>& a) : a_(a) {}

  void operator()(int64_t row, int64_t panel, Vec gate, Vec up) const {
    if (a_.bias != nullptr) {
      gate = gate + widen(a_.bias + panel * kColumns);
      up = up + widen(a_.bias + panel * kColumns + W);
    }
    store(a_.out + (row * a_.out_features + panel * kColumns) / 2, activate<kind, T>(gate) * up);
  }

 private:
  const Linear<T, T>& a_;
};

template <typename Rows, typename Finish>
void run_panels(const auto& a, const Finish& finish) {
  const Groups groups(a.rows, kMostRows);
  const Rows rows(a, groups);
  const int64_t panels = (a.out_features + kColumns - 1) / kColumns;
  const int64_t most = most_groups(rows);
  const int64_t blocks = (groups.count + most - 1) / most;
  const auto multiply = [&](int64_t task) {
    const int64_t block = task / panels, panel = task % panels;
    const int64_t begin = block * groups.count / blocks;
    const int64_t end = (block + 1) * groups.count / blocks;
    multiply_block(rows, groups, begin, end, a.weight, panel, panel + 1 == panels, finish);
  };
  share_out(blocks * panels, [&] { return multiply; });
}

#ifdef TRIDENT_TILES
template <typename Rows, typename Panels = StoredPanels, typename Finish>
void run_tiles(const auto& a, const Finish& finish) {
  const Groups groups(a.rows, kTileRows);
  const Rows rows(a, groups);
  const int64_t panels = (a.out_features + kColumns - 1) / kColumns;
  const TileTasks most(rows, groups.count);
  const int64_t blocks = (groups.count + most.groups - 1) / most.groups;
  const int64_t runs = (panels + most.panels - 1) / most.panels;
  share_out(blocks * runs, [&] {
    return [&, worker = TileWorker<Rows, Panels, Groups, Finish>(a, rows, groups, most)](
               int64_t task) mutable {
      const int64_t block = task / runs, run = task % runs;
      worker.run(
          block * groups.count / blocks, (block + 1) * groups.count / blocks,
          run * panels / runs, (run + 1) * panels / runs, finish);
    };
  });
}

template <typename Product, bool HAS_OFFSET, typename Finish>
void run_scaled_tiles(const auto& a, const Finish& finish) {
  const Groups groups(a.rows, kScaledTileRows);
  const ScaledTileRows<Product, HAS_OFFSET> rows(a, groups);
  const int64_t panels = (a.out_features + kColumns - 1) / kColumns;
  const int64_t most = std::max<int64_t>(1, kTaskBytes / (a.in_features * kScaledTileRows));
  const int64_t blocks = (groups.count + most - 1) / most;
  share_out(blocks * panels, [&] {
    return [&, worker = ScaledTileWorker(rows, groups, most)](int64_t task) mutable {
      const int64_t block = task / panels;
      worker.run(
          block * groups.count / blocks, (block + 1) * groups.count / blocks, a.weight,
          task % panels, finish);
    };
  });
}
#endif

template <typename Product, bool HAS_OFFSET>
void run_scaled(const auto& a, const auto& finish) {
#ifdef TRIDENT_TILES
  if (a.rows >= kFewestScaledTileRows && has_tiles()) {
    return run_scaled_tiles<Product, HAS_OFFSET>(a, finish);
  }
#endif
  run_panels<ScaledRows<Product, HAS_OFFSET>>(a, finish);
}

template <typename Product>
void run_scaled(const auto& a, const auto& finish) {
  if (a.group_offset == nullptr) {
    run_scaled<Product, false>(a, finish);
  } else {
    run_scaled<Product, true>(a, finish);
  }
}

template <typename In, typename Out, typename Finish>
void run(const Linear<In, Out>& a, const Finish& finish) {
#ifdef TRIDENT_TILES
  if (a.groups == 0 && uses_tiles<In>(a.scale)) {
    if (a.scale != nullptr) {
      return run_tiles<Int8TileRows>(a, finish);
    }
    if constexpr (std::is_same_v<In, at::BFloat16>) {
      return run_tiles<BFloat16TileRows>(a, finish);
    }
  }
  if constexpr (std::is_same_v<In, at::BFloat16>) {
    if (a.groups > 0 && a.rows >= kFewestWidenedRows && has_tiles() && !a.invariant) {
      return run_tiles<BFloat16TileRows, WidenedPanels>(a, finish);
    }
  }
#endif
  if (a.groups > 0 && a.bits == 4) {
    run_scaled<Int4Product>(a, finish);
  } else if (a.groups > 0) {
    run_scaled<Int8Product>(a, finish);
  } else if (a.scale != nullptr) {
    run_panels<Int8Rows>(a, finish);
  } else {
    run_panels<FloatRows<ProductOf<In>>>(a, finish);
  }
}

}  // namespace

template <typename In, typename Out>
void linear(const Linear<In, Out>& a) {
  run(a, Plain<In, Out>(a));
}

template <typename T>
void gated_linear(const Linear<T, T>& a, Activation activation) {
  for_activation(activation, [&](auto kind) { run(a, Gated<T, kind()>(a)); });
}

}  // namespace trident
