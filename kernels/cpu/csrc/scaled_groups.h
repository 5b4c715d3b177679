// Products with integer weights that have a scale for each group of inputs. For linear_block.h and
// linear_products.h alone.
#pragma once

#include "aligned.h"
#include "linear_rows.h"

namespace trident {
namespace {

constexpr int64_t kGroup = 32;  // inputs that are quantised together

// How the integers of a product with scales in groups are to be read.
struct ScaledWeights {
  int64_t groups;          // of inputs, each some of kGroup
  const at::Half* scale;   // [panels, groups, kColumns]
  const at::Half* offset;  // likewise, or null: the middle of the integers stands for 0
};

// Of a group of a row: the value of a step, and what `offset` is multiplied with; or, without
// offsets, the share of the product that is due to the integers' zero point.
struct ScaledGroup {
  float scale;
  union {
    float sum;
    int32_t start;
  };

  ScaledGroup(const Quantized& found, bool has_offset, int32_t zero) : scale(found.scale) {
    if (has_offset) {
      sum = found.scale * static_cast<float>(found.sum);
    } else {
      start = -zero * found.sum;
    }
  }
};

// Rows quantised to int8 in groups of kGroup values.
template <typename IntegerProduct, bool HAS_OFFSET>
class ScaledRows {
 public:
  using Product = IntegerProduct;
  using Sums = Vec;
  static constexpr bool kIsScaledInGroups = true, kHasOffset = HAS_OFFSET;

  template <typename A>
  ScaledRows(const A& a, const auto& groups)
      : units(a.in_features / Product::kValues),
        steps(units * Product::kSteps),
        groups(a.in_features / kGroup),
        weights{a.groups, a.group_scale, a.group_offset},
        packed_(std::make_unique_for_overwrite<int32_t[]>(a.rows * steps)),
        scales_(aligned<ScaledGroup>(a.rows * this->groups)) {
    pack_groups(groups, steps, packed_.get(), [&](int64_t row, int32_t* to, int64_t stride) {
      thread_local std::vector<typename Product::Value> integers;
      integers.resize(a.in_features);
      for (int64_t g = 0; g < this->groups; ++g) {
        auto* to = integers.data() + g * kGroup;
        const Quantized found =
            quantize(a.row(row) + g * kGroup, kGroup, [&](int64_t i) { return to + i; });
        scales_[row * this->groups + g] = ScaledGroup(found, HAS_OFFSET, Product::kZero);
      }
      scatter<typename Product::Value>(integers.data(), steps, to, stride);
    });
  }

  const int32_t* group(int64_t row) const {
    return packed_.get() + row * steps;
  }
  // For each group of a row.
  const ScaledGroup* scales(int64_t row) const {
    return scales_.get() + row * groups;
  }
  Vec start(int64_t) const {
    return Vec(0.0f);
  }
  Vec value(int64_t, int64_t, Vec sums) const {
    return sums;
  }

  const int64_t units, steps, groups;
  const ScaledWeights weights;

 private:
  std::unique_ptr<int32_t[]> packed_;
  Aligned<ScaledGroup> scales_;
};

// Adds to sums the products of ROWS rows from `row` on with a panel: those of a group as integers,
// those of groups as floats, in the order of the inputs.
template <int64_t ROWS, typename Product, bool HAS_OFFSET>
[[gnu::noinline]] void multiply_scaled(
    Vec (&sums)[ROWS][kVectors], const ScaledRows<Product, HAS_OFFSET>& rows, int64_t row,
    const int32_t* weights, int64_t panel, const char* next, int64_t next_lines) {
  constexpr int64_t kUnits = kGroup / Product::kValues;
  const int32_t* x = rows.group(row);
  const ScaledGroup* const x_scales = rows.scales(row);
  const int64_t per_scale = rows.groups / rows.weights.groups;
  const int64_t first = panel * rows.weights.groups * kColumns;
  const at::Half* scales = rows.weights.scale + first;
  const at::Half* offsets = HAS_OFFSET ? rows.weights.offset + first : nullptr;
  FloatUnits own[ROWS][kVectors];
#pragma GCC unroll 12
  for (int64_t r = 0; r < ROWS; ++r) {
    own[r][0] = sums[r][0];
    own[r][1] = sums[r][1];
  }
  Vec scale[kVectors], offset[kVectors];
  int64_t same_scale = 0;  // groups that follow with it
  for (int64_t g = 0; g < rows.groups; ++g, --same_scale) {
    for (int64_t i = 0; i < kUnits * next_lines; ++i, next += 64) {
      _mm_prefetch(next, _MM_HINT_T1);
    }
    if (same_scale == 0) {
      same_scale = per_scale;
      // Those of the next panel, too.
      const char* const later =
          reinterpret_cast<const char*>(scales + rows.weights.groups * kColumns);
      _mm_prefetch(later, _MM_HINT_T1);
#pragma GCC unroll 2
      for (int64_t v = 0; v < kVectors; ++v) {
        scale[v] = widen(scales + v * W);
        if constexpr (HAS_OFFSET) {
          offset[v] = widen(offsets + v * W);
        }
      }
      scales += kColumns;
      offsets += HAS_OFFSET ? kColumns : 0;
    }
    typename Product::Sums whole[ROWS][kVectors];
#pragma GCC unroll 12
    for (int64_t r = 0; r < ROWS; ++r) {
      const int32_t start = HAS_OFFSET ? 0 : x_scales[r * rows.groups + g].start;
      whole[r][0] = whole[r][1] = Product::start(start);
    }
#pragma GCC unroll 8
    for (int64_t k = 0; k < kUnits; ++k, weights += kColumns) {
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
#pragma GCC unroll 12
    for (int64_t r = 0; r < ROWS; ++r) {
      const ScaledGroup& of_row = x_scales[r * rows.groups + g];
      const Vec row_scale(of_row.scale);
#pragma GCC unroll 2
      for (int64_t v = 0; v < kVectors; ++v) {
        const Ints product(Product::whole(whole[r][v], HAS_OFFSET ? 0 : of_row.start));
        own[r][v] = at::vec::fmadd(
            at::vec::convert_to_fp_of_same_size<float>(product), scale[v] * row_scale,
            Vec(own[r][v]));
        if constexpr (HAS_OFFSET) {
          own[r][v] = at::vec::fmadd(offset[v], Vec(of_row.sum), Vec(own[r][v]));
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int64_t r = 0; r < ROWS; ++r) {
    sums[r][0] = own[r][0];
    sums[r][1] = own[r][1];
  }
}

}  // namespace
}  // namespace trident
