// Causal attention over the paged cache, in place (online softmax: Milakov and Gimelshein, 2018;
// FlashAttention, Dao et al., 2022; ranges of keys: Flash-Decoding, 2023).
//
// A task is a few queries of one sequence for one or more adjacent KV heads, as many as fit. The
// query heads of a group, which share keys, are rows of the same product. Keys are processed in
// tiles, gathered from the blocks they are in. If there are too few tasks for the threads, each
// task gets one KV head and, if that is not enough, only a range of the keys (split-KV).
//
// Tiles begin at multiples of kKeys, and keys of a tile that a query does not see add exact zeros.
// So without ranges a query's result does not depend on the chunk that it is computed with.
#include <ATen/Parallel.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "attention_groups.h"
#include "attention_keys.h"
#include "attention_packing.h"
#include "attention_scratch.h"
#include "attention_tasks.h"
#include "attention_tiles.h"
#include "exponential.h"
#include "kernels.h"
#include "shares.h"
#include "tile.h"

// One thread's part of attention: tiles of keys and values, the online softmax, and the merging of
// partial results.
// A tile of keys and its values for queries that are rows.
namespace trident {
namespace {

template <typename T>
class RowAttention {
 public:
  RowAttention(const PagedAttention<T>& a, const Layout<T>& layout, const Scratch<T>& s)
      : a_(a), layout_(layout), s_(s) {}

  // Adds the tile, whose first position is `key`, to the results of a KV head's rows, of which the
  // query of the first is at `position`. Calls fetch(cache, head, begin, end) for keys begin to end of
  // the next tile, a few at a time.
  void attend(
      const KeyRows& tile, int64_t head, int64_t first, int64_t rows, int64_t key,
      int64_t position, const auto& fetch) {
    const int64_t columns = round_up(tile.count, kColumns);
    pack_keys(tile, head, columns, fetch);
    score(first, rows, columns);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t own = position + row / layout_.group;
      const int64_t low = a_.window ? std::max<int64_t>(0, own - a_.window + 1 - key) : 0;
      softmax(
          s_.scores + row * kKeys, first + row, std::min(low, tile.count),
          std::clamp<int64_t>(own + 1 - key, 0, tile.count));
    }
    pack_values(tile, head, fetch);
    add_values(first, rows, tile.count);
  }

 private:
  int64_t units() const {
    return units_of<T>(a_.dim);
  }

  void score(int64_t first, int64_t rows, int64_t columns) {
    const float* query = s_.query + first * layout_.units;
    multiply<kPairs<T>>(
        rows, query, layout_.units, s_.keys, kKeys, units(), columns, s_.scores, kKeys, nullptr);
  }

  void add_values(int64_t first, int64_t rows, int64_t keys) {
    float* out = s_.out + first * layout_.dim;
    multiply<kPairs<T>>(
        rows, s_.scores, kKeys, s_.values, layout_.dim, units_of<T>(keys), layout_.dim, out,
        layout_.dim, s_.keep + first);
  }

  // Transposes keys into columns, W at a time, and prefetches as many of the next tile; the last
  // call prefetches the rest.
  void pack_keys(const KeyRows& tile, int64_t head, int64_t columns, const auto& fetch) {
    for (int64_t j = 0; j < columns; j += W) {
      fetch(a_.key_cache, head, j, j + W < columns ? j + W : kKeys);
      const int64_t some = std::clamp<int64_t>(tile.count - j, 0, W);
      for (int64_t u = 0; u < units(); u += W) {
        Vec rows[W];
#pragma GCC unroll 16
        for (int64_t i = 0; i < W; ++i) {
          const T* row = a_.key_cache + tile.rows[j + i] + head * a_.dim;
          rows[i] = i < some ? load_units(row, u, a_.dim) : Vec(0.0f);
        }
        store_transposed(rows, s_.keys + u * kKeys + j, kKeys);
      }
    }
  }

  // Packs values into rows of units, zeros for keys that there are not, and prefetches those of the
  // next tile likewise.
  void pack_values(const KeyRows& tile, int64_t head, const auto& fetch) {
    const T* values = a_.value_cache + head * a_.dim;
    const int64_t count = tile.count;
    for (int64_t j = 0; j < count; j += kPerUnit<T>) {
      fetch(a_.value_cache, head, j, j + kPerUnit<T> < count ? j + kPerUnit<T> : kKeys);
      const T* second = j + 1 < count ? values + tile.rows[j + 1] : nullptr;
      for (int64_t i = 0; i < layout_.dim; i += 2 * W) {
        Vec left, right;
        pair_units(values + tile.rows[j], second, i, a_.dim, left, right);
        float* to = s_.values + j / kPerUnit<T> * layout_.dim + i;
        left.store(to);
        right.store(to + W);
      }
    }
  }

  // Turns a row's scores into weights for keys [low, high) of the tile; the others get 0.
  void softmax(float* scores, int64_t row, int64_t low, int64_t high) {
    if (low >= high) {
      std::fill_n(scores, kKeys, 0.0f);
      s_.keep[row] = 1.0f;
      return;
    }
    Vec scale(a_.scale);
    if (a_.soft_cap > 0) {
      const Vec inner(a_.scale / a_.soft_cap), cap(a_.soft_cap);
      for (int64_t j = 0; j < kKeys; j += W) {
        ((Vec::loadu(scores + j) * inner).tanh() * cap).store(scores + j);
      }
      scale = Vec(1.0f);
    }
    std::fill_n(scores, low, kNothing);
    std::fill(scores + high, scores + kKeys, kNothing);
    Vec values[kKeys / W];
    Vec largest(kNothing);
    for (int64_t i = 0; i < kKeys / W; ++i) {
      values[i] = Vec::loadu(scores + i * W) * scale;
      largest = at::vec::clamp_min(values[i], largest);
    }
    const float before = s_.maximum[row], maximum = std::max(before, largest.reduce_max());
    const Vec shift(maximum);
    Vec sum(0.0f);
    for (int64_t i = 0; i < kKeys / W; i += 2) {
      const Vec left = exponential<T>(values[i] - shift);
      const Vec right = exponential<T>(values[i + 1] - shift);
      sum += left + right;
      store_units<T>(scores + i * W / kPerUnit<T>, left, right);
    }
    s_.keep[row] = maximum == before ? 1.0f : std::exp(before - maximum);
    s_.sum[row] = s_.sum[row] * s_.keep[row] + sum.reduce_add();
    s_.maximum[row] = maximum;
  }

  const PagedAttention<T>& a_;
  const Layout<T>& layout_;
  const Scratch<T>& s_;
};

}  // namespace
}  // namespace trident

namespace trident {
namespace {

template <typename T>
class Worker {
 public:
  Worker(const PagedAttention<T>& a, const Layout<T>& layout, float* partials)
      : a_(a), layout_(layout), partials_(partials), s_(layout) {
#ifdef TRIDENT_TILES
    if (layout.tiles) {
      tiles_in_use_.emplace(kTileRows);
    }
#endif
  }

  // `next` is the task that this worker will probably run next, or null.
  void run(const Task& task, const Task* next) {
    const int64_t head_rows = task.count * layout_.group;
    const int64_t head_places = layout_.places(task.count), places = task.kv_heads * head_places;
    const int64_t query_start = a_.query_start_loc[task.sequence];
    const int64_t total = a_.query_start_loc[task.sequence + 1] - query_start;
    const int64_t position = a_.seq_lens[task.sequence] - total + task.first;  // of row 0
    if (located_ != &task) {
      locate(a_, task, task.first_tile(), ahead_);
      fetch(a_.key_cache, 0, task.kv_heads, 0, kKeys);
      fetch(a_.value_cache, 0, task.kv_heads, 0, kKeys);
    }
    located_ = next;
    std::fill_n(s_.maximum, places, kNothing);
    std::fill_n(s_.sum, places, 0.0f);
    std::fill_n(layout_.tiles ? s_.columns : s_.out, places * layout_.dim, 0.0f);
    if (layout_.in_groups(task.count)) {
      attend_in_groups(task, next, query_start, position);
    } else {
      pack_queries(task, query_start);
      for_each_tile(task, next, [&](int64_t key) {
        for (int64_t head = 0; head < task.kv_heads; ++head) {
          if (layout_.tiles) {
            attend_in_columns(head, head_places, head_rows, key, position);
          } else {
            attend_in_rows(head, head_rows, key, position);
          }
        }
      });
    }
    if (layout_.in_columns(task.count)) {
      for (int64_t first = 0; first < places; first += head_places) {
        const int64_t at = first * layout_.dim;
        transpose(s_.columns + at, layout_.dim, head_places, s_.out + at);
      }
    }
    if (task.partial < 0) {
      for (int64_t row = 0; row < task.kv_heads * head_rows; ++row) {
        const int64_t at = place(task, row);
        write(task, query_start, row, s_.out + at * layout_.dim, s_.sum[at], s_.maximum[at]);
      }
    } else {
      const int64_t rows = head_rows;  // there is one KV head
      float* partial = partials_ + task.partial;
      std::copy_n(s_.out, rows * layout_.dim, partial);
      std::copy_n(s_.maximum, rows, partial + rows * layout_.dim);
      std::copy_n(s_.sum, rows, partial + rows * (layout_.dim + 1));
    }
  }

  // Merges the partial results of a task and the following ones, which share its queries.
  void merge(const Task& task) {
    const int64_t rows = task.count * layout_.group, dim = layout_.dim;
    const int64_t size = layout_.partial_size(task.count);
    const float* partials = partials_ + task.partial;
    for (int64_t row = 0; row < rows; ++row) {
      float maximum = kNothing;
      for (int64_t part = 0; part < task.parts; ++part) {
        maximum = std::max(maximum, partials[part * size + rows * dim + row]);
      }
      float sum = 0;
      std::fill_n(s_.out, dim, 0.0f);
      for (int64_t part = 0; part < task.parts; ++part) {
        const float* partial = partials + part * size;
        const float factor = std::exp(partial[rows * dim + row] - maximum);
        sum += factor * partial[rows * (dim + 1) + row];
        for (int64_t i = 0; i < dim; ++i) {
          s_.out[i] += factor * partial[row * dim + i];
        }
      }
      write(task, a_.query_start_loc[task.sequence], row, s_.out, sum, maximum);
    }
  }

 private:
  int64_t units() const {
    return units_of<T>(a_.dim);
  }

  // Rows are ordered by KV head, query and head of the group.
  int64_t head_of(const Task& task, int64_t row) const {
    return (task.kv_head + row / (task.count * layout_.group)) * layout_.group + row % layout_.group;
  }

  int64_t offset(const Task& task, int64_t query_start, int64_t row) const {
    const int64_t head_rows = task.count * layout_.group;
    const int64_t token = query_start + task.first + row % head_rows / layout_.group;
    return (token * a_.heads + head_of(task, row)) * a_.dim;
  }

  // Where a row is in the buffers: those of a KV head are padded to whole tiles.
  int64_t place(const Task& task, int64_t row) const {
    const int64_t head_rows = task.count * layout_.group;
    const int64_t heads = layout_.heads_per_tile(task.count), head = row / head_rows;
    return head / heads * layout_.places(task.count) + head % heads * head_rows + row % head_rows;
  }

  void pack_queries(const Task& task, int64_t query_start) {
    const int64_t head_rows = task.count * layout_.group, places = layout_.places(task.count);
    const auto query = [&](int64_t head, int64_t r) {
      return a_.query + offset(task, query_start, head * head_rows + r);
    };
    for (int64_t head = 0; head < task.kv_heads; ++head) {
      float* const to = s_.query + head * places * layout_.units;
      for (int64_t u = 0; u < units(); u += W) {
        if (!layout_.in_columns(task.count)) {
          for (int64_t r = 0; r < head_rows; ++r) {
            load_units(query(head, r), u, a_.dim).store(to + r * layout_.units + u);
          }
          continue;
        }
        for (int64_t r = 0; r < places; r += W) {
          Vec rows[W];
          for (int64_t i = 0; i < W; ++i) {
            rows[i] = r + i < head_rows ? load_units(query(head, r + i), u, a_.dim) : Vec(0.0f);
          }
          store_transposed(rows, to + u * places + r, places);
        }
      }
    }
  }

  // Writes a matrix of whole vectors of rows and columns, transposed.
  static void transpose(const float* from, int64_t rows, int64_t columns, float* to) {
    for (int64_t row = 0; row < rows; row += W) {
      for (int64_t column = 0; column < columns; column += W) {
        Vec some[W];
        for (int64_t i = 0; i < W; ++i) {
          some[i] = Vec::loadu(from + (row + i) * columns + column);
        }
        store_transposed(some, to + column * rows + row, rows);
      }
    }
  }

  // Calls attend(key) for the first position of each tile, with the next one located.
  void for_each_tile(const Task& task, const Task* next, const auto& attend) {
    for (int64_t key = task.first_tile(); key < task.key_end; key += kKeys) {
      std::swap(tile_, ahead_);
      if (key + kKeys < task.key_end) {
        locate(a_, task, key + kKeys, ahead_);
      } else if (next != nullptr) {
        locate(a_, *next, next->first_tile(), ahead_);
      } else {
        ahead_.count = 0;
      }
      attend(key);
    }
  }

  // Prefetches keys [begin, end) of the next tile.
  void fetch(const T* cache, int64_t head, int64_t heads, int64_t begin, int64_t end) const {
    prefetch(a_, ahead_, cache, head, heads, begin, end);
  }

  // Adds the tile, whose first position is `key`, to the results of a KV head's rows.
  void attend_in_rows(int64_t head, int64_t rows, int64_t key, int64_t position) {
    RowAttention<T>(a_, layout_, s_)
        .attend(
            tile_, head, head * rows, rows, key, position,
            [&](const T* cache, int64_t of, int64_t begin, int64_t end) {
              fetch(cache, of, 1, begin, end);
            });
  }

  void attend_in_groups(
      [[maybe_unused]] const Task& task, [[maybe_unused]] const Task* next,
      [[maybe_unused]] int64_t query_start, [[maybe_unused]] int64_t position) {
#ifdef TRIDENT_TILES
    if constexpr (kPairs<T>) {
      GroupAttention<T> groups(a_, layout_, s_, task, position);
      groups.pack_queries([&](int64_t head, int64_t row) {
        return a_.query + offset(task, query_start, head * task.count * layout_.group + row);
      });
      for_each_tile(task, next, [&](int64_t key) {
        groups.attend(tile_, key, [&](int64_t head, int64_t heads, int64_t j, int64_t end) {
          for (; j < end; ++j) {  // both caches at the same pace
            fetch(a_.key_cache, head, heads, j, j + 1);
            fetch(a_.value_cache, head, heads, j, j + 1);
          }
        });
      });
      groups.finish();
    }
#endif
  }

  // Adds the tile, whose first position is `key`, to the results of a KV head's rows, as columns.
  void attend_in_columns(
      [[maybe_unused]] int64_t head, [[maybe_unused]] int64_t places,
      [[maybe_unused]] int64_t rows, [[maybe_unused]] int64_t key,
      [[maybe_unused]] int64_t position) {
#ifdef TRIDENT_TILES
    if constexpr (kPairs<T>) {
      const T* const values = a_.value_cache + head * a_.dim;
      TileAttention<T> tiles(a_, layout_, s_);
      tiles.pack_values(
          tile_.count, [&](int64_t j) { return values + tile_.rows[j]; },
          [&](int64_t j) {
            const int64_t end = j + 2 < tile_.count ? j + 2 : kKeys;
            fetch(a_.key_cache, head, 1, j, end);
            fetch(a_.value_cache, head, 1, j, end);
          });
      const int64_t first = head * places;
      const QueryColumns columns{
          s_.query + first * layout_.units, s_.columns + first * layout_.dim, s_.maximum + first,
          s_.sum + first, rows, places, position};
      const KeyRuns runs = key_runs(a_, layout_, tile_, a_.key_cache + head * a_.dim, s_.keys);
      tiles.attend(columns, {runs, key, tile_.count});
    }
#endif
  }

  void write(
      const Task& task, int64_t query_start, int64_t row, const float* from, float sum,
      float maximum) {
    if (a_.sinks != nullptr) {
      sum += std::exp(a_.sinks[head_of(task, row)] - maximum);
    }
    T* to = a_.out + offset(task, query_start, row);
    const Vec factor(1.0f / sum);
    for (int64_t i = 0; i < a_.dim; i += W) {
      store(to + i, Vec::loadu(from + i) * factor, std::min(W, a_.dim - i));
    }
  }

  const PagedAttention<T>& a_;
  const Layout<T>& layout_;
  float* partials_;
  Scratch<T> s_;
#ifdef TRIDENT_TILES
  std::optional<TilesInUse> tiles_in_use_;
#endif
  KeyRows tile_, ahead_;
  const Task* located_ = nullptr;  // task whose first tile is already located and prefetched
};

}  // namespace
}  // namespace trident

namespace trident {

template <typename T>
void paged_attention(const PagedAttention<T>& a) {
  const Layout<T> layout(a);
  const int64_t wanted = kTasksPerThread * at::get_num_threads();
  const auto too_few = [&](const auto& tasks) { return std::ssize(tasks) < wanted; };
  std::vector<Task> tasks = whole_tasks(a, layout, a.kv_heads);
  int64_t partial_size = 0;
  if (too_few(tasks)) {
    tasks = whole_tasks(a, layout, 1);
  }
  if (a.splits && !tasks.empty() && too_few(tasks)) {
    tasks = split_tasks(tasks, layout, (wanted - 1) / std::ssize(tasks) + 1, partial_size);
  }
  const Floats partials = aligned<float>(partial_size);
  const auto worker = [&] { return Worker<T>(a, layout, partials.get()); };
  const int64_t all = tasks.size();
  share_out(all, [&] {
    return [&, worker = worker()](int64_t i) mutable {
      worker.run(tasks[i], i + 1 < all ? &tasks[i + 1] : nullptr);
    };
  });
  if (partial_size > 0) {
    std::vector<Task> split;
    for (size_t i = 0; i < tasks.size(); i += tasks[i].parts) {
      if (tasks[i].parts > 1) {
        split.push_back(tasks[i]);
      }
    }
    share_out(split.size(), [&] {
      return [&, worker = worker()](int64_t i) mutable { worker.merge(split[i]); };
    });
  }
}

#define INSTANTIATE(T) template void paged_attention(const PagedAttention<T>&);
TRIDENT_FOR_EACH_DTYPE(INSTANTIATE)

}  // namespace trident
