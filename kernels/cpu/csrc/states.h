// State layers on raw pointers, and the states that a step reads and writes. Same rules as
// kernels/state/states.py.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace trident {

struct StepStates {
  const int32_t* query_start_loc;  // [rows + 1]
  const int32_t* seq_lens;         // [rows], 0: idle
  const int32_t *reads, *writes;   // [rows], blocks; -1 to write: idle
  const int32_t* saves;            // [rows, max_saves, 2], position and block, or block -1
  int64_t rows, max_saves;
};

// A row of a step that is not idle.
struct StateRow {
  int64_t begin, size;  // of its tokens among those of the step
  int64_t start;        // position of the first
  int64_t reads, writes;
  const int32_t* saves;  // [max_saves, 2]
};

inline std::vector<StateRow> active_rows(const StepStates& step) {
  std::vector<StateRow> rows;
  rows.reserve(step.rows);
  for (int64_t i = 0; i < step.rows; ++i) {
    const int64_t begin = step.query_start_loc[i], size = step.query_start_loc[i + 1] - begin;
    if (step.seq_lens[i] > 0 && step.writes[i] >= 0 && size > 0) {
      rows.push_back(
          {begin, size, step.seq_lens[i] - size, step.reads[i], step.writes[i],
           step.saves + i * step.max_saves * 2});
    }
  }
  return rows;
}

// Calls run(position, block) for each save at a position behind the row's start, up to its end.
template <typename Run>
void for_saves(const StepStates& step, const StateRow& row, Run run) {
  for (int64_t i = 0; i < step.max_saves; ++i) {
    const int64_t position = row.saves[2 * i], block = row.saves[2 * i + 1];
    if (block >= 0 && position > row.start && position <= row.start + row.size) {
      run(position, block);
    }
  }
}

// Zeros the results [tokens, width] of the tokens that are of no active row.
template <typename T>
void zero_idle(const std::vector<StateRow>& rows, T* out, int64_t tokens, int64_t width) {
  int64_t done = 0;
  const auto zero_to = [&](int64_t token) {
    std::memset(static_cast<void*>(out + done * width), 0, (token - done) * width * sizeof(T));
  };
  for (const StateRow& row : rows) {
    zero_to(row.begin);
    done = row.begin + row.size;
  }
  zero_to(tokens);
}

// Inputs of a convolution by position modulo `size`, in blocks of which the first is zeros.
template <typename T>
struct Rings {
  T* values;  // [blocks, size, channels]; blocks are `block_stride` apart
  int64_t block_stride, size, channels;

  T* at(int64_t block, int64_t position) const {
    return values + block * block_stride + position % size * channels;
  }

  // The inputs before a row, at a position from `size` before its start on.
  const T* before(const StateRow& row, int64_t position) const {
    return position < 0 ? values : at(row.reads, position);
  }

  // Writes the row's saves and its end, of `count` channels from `first` on. copy(token, to) writes
  // those inputs of one of the row's own tokens.
  template <typename Copy>
  void store(
      const StepStates& step, const StateRow& row, int64_t first, int64_t count, Copy copy) const {
    const auto store_at = [&](int64_t end, int64_t block) {
      for (int64_t position = end - size; position < end; ++position) {
        T* const to = at(block, position < 0 ? position + size : position) + first;
        if (position >= row.start) {
          copy(position - row.start, to);
        } else if (const T* const from = before(row, position) + first; from != to) {
          std::memcpy(static_cast<void*>(to), from, count * sizeof(T));
        }
      }
    };
    for_saves(step, row, store_at);
    store_at(row.start + row.size, row.writes);
  }
};

template <typename T>
struct ShortConv {
  const T* projected;  // [tokens, 3 channels]: B, C and x
  const T* weight;     // [kernel_size, channels], contiguous
  const T* bias;       // [channels] or null
  T* out;              // [tokens, channels], contiguous
  Rings<T> rings;      // of B * x
  StepStates step;
  int64_t tokens, kernel_size, projected_stride;
};

// A token's result and the rings depend on its sequence alone, to the last bit.
template <typename T>
void short_conv(const ShortConv<T>& a);

template <typename T>
struct DeltaRule {
  const T* qkv;  // [tokens, channels]: queries and keys of the key heads, values of the heads
  const T* z;    // [tokens, heads * value_dim]
  const T *beta_logits, *decay_inputs;  // [tokens, heads]
  const T* conv_weight;                 // [kernel_size, channels], contiguous
  const float *decay, *dt_bias;         // [heads]
  const float* norm_weight;             // [value_dim]
  T* out;                               // [tokens, heads * value_dim], contiguous
  Rings<T> rings;                       // of qkv
  float* states;  // [blocks, heads, key_dim, value_dim]; blocks are `state_stride` apart
  StepStates step;
  int64_t tokens, key_heads, heads, key_dim, value_dim, kernel_size;
  int64_t qkv_stride, z_stride, beta_stride, decay_stride, state_stride;
  float norm_eps;
  bool sigmoid;  // the activation of z; otherwise SiLU
};

// A token's result and the states depend on its sequence alone, to the last bit.
template <typename T>
void gated_delta_rule(const DeltaRule<T>& a);

template <typename T>
struct SSD {
  const T* inputs;      // [tokens, channels]: x of the heads, B and C of the groups
  const T* time_steps;  // [tokens, heads]
  const T* conv_weight;                 // [kernel_size, channels], contiguous
  const T* conv_bias;                   // [channels] or null
  const float *decay, *dt_bias, *skip;  // [heads]
  float* out;                           // [tokens, heads * value_dim], contiguous
  Rings<T> rings;                       // of inputs
  float* states;  // [blocks, heads, key_dim, value_dim]; blocks are `state_stride` apart
  StepStates step;
  int64_t tokens, groups, heads, key_dim, value_dim, kernel_size;
  int64_t input_stride, time_step_stride, state_stride;
  float least_dt, most_dt;
};

// A token's result and the states depend on its sequence alone, to the last bit.
template <typename T>
void ssd(const SSD<T>& a);

}  // namespace trident
