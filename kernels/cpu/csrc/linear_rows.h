// The rows of a product, packed in groups: as they are, or quantised to 8-bit integers. For
// linear_products.h and experts.cpp alone.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "panel_product.h"
#include "quantize.h"

namespace trident {
namespace {

constexpr int64_t kPackGrain = 1 << 15;   // minimum number of values per thread

// Splits the rows of x into groups of nearly equal size, at most `most`.
struct Groups {
  int64_t rows, count;

  Groups(int64_t rows, int64_t most) : rows(rows), count((rows + most - 1) / most) {}

  int64_t begin(int64_t group) const {
    return group * rows / count;
  }
  int64_t size(int64_t group) const {
    return begin(group + 1) - begin(group);
  }
  int64_t height() const {  // rows of the largest group
    return count == 0 ? 1 : (rows + count - 1) / count;
  }
};

// Writes `steps` 32-bit units of a row, converted to `Value`, at a stride of `stride`.
template <typename Value, typename T>
inline void scatter(const T* row, int64_t steps, int32_t* to, int64_t stride) {
  for (int64_t k = 0; k < steps; ++k) {
    if constexpr (std::is_same_v<T, Value>) {
      std::memcpy(to + k * stride, row + k * (4 / sizeof(T)), 4);
    } else {
      to[k * stride] = std::bit_cast<int32_t>(static_cast<Value>(row[k]));
    }
  }
}

// Calls pack(row, to, stride) for each row; to and stride give the place of its steps in its group.
template <typename Pack>
void pack_groups(const auto& groups, int64_t steps, int32_t* packed, Pack pack) {
  const int64_t grain = std::max<int64_t>(1, kPackGrain / (steps * kMostRows));
  at::parallel_for(0, groups.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t row = groups.begin(group), size = groups.size(group);
      for (int64_t r = 0; r < size; ++r) {
        pack(row + r, packed + row * steps + r, size);
      }
    }
  });
}

template <typename FloatProduct>
class FloatRows {
 public:
  using Product = FloatProduct;
  using Sums = typename Product::Sums;
  static constexpr bool kIsScaledInGroups = false;

  template <typename A>
  FloatRows(const A& a, const auto& groups)
      : units(a.in_features * sizeof(*a.x) / 4), steps(units * Product::kSteps) {
    if (a.rows == 1 && Product::kSteps == 1) {
      packed_ = reinterpret_cast<const int32_t*>(a.row(0));
      return;
    }
    memory_ = std::make_unique_for_overwrite<int32_t[]>(a.rows * steps);
    packed_ = memory_.get();
    pack_groups(groups, steps, memory_.get(), [&](int64_t row, int32_t* to, int64_t stride) {
      scatter<typename Product::Value>(a.row(row), steps, to, stride);
    });
  }

  const int32_t* group(int64_t row) const {
    return packed_ + row * steps;
  }
  Vec start(int64_t) const {
    return Vec(0.0f);
  }
  Vec value(int64_t, int64_t, Vec sums) const {
    return sums;
  }

  const int64_t units, steps;

 private:
  const int32_t* packed_;
  std::unique_ptr<int32_t[]> memory_;
};

class Int8Rows {
 public:
  using Product = Int8Product;
  using Sums = Product::Sums;
  static constexpr bool kIsScaledInGroups = false;

  template <typename A>
  Int8Rows(const A& a, const auto& groups)
      : units(a.in_features / 4),
        steps(units * Product::kSteps),
        weight_scales_(a.scale),
        packed_(std::make_unique_for_overwrite<int32_t[]>(a.rows * steps)),
        scales_(std::make_unique_for_overwrite<float[]>(a.rows)),
        starts_(std::make_unique_for_overwrite<int32_t[]>(a.rows)) {
    pack_groups(groups, steps, packed_.get(), [&](int64_t row, int32_t* to, int64_t stride) {
      thread_local std::vector<Product::Value> integers;
      integers.resize(a.in_features);
      const Quantized found =
          quantize(a.row(row), a.in_features, [&](int64_t i) { return integers.data() + i; });
      scales_[row] = found.scale;
      starts_[row] = -128 * found.sum;  // the share of the weights' zero point
      scatter<Product::Value>(integers.data(), steps, to, stride);
    });
  }

  const int32_t* group(int64_t row) const {
    return packed_.get() + row * steps;
  }
  Ints start(int64_t row) const {
    return Ints(starts_[row]);
  }
  Vec value(int64_t row, int64_t column, Ints sums) const {
    return at::vec::convert_to_fp_of_same_size<float>(sums) *
           (Vec(scales_[row]) * widen(weight_scales_ + column));
  }

  const int64_t units, steps;

 private:
  const float* weight_scales_;
  std::unique_ptr<int32_t[]> packed_;
  std::unique_ptr<float[]> scales_;
  std::unique_ptr<int32_t[]> starts_;
};

}  // namespace
}  // namespace trident
