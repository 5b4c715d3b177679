// Where the keys and values of a tile are, and their memory. For paged_attention.cpp and what it
// includes alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_packing.h"
#include "attention_tasks.h"
#include "kernels.h"

namespace trident {
namespace {

struct KeyRows {
  int64_t rows[kKeys];  // offsets into the caches: the task's first KV head of each key
  int64_t count = 0, kv_heads = 0;
  int64_t skipped;      // keys that no query of the task sees
};

// Computes the offsets of a tile from the block table. Keys that no query of the task sees may not
// exist: the first one that exists takes their places.
template <typename T>
void locate(const PagedAttention<T>& a, const Task& task, int64_t key, KeyRows& tile) {
  const int32_t* table = a.block_tables + task.sequence * a.table_stride;
  const int64_t first = std::max(key, task.key_begin);
  int64_t block = first / a.block_size, place = first % a.block_size;
  tile.kv_heads = task.kv_heads;
  tile.skipped = first - key;
  tile.count = std::min(kKeys, task.key_end - key);
  for (int64_t j = first - key; j < tile.count; ++j) {
    const int64_t slot = table[block] * a.block_size + place;
    tile.rows[j] = (slot * a.kv_heads + task.kv_head) * a.dim;
    if (++place == a.block_size) {
      place = 0;
      ++block;
    }
  }
  std::fill_n(tile.rows, first - key, tile.rows[first - key]);
}

// Prefetches `heads` KV heads of keys [begin, end) from one of the caches: hardware prefetchers do
// not follow scattered blocks. Call for a few keys at a time, as fill buffers are few; into L2, as a
// tile would fill L1.
template <typename T>
void prefetch(
    const PagedAttention<T>& a, const KeyRows& tile, const T* cache, int64_t head, int64_t heads,
    int64_t begin, int64_t end) {
  constexpr int64_t kLine = 64 / sizeof(T);
  const int64_t values = std::min(heads, tile.kv_heads - head) * a.dim;
  for (int64_t j = begin; j < std::min(end, tile.count); ++j) {
    const T* row = cache + tile.rows[j] + head * a.dim;
    for (int64_t i = 0; i < values; i += kLine) {
      // GCC 12 sees no effect in a function that only has __builtin_prefetch, and drops it.
      asm volatile("prefetcht1 %0" : : "m"(row[i]));
    }
  }
}

// Copies a head's rows of a tile, each with `units` units, zero-padded; zeros for rows that there
// are not. `from` is the first task's head in one of the caches.
template <typename T>
void copy_rows(const KeyRows& tile, const T* from, int64_t dim, int64_t units, float* to) {
  for (int64_t j = 0; j < round_up(tile.count, kTileRows); ++j) {
    const bool is_there = j >= tile.skipped && j < tile.count;
    for (int64_t u = 0; u < units; u += W) {
      const Vec some = is_there ? load_units(from + tile.rows[j], u, dim) : Vec(0.0f);
      some.store(to + j * units + u);
    }
  }
}

// Where each 16 keys of a tile are.
struct KeyRuns {
  const char* keys[kKeys / kTileRows];
  int64_t row_bytes;
};

// Returns the runs of a head of a tile: in the cache, at `from`, if tiles can be loaded from there;
// or else copied to `to`. A run has keys that do not exist if one of the 16 does, and takes the place
// of one that has none.
template <typename T>
KeyRuns key_runs(
    const PagedAttention<T>& a, const Layout<T>& layout, const KeyRows& tile, const T* from,
    float* to) {
  KeyRuns runs;
  if (!layout.in_place) {
    copy_rows(tile, from, a.dim, layout.units, to);
  }
  const int64_t stride = a.kv_heads * a.dim;
  runs.row_bytes = layout.in_place ? stride * sizeof(T) : layout.units * sizeof(float);
  for (int64_t i = 0; i < kKeys / kTileRows; ++i) {
    const int64_t j = std::clamp(i * kTileRows, tile.skipped, tile.count - 1);
    runs.keys[i] = layout.in_place
        ? reinterpret_cast<const char*>(from + tile.rows[j] - j % kTileRows * stride)
        : reinterpret_cast<const char*>(to + i * kTileRows * layout.units);
  }
  return runs;
}

}  // namespace
}  // namespace trident
