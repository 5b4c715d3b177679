// Matrix products with packed weights, in bfloat16, int8 or float32.
//
// A panel is a block of output channels, stored in the order in which it is read: unit by unit
// along the depth, each unit for all channels of the panel. Rows are packed the same way, in groups
// of as many as fit into registers. A task multiplies one panel with some groups, and prefetches
// the next panel into the cache. A sum runs over the whole depth in order, whatever the other rows,
// the groups and the threads are.
#include "linear.h"

#ifdef TRIDENT_LINEAR
#include <algorithm>

#include "activation.h"
#include "linear_rows.h"
#include "panel_product.h"
#include "shares.h"

namespace trident {
namespace {

constexpr int64_t kBlockBytes = 1 << 20;  // of a task's rows, which stay in the cache
constexpr int64_t kUnitLines = kColumns * 4 / 64;  // cache lines per unit of a panel

// Epilogue: adds the bias and stores the results of a row and a panel.
template <typename In, typename Out>
class Plain {
 public:
  explicit Plain(const Linear<In, Out>& a) : a_(a) {}

  void operator()(int64_t row, int64_t panel, Vec left, Vec right) const {
    store_some(row, panel * kColumns, left);
    store_some(row, panel * kColumns + W, right);
  }

 private:
  void store_some(int64_t row, int64_t column, Vec value) const {
    const int64_t n = std::min(W, a_.out_features - column);
    if (n <= 0) {
      return;
    }
    if (a_.bias != nullptr) {
      value = value + widen(a_.bias + column, n);
    }
    store(a_.out + row * a_.out_features + column, value, n);
  }

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
    store(a_.out + (row * a_.out_features + panel * kColumns) / 2, activate<kind>(gate) * up);
  }

 private:
  const Linear<T, T>& a_;
};

template <int64_t ROWS, typename Rows, typename Finish>
void multiply_group(
    const Rows& rows, int64_t row, const int32_t* weights, int64_t panel, const char* next,
    int64_t next_lines, const Finish& finish) {
  typename Rows::Product::Sums sums[ROWS][kVectors];
#pragma GCC unroll 12
  for (int64_t r = 0; r < ROWS; ++r) {
    sums[r][0] = sums[r][1] = rows.start(row + r);
  }
  multiply_panel<typename Rows::Product, ROWS>(
      sums, rows.group(row), weights, rows.units, next, next_lines);
#pragma GCC unroll 12
  for (int64_t r = 0; r < ROWS; ++r) {
    finish(
        row + r, panel, rows.value(row + r, panel * kColumns, sums[r][0]),
        rows.value(row + r, panel * kColumns + W, sums[r][1]));
  }
}

template <int64_t ROWS = kMostRows>
void multiply_group_of(int64_t size, const auto&... arguments) {
  if constexpr (ROWS > 0) {
    if (size == ROWS) {
      multiply_group<ROWS>(arguments...);
    } else {
      multiply_group_of<ROWS - 1>(size, arguments...);
    }
  }
}

template <typename Rows, typename Finish>
void run(const auto& a, const Finish& finish) {
  const Groups groups(a.rows);
  const Rows rows(a, groups);
  const int64_t panels = (a.out_features + kColumns - 1) / kColumns;
  const int64_t panel_units = rows.units * kColumns;
  const int64_t most = std::max<int64_t>(1, kBlockBytes / (4 * rows.steps * kMostRows));
  const int64_t blocks = (groups.count + most - 1) / most;
  const auto multiply = [&](int64_t task) {
    const int64_t block = task / panels, panel = task % panels;
    const int64_t begin = block * groups.count / blocks;
    const int64_t end = (block + 1) * groups.count / blocks;
    const int32_t* weights = static_cast<const int32_t*>(a.weight) + panel * panel_units;
    // The next panel is prefetched with the first group; if a unit takes two cache lines, in two
    // parts with the first two groups.
    const char* next = reinterpret_cast<const char*>(weights + panel_units);
    const int64_t lines = panel + 1 == panels ? 0 : end - begin == 1 ? kUnitLines : 1;
    for (int64_t group = begin; group < end; ++group, next += rows.units * 64) {
      multiply_group_of(
          groups.size(group), rows, groups.begin(group), weights, panel, next,
          group - begin < kUnitLines ? lines : 0, finish);
    }
  };
  share_out(blocks * panels, [&] { return multiply; });
}

// Calls call with the kind of the rows of `a` as a type argument.
template <typename In, typename Out>
void for_rows(const Linear<In, Out>& a, const auto& call) {
  using Product = std::conditional_t<std::is_same_v<In, float>, Float32Product, BFloat16Product>;
  if (a.scale == nullptr) {
    call.template operator()<FloatRows<Product>>();
  } else {
    call.template operator()<Int8Rows>();
  }
}

}  // namespace

int64_t panel_columns() {
  return kColumns;
}

template <typename In, typename Out>
void linear(const Linear<In, Out>& a) {
  for_rows(a, [&]<typename Rows>() { run<Rows>(a, Plain<In, Out>(a)); });
}

template void linear(const Linear<at::BFloat16, at::BFloat16>&);
template void linear(const Linear<at::BFloat16, float>&);
template void linear(const Linear<float, float>&);

template <typename T>
void gated_linear(const Linear<T, T>& a, Activation activation) {
  for_activation(activation, [&](auto kind) {
    for_rows(a, [&]<typename Rows>() { run<Rows>(a, Gated<T, kind()>(a)); });
  });
}

template void gated_linear(const Linear<at::BFloat16, at::BFloat16>&, Activation);
template void gated_linear(const Linear<float, float>&, Activation);

}  // namespace trident
#endif
