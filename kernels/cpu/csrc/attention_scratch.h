// Memory that the threads of attention work in. For paged_attention.cpp alone.
#pragma once

#include <cstdint>
#include <iterator>

#include "aligned.h"
#include "attention_tasks.h"

namespace trident {
namespace {

using Floats = Aligned<float>;

// Returns memory of this thread, which is that of its last call: the heap would be tidied up whenever
// so much is freed, in every layer.
inline float* thread_memory(int64_t count) {
  thread_local Floats memory;
  thread_local int64_t size = 0;
  if (count > size) {
    memory = aligned<float>(count);
    size = count;
  }
  return memory.get();
}

// Buffers of one thread, which has one such object at a time.
template <typename T>
struct Scratch {
  float *query, *keys, *values, *scores, *weights, *out, *columns, *maximum, *sum, *keep;

  explicit Scratch(const Layout<T>& layout) {
    const int64_t rows = std::max(kTaskRows, round_up(layout.group, kTileRows));
    const int64_t sizes[] = {
        rows * layout.units, kKeys * layout.units, kKeys * layout.dim, rows * kKeys,
        layout.tiles ? 2 * kTileRows * kKeys : 0, rows * layout.dim, layout.tiles ? rows * layout.dim : 0, rows, rows, rows};
    float** const parts[] = {&query,   &keys, &values, &scores, &weights,
                             &out, &columns, &maximum, &sum, &keep};
    int64_t total = 0;
    for (const int64_t size : sizes) {
      total += round_up(size, 16);
    }
    float* next = thread_memory(total);
    for (size_t i = 0; i < std::size(sizes); ++i) {
      *parts[i] = next;
      next += round_up(sizes[i], 16);
    }
  }
};

}  // namespace
}  // namespace trident
