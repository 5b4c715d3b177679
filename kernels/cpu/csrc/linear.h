// Products with packed weights, on plain memory. There are some for processors that multiply
// bfloat16 and 8-bit integers.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

#include "kernels.h"

namespace trident {

template <typename Out>
struct Linear {
  const at::BFloat16* x;     // [rows, in_features], a stride between rows
  const void* weight;        // [panels, units, 32, values in a unit], contiguous
  const float* scale;        // [panels * 32] of 8-bit weights, otherwise null
  const at::BFloat16* bias;  // [out_features] or null
  Out* out;                  // [rows, out_features], contiguous
  int64_t rows, in_features, out_features, x_stride;
};

// Of 8-bit weights there are scales; the rows of x are quantised to 8 bits first, then. in_features
// is a whole number of units of 32 bits.
template <typename Out>
void linear(const Linear<Out>& a);

// A panel has 16 channels of gates, then the 16 that they are for; out is [rows, out_features / 2].
// out_features is a multiple of 32.
void gated_linear(const Linear<at::BFloat16>& a, Activation activation);

}  // namespace trident
