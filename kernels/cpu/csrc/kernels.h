// The kernels, on raw pointers: shapes and strides are in elements, not bytes. T is float, bfloat16
// or half; arithmetic is in float32.
#pragma once

#include <cstdint>

// Explicit instantiation of a template for each dtype.
#define TRIDENT_FOR_EACH_DTYPE(INSTANTIATE) \
  INSTANTIATE(float) INSTANTIATE(at::BFloat16) INSTANTIATE(at::Half)

namespace trident {

template <typename T>
struct RmsNorm {
  const T* x;  // [rows, size]
  const T* residual;  // [rows, size], or null
  const T* weight;    // [size]
  T* out;                           // [rows, size], contiguous
  T* total;           // x + residual, contiguous; null if there is no residual
  int64_t rows, size, x_stride, residual_stride;
  float eps;
  bool unit_offset;
};

template <typename T>
void rms_norm(const RmsNorm<T>& a);

enum class Activation : int64_t { kSilu, kGelu, kGeluTanh };

template <typename T>
struct PlainActivation {
  const T* x;  // [size], contiguous
  T* out;      // [size]
  int64_t size;
  Activation activation;
};

template <typename T>
void plain_activation(const PlainActivation<T>& a);

template <typename T>
struct GatedActivation {
  const T* x;  // [rows, 2 size], the gate first
  T* out;                           // [rows, size], contiguous
  int64_t rows, size, x_stride;
  Activation activation;
};

template <typename T>
void gated_activation(const GatedActivation<T>& a);

// x * sigmoid(gate), both rounded, as torch computes it of one value after the other.
template <typename T>
struct SigmoidGate {
  const T* x;     // [tokens, heads, dim], contiguous
  const T* gate;  // likewise, strided by token and head
  T* out;         // as x, or x
  int64_t tokens, heads, dim, gate_stride, gate_head_stride;
};

template <typename T>
void sigmoid_gate(const SigmoidGate<T>& a);

template <typename T>
struct Rotary {
  const T *query, *key, *value;  // [tokens, heads, dim], strided by token, queries by head too
  const float *cos, *sin;        // [tokens, half], contiguous
  const float* query_scale;        // [tokens] or null
  const T *query_norm, *key_norm;  // [dim] or null
  const int64_t* slots;            // [tokens], -1: padding, not cached
  T* out;                           // [tokens, heads, dim], contiguous
  T *key_cache, *value_cache;      // [slots, kv_heads, dim], contiguous
  int64_t tokens, heads, kv_heads, dim, half;
  int64_t query_stride, query_head_stride, key_stride, value_stride;
  float eps;
  bool unit_offset;  // norms scale by 1 + weight, and round only after that
  bool interleaved;
};

template <typename T>
void rotary_and_cache(const Rotary<T>& a);

template <typename T>
struct PagedAttention {
  const T* query;                   // [tokens, heads, dim], contiguous
  const T *key_cache, *value_cache;  // [blocks, block_size, kv_heads, dim], contiguous
  T* out;                           // as query
  const int32_t* query_start_loc;   // [sequences + 1]
  const int32_t* seq_lens;          // [sequences], 0: idle
  const int32_t* block_tables;      // [sequences, table_stride]
  int64_t sequences, table_stride, block_size, heads, kv_heads, dim;
  float scale;
  int64_t window;   // 0: none
  float soft_cap;  // 0: none
  const float* sinks;  // [heads], scores without a value, or null
  // Whether the keys of a few long sequences may be divided among threads. If not, the result of a
  // query depends on its own sequence alone, to the last bit.
  bool splits;
};

template <typename T>
void paged_attention(const PagedAttention<T>& a);

}  // namespace trident
