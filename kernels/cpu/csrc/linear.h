// Matrix products with packed weights, on raw pointers.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#include "kernels.h"

namespace trident {

// In and Out are the same type, or Out is float.
template <typename In, typename Out>
struct Linear {
  const In* x;               // [rows, in_features], strided by row
  const void* weight;        // [panels, units, columns, bytes per unit], contiguous
  const float* scale;        // [panels * columns] of int8 weights, otherwise null
  const at::Half* group_scale;   // [panels, groups, columns] of integers in groups, otherwise null
  const at::Half* group_offset;  // likewise, added to all weights of a group; or null: the middle of
                                 // the integers stands for 0
  const In* bias;            // [out_features] or null
  Out* out;                  // [rows, out_features], contiguous
  int64_t rows, in_features, out_features, x_stride;
  int64_t groups;            // of inputs with a scale of their own; 0: scales are for all inputs
  int64_t bits;              // of integers in groups: 4 or 8
  bool invariant;            // a row's result does not depend on the number of rows

  const In* row(int64_t i) const {
    return x + i * x_stride;
  }
  const In* rows_in_place() const {
    return x;
  }
};

// With integer weights, which have scales, the rows of x are quantised to int8 first: as a whole, or
// in groups of kGroup inputs. in_features must be a whole number of 32-bit units and, with groups, a
// group a multiple of kGroup. Unless invariant, integers in groups may be widened to bfloat16 for
// many rows, which are not quantised then. A row's result does not depend on the others.
template <typename In, typename Out>
void linear(const Linear<In, Out>& a);

// The first half of a panel are gates, the second half the values they multiply; out is
// [rows, out_features / 2]. out_features must be a multiple of the columns.
template <typename T>
void gated_linear(const Linear<T, T>& a, Activation activation);

}  // namespace trident
