// Products with packed weights, on plain memory.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

#include "kernels.h"

// There are some for AVX-512 that multiplies bfloat16 and 8-bit integers, and for AVX2, for which
// oneDNN has none. With other AVX-512, oneDNN's serve.
#if !defined(CPU_CAPABILITY_AVX512) || (defined(__AVX512BF16__) && defined(__AVX512VNNI__))
#define TRIDENT_LINEAR
#endif

namespace trident {

// Returns the output channels of a panel.
int64_t panel_columns();

template <typename Out>
struct Linear {
  const at::BFloat16* x;     // [rows, in_features], a stride between rows
  const void* weight;        // [panels, units, columns, values in a unit], contiguous
  const float* scale;        // [panels * columns] of 8-bit weights, otherwise null
  const at::BFloat16* bias;  // [out_features] or null
  Out* out;                  // [rows, out_features], contiguous
  int64_t rows, in_features, out_features, x_stride;
};

// Of 8-bit weights there are scales; the rows of x are quantised to 8 bits first, then. in_features
// is a whole number of units of 32 bits.
template <typename Out>
void linear(const Linear<Out>& a);

// The first half of a panel are gates, the other what they are for; out is
// [rows, out_features / 2]. out_features is a multiple of the columns.
void gated_linear(const Linear<at::BFloat16>& a, Activation activation);

}  // namespace trident
