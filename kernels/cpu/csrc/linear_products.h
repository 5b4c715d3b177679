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
#include "scaled_groups.h"
#include "shares.h"
#include "tile_block.h"
#include "tile_rows.h"

// Products on AMX with integer weights that have a scale for each group of inputs.
// A task unpacks a slab of a panel to bytes, which stay in the L1 cache, then the next one. All its
// rows pass each slab: a group of inputs is half a tile deep, its sums are exact, and vectors scale
// and add them, while the unit multiplies the next group. The results are those of `multiply_scaled`
// to the last bit: the integers are the same, and floats are added in the same order.
#ifdef TRIDENT_TILES

namespace trident {
namespace {

constexpr int64_t kScaledTileRows = 12;       // whose sums, of two vectors each, stay in registers
constexpr int64_t kFewestScaledTileRows = 5;  // for which unpacking pays
static_assert(2 * kFewestScaledTileRows < kScaledTileRows, "groups have as many rows");
constexpr int64_t kGroupUnits = kGroup / 4;
constexpr int64_t kSlabGroups = 16;
// The unit is so many groups ahead of the vectors: they would wait for stores under way.
constexpr int64_t kAhead = 2;
constexpr int64_t kGroupBytes = kGroup * kColumns;  // of a panel, unpacked

// Rows quantised to int8 in groups of kGroup values. Those that are multiplied together have the
// values of a group one after the other.
template <typename IntegerProduct, bool HAS_OFFSET>
class ScaledTileRows {
 public:
  using Product = IntegerProduct;
  static constexpr bool kHasOffset = HAS_OFFSET;

  template <typename A>
  ScaledTileRows(const A& a, const auto& rows)
      : groups(a.in_features / kGroup),
        height(rows.height()),
        weights{a.groups, a.group_scale, a.group_offset},
        integers_(aligned<int8_t>(rows.count * height * a.in_features)),
        scales_(aligned<ScaledGroup>(rows.count * height * groups)) {
    const int64_t grain = std::max<int64_t>(1, kPackGrain / (a.in_features * height));
    at::parallel_for(0, rows.count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t r = 0; r < rows.size(i); ++r) {
          const auto* x = a.row(rows.begin(i) + r);
          for (int64_t g = 0; g < groups; ++g) {
            const int64_t place = (i * groups + g) * height + r;
            int8_t* const to = integers_.get() + place * kGroup;
            const Quantized found =
                quantize(x + g * kGroup, kGroup, [&](int64_t k) { return to + k; });
            scales_[place] = ScaledGroup(found, HAS_OFFSET, Product::kZero);
          }
        }
      }
    });
  }

  // Of those rows that are multiplied together, from a group of inputs on.
  const int8_t* integers(int64_t i, int64_t g) const {
    return integers_.get() + (i * groups + g) * height * kGroup;
  }
  const ScaledGroup* scales(int64_t i, int64_t g) const {
    return scales_.get() + (i * groups + g) * height;
  }

  const int64_t groups, height;
  const ScaledWeights weights;

 private:
  Aligned<int8_t> integers_;
  Aligned<ScaledGroup> scales_;
};

// Some groups of a panel: its weights as bytes, in rows of a unit of all columns.
struct alignas(64) ScaledSlab {
  int8_t units[kSlabGroups][kGroupUnits][4 * kColumns];
  float scale[kSlabGroups][kColumns], offset[kSlabGroups][kColumns];
};

// Integers without offsets become signed.
template <typename Product, bool HAS_OFFSET>
inline void unpack_units(const int32_t* from, int64_t units, int8_t* to) {
  const Units zero = broadcast(static_cast<int32_t>(Product::kZero * 0x01010101u));
  const Units low = broadcast(0x0f0f0f0f);
  const auto put = [&](Units values) {
    _mm512_store_si512(to, HAS_OFFSET ? values : _mm512_sub_epi8(values, zero));
    to += sizeof(Units);
  };
  for (int64_t i = 0; i < units; ++i, from += kColumns) {
    const Units left = load_units(from), right = load_units(from + W);
    if constexpr (Product::kValues == 4) {
      put(left);
      put(right);
    } else {
      put(common_bits(left, low));
      put(common_bits(right, low));
      put(common_bits(shifted_right(left, 4), low));
      put(common_bits(shifted_right(right, 4), low));
    }
  }
}

inline FloatUnits as_floats(const int32_t* integers) {
  return _mm512_cvtepi32_ps(load_units(integers));
}

// Adds to sums [ROWS, kColumns] the products of ROWS rows with the first `groups` of a slab. With
// each group, next_lines cache lines from `next` on are prefetched.
template <bool HAS_OFFSET, int64_t ROWS>
[[gnu::noinline]] void multiply_scaled_tiles(
    float* sums, const int8_t* x, const ScaledGroup* x_scales, int64_t height,
    const ScaledSlab& slab, int64_t groups, const char* next, int64_t next_lines) {
  using Tiles = std::conditional_t<HAS_OFFSET, Int8Tiles, SignedTiles>;
  alignas(64) int32_t products[kAhead][kScaledTileRows][kColumns];
  const auto multiply_left = [&]<int LEFT>(int64_t g) {
    load_tile<4>(x + g * height * kGroup, kGroup);
    load_tile<6>(slab.units[g][0], 4 * kColumns);
    zero_tile<LEFT>();
    Tiles::template multiply<LEFT, 4, 6>();
  };
  const auto multiply_right = [&]<int LEFT>(int64_t g) {
    load_tile<7>(slab.units[g][0] + 4 * W, 4 * kColumns);
    zero_tile<LEFT + 1>();
    Tiles::template multiply<LEFT + 1, 4, 7>();
  };
  const auto store = [&]<int LEFT>(int64_t g) {
    auto& whole = products[g % kAhead];
    store_tile<LEFT>(whole[0], sizeof(whole[0]));
    store_tile<LEFT + 1>(whole[0] + W, sizeof(whole[0]));
  };
  // Groups alternate between two pairs of tiles of sums.
  const auto turn = [&](int64_t g, const auto& take) {
    if (0 <= g && g < groups) {
      g % 2 == 0 ? take.template operator()<0>(g) : take.template operator()<2>(g);
    }
  };
  for (int64_t g = 0; g < kAhead; ++g) {
    turn(g, multiply_left);
    turn(g, multiply_right);
    turn(g - 1, store);
  }
  FloatUnits own[ROWS][kVectors];
#pragma GCC unroll 12
  for (int64_t r = 0; r < ROWS; ++r) {
    own[r][0] = _mm512_load_ps(sums + r * kColumns);
    own[r][1] = _mm512_load_ps(sums + r * kColumns + W);
  }
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t i = 0; i < next_lines; ++i, next += 64) {
      _mm_prefetch(next, _MM_HINT_T1);
    }
    const auto& whole = products[g % kAhead];
    const ScaledGroup* const of_rows = x_scales + g * height;
    const FloatUnits left = _mm512_load_ps(slab.scale[g]);
    const FloatUnits right = _mm512_load_ps(slab.scale[g] + W);
    turn(g + kAhead, multiply_left);
#pragma GCC unroll 12
    for (int64_t r = 0; r < ROWS; ++r) {
      if (r == ROWS / 2) {
        turn(g + kAhead - 1, store);
        turn(g + kAhead, multiply_right);
      }
      const FloatUnits scale = _mm512_set1_ps(of_rows[r].scale);
      own[r][0] = _mm512_fmadd_ps(as_floats(whole[r]), _mm512_mul_ps(left, scale), own[r][0]);
      own[r][1] = _mm512_fmadd_ps(as_floats(whole[r] + W), _mm512_mul_ps(right, scale), own[r][1]);
    }
    if constexpr (HAS_OFFSET) {
      const FloatUnits left = _mm512_load_ps(slab.offset[g]);
      const FloatUnits right = _mm512_load_ps(slab.offset[g] + W);
#pragma GCC unroll 12
      for (int64_t r = 0; r < ROWS; ++r) {
        const FloatUnits sum = _mm512_set1_ps(of_rows[r].sum);
        own[r][0] = _mm512_fmadd_ps(left, sum, own[r][0]);
        own[r][1] = _mm512_fmadd_ps(right, sum, own[r][1]);
      }
    }
  }
#pragma GCC unroll 12
  for (int64_t r = 0; r < ROWS; ++r) {
    _mm512_store_ps(sums + r * kColumns, own[r][0]);
    _mm512_store_ps(sums + r * kColumns + W, own[r][1]);
  }
}

template <bool HAS_OFFSET, int64_t ROWS = kScaledTileRows>
void multiply_scaled_tiles_of(int64_t size, const auto&... arguments) {
  if constexpr (ROWS >= kFewestScaledTileRows) {
    if (size == ROWS) {
      multiply_scaled_tiles<HAS_OFFSET, ROWS>(arguments...);
    } else {
      multiply_scaled_tiles_of<HAS_OFFSET, ROWS - 1>(size, arguments...);
    }
  }
}

// One thread's tasks of a product: each of at most `most` groups of rows.
template <typename Rows, typename Groups>
class ScaledTileWorker {
 public:
  ScaledTileWorker(const Rows& rows, const Groups& groups, int64_t most)
      : rows_(rows),
        groups_(groups),
        use_(rows.height, kGroupUnits),
        slab_(aligned<ScaledSlab>(1)),
        sums_(aligned<float>(std::min(most, groups.count) * kScaledTileRows * kColumns)) {}

  // Multiplies the groups from begin to end with a panel, and prefetches what follows in memory.
  void run(
      int64_t begin, int64_t end, const void* weight, int64_t panel, const auto& finish) {
    constexpr int64_t kUnits = kGroup / Rows::Product::kValues;  // packed
    const int32_t* weights =
        static_cast<const int32_t*>(weight) + panel * rows_.groups * kUnits * kColumns;
    std::fill_n(sums_.get(), (end - begin) * kScaledTileRows * kColumns, 0.0f);
    const int64_t slabs = (rows_.groups - 1) / kSlabGroups + 1;
    for (int64_t i = 0; i < slabs; ++i) {
      const int64_t first = i * rows_.groups / slabs, last = (i + 1) * rows_.groups / slabs;
      const int64_t count = last - first;
      unpack_units<typename Rows::Product, Rows::kHasOffset>(
          weights, count * kUnits, slab_[0].units[0][0]);
      weights += count * kUnits * kColumns;
      take_scales(panel, first, last);
      // What a slab has of the weights that follow is prefetched with the first rows.
      const char* const next = reinterpret_cast<const char*>(weights);
      for (int64_t group = begin; group < end; ++group) {
        multiply_scaled_tiles_of<Rows::kHasOffset>(
            groups_.size(group), sums_.get() + (group - begin) * kScaledTileRows * kColumns,
            rows_.integers(group, first), rows_.scales(group, first), rows_.height, slab_[0], count,
            next, group == begin ? kUnits * kColumns * 4 / 64 : 0);
      }
    }
    for (int64_t group = begin; group < end; ++group) {
      const float* sums = sums_.get() + (group - begin) * kScaledTileRows * kColumns;
      for (int64_t r = 0; r < groups_.size(group); ++r, sums += kColumns) {
        finish(groups_.begin(group) + r, panel, Vec::loadu(sums), Vec::loadu(sums + W));
      }
    }
  }

 private:
  void take_scales(int64_t panel, int64_t first, int64_t last) {
    const int64_t per_scale = rows_.groups / rows_.weights.groups;
    for (int64_t g = first; g < last; ++g) {
      const int64_t at = (panel * rows_.weights.groups + g / per_scale) * kColumns;
      for (int64_t v = 0; v < kVectors; ++v) {
        widen(rows_.weights.scale + at + v * W).store(slab_[0].scale[g - first] + v * W);
        if constexpr (Rows::kHasOffset) {
          widen(rows_.weights.offset + at + v * W).store(slab_[0].offset[g - first] + v * W);
        }
      }
    }
  }

  const Rows& rows_;
  const Groups& groups_;
  TilesInUse use_;
  Aligned<ScaledSlab> slab_;
  Aligned<float> sums_;  // of each row of a task
};

}  // namespace
}  // namespace trident
#endif

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
