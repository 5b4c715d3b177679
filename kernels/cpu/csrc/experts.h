// A mixture of experts with packed weights, on raw pointers.
#pragma once

#include <cstdint>

#include "linear.h"

namespace trident {

// (up + offset) * kind(gate); gates are at most limit, ups in magnitude. SiLU is
// gate * sigmoid(alpha * gate).
struct ExpertActivation {
  Activation kind;
  float alpha, limit, offset;
};

// The weights of one projection of all experts: those of each are padded to whole panels.
template <typename T>
struct ExpertWeights {
  const void* weight;  // [experts, panels, units, columns, values per unit], contiguous
  const float* scale;  // [experts, panels * columns] of int8 weights, otherwise null
  const T* bias;       // [experts, out_features] or null
};

template <typename T>
struct Experts {
  const T* x;              // [tokens, hidden], strided by row
  const int32_t* experts;  // [tokens, top_k], contiguous; of padding -1
  const float* weights;    // [tokens, top_k], contiguous
  int64_t* totals;         // [num_experts], to which the choices are added
  ExpertWeights<T> gate_up, down;  // gates and ups alternate by half a panel
  T* out;                  // [tokens, hidden], contiguous
  int64_t tokens, top_k, num_experts, hidden, size, x_stride;
  ExpertActivation activation;
};

// Reads the weights of the chosen experts alone. hidden and size must be whole numbers of 32-bit
// units, and size of half panels. A token's result does not depend on the others.
template <typename T>
void experts(const Experts<T>& a);

}  // namespace trident
