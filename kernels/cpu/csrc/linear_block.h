// A task of a product with packed weights: some groups of rows times one panel. For
// linear_products.h and experts.cpp alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "panel_product.h"
#include "scaled_groups.h"

namespace trident {
namespace {

constexpr int64_t kBlockBytes = 1 << 20;  // of a task's rows, which stay in the cache
constexpr int64_t kUnitLines = kColumns * 4 / 64;  // cache lines per unit of a panel

// What a group of rows and a panel give: the values of each row.
using GroupValues = Vec[kMostRows][kVectors];

// Apart from the epilogues: each would be compiled for each number of rows.
template <int64_t ROWS, typename Rows>
[[gnu::noinline]] void multiply_group(
    const Rows& rows, int64_t row, const int32_t* weights, int64_t panel, const char* next,
    int64_t next_lines, GroupValues& values) {
  typename Rows::Sums sums[ROWS][kVectors];
#pragma GCC unroll 12
  for (int64_t r = 0; r < ROWS; ++r) {
    sums[r][0] = sums[r][1] = rows.start(row + r);
  }
  if constexpr (Rows::kIsScaledInGroups) {
    multiply_scaled<ROWS>(sums, rows, row, weights, panel, next, next_lines);
  } else {
    multiply_panel<typename Rows::Product, ROWS>(
        sums, rows.group(row), weights, rows.units, next, next_lines);
  }
  for (int64_t r = 0; r < ROWS; ++r) {
    values[r][0] = rows.value(row + r, panel * kColumns, sums[r][0]);
    values[r][1] = rows.value(row + r, panel * kColumns + W, sums[r][1]);
  }
}

// Adds the bias, if there is one, to what a panel gives from `column` on, and stores what of it is
// within a row of `columns` outputs.
template <typename In, typename Out>
inline void store_panel(
    Out* row, const In* bias, int64_t columns, int64_t column, Vec left, Vec right) {
  for (Vec value : {left, right}) {
    const int64_t n = std::min(W, columns - column);
    if (n <= 0) {
      return;
    }
    if (bias != nullptr) {
      value = value + widen(bias + column, n);
    }
    store(row + column, value, n);
    column += W;
  }
}

template <int64_t ROWS = kMostRows>
void multiply_group_of(int64_t size, auto&&... arguments) {
  if constexpr (ROWS > 0) {
    if (size == ROWS) {
      multiply_group<ROWS>(arguments...);
    } else {
      multiply_group_of<ROWS - 1>(size, arguments...);
    }
  }
}

// Returns the number of groups of a task, at most.
int64_t most_groups(const auto& rows) {
  return std::max<int64_t>(1, kBlockBytes / (4 * rows.steps * kMostRows));
}

// Multiplies the groups from begin to end with a panel of `weight`, and prefetches the next panel
// unless it `is_last`.
template <typename Rows, typename Finish>
void multiply_block(
    const Rows& rows, const auto& groups, int64_t begin, int64_t end, const void* weight,
    int64_t panel, bool is_last, const Finish& finish) {
  const int64_t panel_units = rows.units * kColumns;
  const int32_t* weights = static_cast<const int32_t*>(weight) + panel * panel_units;
  // The next panel is prefetched with the first group; if a unit takes two cache lines, in two
  // parts with the first two groups.
  const char* next = reinterpret_cast<const char*>(weights + panel_units);
  const int64_t lines = is_last ? 0 : end - begin == 1 ? kUnitLines : 1;
  for (int64_t group = begin; group < end; ++group, next += rows.units * 64) {
    const int64_t row = groups.begin(group), size = groups.size(group);
    GroupValues values;
    multiply_group_of(
        size, rows, row, weights, panel, next, group - begin < kUnitLines ? lines : 0, values);
    for (int64_t r = 0; r < size; ++r) {
      finish(row + r, panel, values[r][0], values[r][1]);
    }
  }
}

}  // namespace
}  // namespace trident
