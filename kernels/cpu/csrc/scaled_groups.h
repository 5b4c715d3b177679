// Products with integer weights that have a scale for each group of inputs. For linear_block.h alone.
#pragma once

#include "linear_rows.h"

namespace trident {
namespace {

constexpr int64_t kGroup = 32;  // inputs that are quantised together

// Rows quantised to int8 in groups of kGroup values.
template <typename IntegerProduct>
class ScaledRows {
 public:
  using Product = IntegerProduct;
  using Sums = Vec;
  static constexpr bool kIsScaledInGroups = true;

  template <typename A>
  ScaledRows(const A& a, const auto& groups)
      : units(a.in_features / Product::kValues),
        steps(units * Product::kSteps),
        groups(a.in_features / kGroup),
        scale_groups(a.groups),
        weight_scale(a.group_scale),
        weight_offset(a.group_offset),
        packed_(std::make_unique_for_overwrite<int32_t[]>(a.rows * steps)),
        scales_(std::make_unique_for_overwrite<float[]>(2 * a.rows * this->groups)) {
    pack_groups(groups, steps, packed_.get(), [&](int64_t row, int32_t* to, int64_t stride) {
      thread_local std::vector<typename Product::Value> integers;
      integers.resize(a.in_features);
      for (int64_t g = 0; g < this->groups; ++g) {
        auto* to = integers.data() + g * kGroup;
        const Quantized found =
            quantize(a.row(row) + g * kGroup, kGroup, [&](int64_t i) { return to + i; });
        float* scale = scales_.get() + 2 * (row * this->groups + g);
        scale[0] = found.scale;
        scale[1] = found.scale * static_cast<float>(found.sum);
      }
      scatter<typename Product::Value>(integers.data(), steps, to, stride);
    });
  }

  const int32_t* group(int64_t row) const {
    return packed_.get() + row * steps;
  }
  // For each group of a row: its scale, and the sum of its values.
  const float* scales(int64_t row) const {
    return scales_.get() + 2 * row * groups;
  }
  Vec start(int64_t) const {
    return Vec(0.0f);
  }
  Vec value(int64_t, int64_t, Vec sums) const {
    return sums;
  }

  const int64_t units, steps, groups;
  const int64_t scale_groups;  // of the weights; each is some of `groups`
  const at::Half *weight_scale, *weight_offset;

 private:
  std::unique_ptr<int32_t[]> packed_;
  std::unique_ptr<float[]> scales_;
};

// Adds to sums the products of ROWS rows from `row` on with a panel: those of a group as integers,
// those of groups as floats, in the order of the inputs.
template <int64_t ROWS, typename Product>
[[gnu::noinline]] void multiply_scaled(
    Vec (&sums)[ROWS][kVectors], const ScaledRows<Product>& rows, int64_t row,
    const int32_t* weights, int64_t panel, const char* next, int64_t next_lines) {
  const int32_t* x = rows.group(row);
  const int64_t per_scale = rows.groups / rows.scale_groups;
  const int64_t first = panel * rows.scale_groups * kColumns;
  Vec scale[kVectors], offset[kVectors];
  for (int64_t g = 0; g < rows.groups; ++g) {
    typename Product::Sums whole[ROWS][kVectors];
#pragma GCC unroll 12
    for (int64_t r = 0; r < ROWS; ++r) {
      whole[r][0] = whole[r][1] = Units{};
    }
    for (int64_t k = 0; k < kGroup / Product::kValues; ++k, weights += kColumns) {
      for (int64_t i = 0; i < next_lines; ++i, next += 64) {
        _mm_prefetch(next, _MM_HINT_T1);
      }
#pragma GCC unroll 2
      for (int64_t step = 0; step < Product::kSteps; ++step, x += ROWS) {
        const Units left = Product::weights(weights, step);
        const Units right = Product::weights(weights + W, step);
#pragma GCC unroll 12
        for (int64_t r = 0; r < ROWS; ++r) {
          whole[r][0] = Product::add(whole[r][0], x[r], left);
          whole[r][1] = Product::add(whole[r][1], x[r], right);
        }
      }
    }
    if (g % per_scale == 0) {
      const int64_t at = first + g / per_scale * kColumns;
#pragma GCC unroll 2
      for (int64_t v = 0; v < kVectors; ++v) {
        scale[v] = widen(rows.weight_scale + at + v * W);
        offset[v] = rows.weight_offset == nullptr
                        ? scale[v] * Vec(-Product::kZero)
                        : widen(rows.weight_offset + at + v * W);
      }
    }
#pragma GCC unroll 12
    for (int64_t r = 0; r < ROWS; ++r) {
      const float* of_row = rows.scales(row + r) + 2 * g;
      const Vec row_scale(of_row[0]), row_sum(of_row[1]);
#pragma GCC unroll 2
      for (int64_t v = 0; v < kVectors; ++v) {
        const Vec product =
            at::vec::convert_to_fp_of_same_size<float>(Ints(Product::whole(whole[r][v])));
        sums[r][v] = at::vec::fmadd(product, scale[v] * row_scale, sums[r][v]);
        sums[r][v] = at::vec::fmadd(offset[v], row_sum, sums[r][v]);
      }
    }
  }
}

}  // namespace
}  // namespace trident
