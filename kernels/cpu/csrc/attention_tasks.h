// How the attention of a step is divided into tasks. For paged_attention.cpp alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "amx.h"
#include "kernels.h"
#include "tile.h"

namespace trident {
namespace {

constexpr int64_t kKeys = 64;         // keys per tile: its keys and values stay in the L2 cache
constexpr int64_t kTaskRows = 128;     // maximum rows per task
constexpr int64_t kRangeKeys = 256;   // below this, splitting costs more than it gains
constexpr int64_t kTasksPerThread = 4;  // so that others take over the tasks of a delayed thread
constexpr float kNothing = -std::numeric_limits<float>::infinity();

constexpr int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

struct Task {
  int64_t sequence;
  int64_t kv_head, kv_heads;    // the first KV head, and the number of them
  int64_t first, count;         // queries, relative to the sequence's first in this step
  int64_t key_begin, key_end;   // positions
  int64_t parts;                // tasks that share the queries; set in the first one
  int64_t partial;              // offset of its partial result; -1: it covers all keys

  int64_t first_tile() const {  // which may begin before the first key
    return key_begin / kKeys * kKeys;
  }
};

template <typename T>
struct Layout {
  bool tiles, splits;         // whether products are on AMX, and keys may be divided
  bool in_place;              // whether tiles can be loaded from the cache
  int64_t group, units, dim;  // padded to whole vectors and panels

  explicit Layout(const PagedAttention<T>& a)
      : tiles(kPairs<T> && has_tiles()),
        splits(a.splits),
        in_place(a.dim % (2 * W) == 0 && a.block_size % kTileRows == 0),
        group(a.heads / a.kv_heads),
        units(round_up(units_of<T>(a.dim), W)),
        dim(round_up(a.dim, kColumns)) {}

  int64_t queries() const {
    return std::max<int64_t>(1, kTaskRows / group);
  }
  // Whether `count` queries are columns of tiles. If they fill one tile at most, they are rows, as a
  // vector would have few of them; but not where a result must not depend on how many there are.
  bool in_columns(int64_t count) const {
    return tiles && (!splits || count * group > kTileRows);
  }
  // Whether they are columns that several KV heads share.
  bool in_groups(int64_t count) const {
    return tiles && !in_columns(count);
  }
  // The KV heads that share a tile of `count` queries. Rows that are copied are of one head.
  int64_t heads_per_tile(int64_t count) const {
    return in_place && in_groups(count) ? kTileRows / (count * group) : 1;
  }
  // Rows of `count` queries for a KV head, with padding to whole tiles.
  int64_t places(int64_t count) const {
    return tiles ? round_up(count * group, kTileRows) : count * group;
  }
  // Sum of values, maximum and sum of weights per row.
  int64_t partial_size(int64_t count) const {
    return count * group * (dim + 2);
  }
};

// The longest tasks of a sequence, its last queries, come first. `most_heads` limits KV heads.
template <typename T>
std::vector<Task> whole_tasks(
    const PagedAttention<T>& a, const Layout<T>& layout, int64_t most_heads) {
  std::vector<Task> tasks;
  for (int64_t i = 0; i < a.sequences; ++i) {
    const int64_t length = a.seq_lens[i];
    if (length == 0) {
      continue;
    }
    const int64_t total = a.query_start_loc[i + 1] - a.query_start_loc[i];
    const int64_t tiles = (total + layout.queries() - 1) / layout.queries();
    for (int64_t tile = tiles - 1; tile >= 0; --tile) {
      const int64_t first = tile * layout.queries();
      const int64_t count = std::min(layout.queries(), total - first);
      const int64_t position = length - total + first;
      const int64_t begin = a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;
      const int64_t heads =
          std::clamp<int64_t>(kTaskRows / layout.places(count), 1, most_heads);
      for (int64_t head = 0; head < a.kv_heads; head += heads) {
        const int64_t some = std::min(heads, a.kv_heads - head);
        tasks.push_back({i, head, some, first, count, begin, position + count, 1, -1});
      }
    }
  }
  return tasks;
}

// Splits the keys of each task, which has one KV head, into parts, and assigns their partial
// results offsets from `size` on.
template <typename T>
std::vector<Task> split_tasks(
    const std::vector<Task>& tasks, const Layout<T>& layout, int64_t wanted, int64_t& size) {
  std::vector<Task> out;
  for (Task task : tasks) {
    const int64_t begin = task.first_tile(), keys = task.key_end - begin;
    const int64_t most = std::max<int64_t>(1, keys / kRangeKeys);
    const int64_t length = round_up((keys - 1) / std::min(wanted, most) + 1, kKeys);
    task.parts = (keys + length - 1) / length;
    if (task.parts == 1) {
      out.push_back(task);
      continue;
    }
    for (int64_t part = 0; part < task.parts; ++part) {
      task.key_begin = std::max(task.key_begin, begin + part * length);
      task.key_end = begin + std::min(keys, (part + 1) * length);
      task.partial = size;
      size += layout.partial_size(task.count);
      out.push_back(task);
    }
  }
  return out;
}

}  // namespace
}  // namespace trident
