// Causal attention over the paged cache, in place (online softmax: Milakov and Gimelshein, 2018;
// FlashAttention, Dao et al., 2022; ranges of keys: Flash-Decoding, 2023).
//
// A task is a few queries of one sequence for one or more adjacent KV heads, as many as fit. The
// query heads of a group, which share keys, are rows of the same product. Keys are processed in
// tiles, gathered from the blocks they are in. If there are too few tasks for the threads, each
// task gets one KV head and, if that is not enough, only a range of the keys (split-KV).
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

#include "kernels.h"
#include "shares.h"
#include "tile.h"

namespace trident {
namespace {

constexpr int64_t kKeys = 64;         // keys per tile: its keys and values stay in the L2 cache
constexpr int64_t kTaskRows = 64;     // maximum rows per task
constexpr int64_t kRangeKeys = 256;   // below this, splitting costs more than it gains
constexpr int64_t kTasksPerThread = 4;  // so that others take over the tasks of a delayed thread
constexpr float kNothing = -std::numeric_limits<float>::infinity();

constexpr int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

struct Free {
  void operator()(float* memory) const {
    std::free(memory);
  }
};
using Floats = std::unique_ptr<float[], Free>;

// Uninitialised and aligned to cache lines.
Floats floats(int64_t count) {
  void* memory = std::aligned_alloc(64, round_up(count * sizeof(float), 64));
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return Floats(static_cast<float*>(memory));
}

struct Task {
  int64_t sequence;
  int64_t kv_head, kv_heads;    // the first KV head, and the number of them
  int64_t first, count;         // queries, relative to the sequence's first in this step
  int64_t key_begin, key_end;   // positions
  int64_t parts;                // tasks that share the queries; set in the first one
  int64_t partial;              // offset of its partial result; -1: it covers all keys
};

template <typename T>
struct Layout {
  int64_t group, units, dim;  // padded to whole vectors and panels

  explicit Layout(const PagedAttention<T>& a)
      : group(a.heads / a.kv_heads),
        units(round_up(units_of<T>(a.dim), W)),
        dim(round_up(a.dim, kColumns)) {}

  int64_t queries() const {
    return std::max<int64_t>(1, kTaskRows / group);
  }
  // Sum of values, maximum and sum of weights per row.
  int64_t partial_size(int64_t count) const {
    return count * group * (dim + 2);
  }
};

// Buffers of one thread.
template <typename T>
struct Scratch {
  Floats memory;
  float *query, *keys, *values, *scores, *out, *maximum, *sum, *keep;

  explicit Scratch(const Layout<T>& layout) {
    const int64_t rows = layout.queries() * layout.group;
    const int64_t sizes[] = {
        rows * layout.units, kKeys * layout.units, kKeys * layout.dim, rows * kKeys,
        rows * layout.dim, rows, rows, rows};
    float** const parts[] = {&query, &keys, &values, &scores, &out, &maximum, &sum, &keep};
    int64_t total = 0;
    for (const int64_t size : sizes) {
      total += round_up(size, 16);
    }
    memory = floats(total);
    float* next = memory.get();
    for (size_t i = 0; i < std::size(sizes); ++i) {
      *parts[i] = next;
      next += round_up(sizes[i], 16);
    }
  }
};

// W units of a row of `dim` values, from unit u on; zero-padded.
template <typename T>
inline Vec load_units(const T* row, int64_t u, int64_t dim) {
  const int64_t left = dim - u * kPerUnit<T>;
  if constexpr (kPairs<T>) {
    if (left >= 2 * W) {
      return Vec::loadu(reinterpret_cast<const float*>(row + 2 * u));
    }
    T whole[2 * W] = {};
    std::memcpy(whole, row + 2 * u, left * sizeof(T));
    return Vec::loadu(reinterpret_cast<const float*>(whole));
  } else {
    return widen(row + u, std::min(W, left));
  }
}

template <typename T>
class Worker {
 public:
  Worker(const PagedAttention<T>& a, const Layout<T>& layout, float* partials)
      : a_(a), layout_(layout), partials_(partials), s_(layout) {}

  // `next` is the task that this worker will probably run next, or null.
  void run(const Task& task, const Task* next) {
    const int64_t head_rows = task.count * layout_.group, rows = task.kv_heads * head_rows;
    const int64_t query_start = a_.query_start_loc[task.sequence];
    const int64_t total = a_.query_start_loc[task.sequence + 1] - query_start;
    const int64_t position = a_.seq_lens[task.sequence] - total + task.first;  // of row 0
    if (located_ != &task) {
      locate(task, task.key_begin);
      for (int64_t head = 0; head < task.kv_heads; ++head) {
        fetch(a_.key_cache, head, 0, kKeys);
        fetch(a_.value_cache, head, 0, kKeys);
      }
    }
    located_ = next;
    pack_queries(task, query_start, rows);
    std::fill_n(s_.maximum, rows, kNothing);
    std::fill_n(s_.sum, rows, 0.0f);
    std::fill_n(s_.out, rows * layout_.dim, 0.0f);
    for (int64_t key = task.key_begin; key < task.key_end; key += kKeys) {
      std::swap(tile_, ahead_);
      if (key + kKeys < task.key_end) {
        locate(task, key + kKeys);
      } else if (next != nullptr) {
        locate(*next, next->key_begin);
      } else {
        ahead_.count = 0;
      }
      for (int64_t head = 0; head < task.kv_heads; ++head) {
        attend(head, head * head_rows, head_rows, key, position);
      }
    }
    if (task.partial < 0) {
      for (int64_t row = 0; row < rows; ++row) {
        write(task, query_start, row, s_.out + row * layout_.dim, s_.sum[row]);
      }
    } else {
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
      write(task, a_.query_start_loc[task.sequence], row, s_.out, sum);
    }
  }

 private:
  int64_t units() const {
    return units_of<T>(a_.dim);
  }

  // Rows are ordered by KV head, query and head of the group.
  int64_t offset(const Task& task, int64_t query_start, int64_t row) const {
    const int64_t group = layout_.group, head_rows = task.count * group;
    const int64_t token = query_start + task.first + row % head_rows / group;
    const int64_t head = (task.kv_head + row / head_rows) * group + row % group;
    return (token * a_.heads + head) * a_.dim;
  }

  void pack_queries(const Task& task, int64_t query_start, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) {
      const T* query = a_.query + offset(task, query_start, row);
      for (int64_t u = 0; u < units(); u += W) {
        load_units(query, u, a_.dim).store(s_.query + row * layout_.units + u);
      }
    }
  }

  // Computes the offsets of the next tile's keys from the block table.
  void locate(const Task& task, int64_t key) {
    const int32_t* table = a_.block_tables + task.sequence * a_.table_stride;
    int64_t block = key / a_.block_size, place = key % a_.block_size;
    ahead_.kv_heads = task.kv_heads;
    ahead_.count = std::min(kKeys, task.key_end - key);
    for (int64_t j = 0; j < ahead_.count; ++j) {
      const int64_t slot = table[block] * a_.block_size + place;
      ahead_.rows[j] = (slot * a_.kv_heads + task.kv_head) * a_.dim;
      if (++place == a_.block_size) {
        place = 0;
        ++block;
      }
    }
  }

  // Prefetches keys [begin, end) of the next tile from one of the caches: hardware prefetchers do
  // not follow scattered blocks. Call for a few keys at a time, as fill buffers are few; into L2,
  // as a tile would fill L1.
  void fetch(const T* cache, int64_t head, int64_t begin, int64_t end) const {
    constexpr int64_t kLine = 64 / sizeof(T);
    if (head >= ahead_.kv_heads) {
      return;
    }
    for (int64_t j = begin; j < std::min(end, ahead_.count); ++j) {
      for (int64_t i = 0; i < a_.dim; i += kLine) {
        // GCC 12 sees no effect in a function that only has __builtin_prefetch, and drops it.
        asm volatile("prefetcht1 %0" : : "m"(cache[ahead_.rows[j] + head * a_.dim + i]));
      }
    }
  }

  // Adds the tile, whose first position is `key`, to the results of a KV head's rows.
  void attend(int64_t head, int64_t first, int64_t rows, int64_t key, int64_t position) {
    const int64_t columns = round_up(tile_.count, kColumns);
    pack_keys(head, columns);
    multiply<kPairs<T>>(
        rows, s_.query + first * layout_.units, layout_.units, s_.keys, kKeys, units(), columns,
        s_.scores, kKeys, nullptr);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t own = position + row / layout_.group;
      const int64_t low = a_.window ? std::max<int64_t>(0, own - a_.window + 1 - key) : 0;
      softmax(
          s_.scores + row * kKeys, first + row, std::min(low, tile_.count),
          std::clamp<int64_t>(own + 1 - key, 0, tile_.count), columns);
    }
    pack_values(head);
    multiply<kPairs<T>>(
        rows, s_.scores, kKeys, s_.values, layout_.dim, units_of<T>(tile_.count), layout_.dim,
        s_.out + first * layout_.dim, layout_.dim, s_.keep + first);
  }

  // Transposes keys into columns, W at a time, and prefetches as many of the next tile; the last
  // call prefetches the rest.
  void pack_keys(int64_t head, int64_t columns) {
    alignas(64) float square[W * W];
    for (int64_t j = 0; j < columns; j += W) {
      fetch(a_.key_cache, head, j, j + W < columns ? j + W : kKeys);
      const int64_t some = std::clamp<int64_t>(tile_.count - j, 0, W);
      for (int64_t u = 0; u < units(); u += W) {
        for (int64_t i = 0; i < some; ++i) {
          const T* row = a_.key_cache + tile_.rows[j + i] + head * a_.dim;
          load_units(row, u, a_.dim).store(square + i * W);
        }
        for (int64_t i = some; i < W; ++i) {
          Vec(0.0f).store(square + i * W);
        }
        at::vec::transpose_mxn<float, W, W>(square, W, s_.keys + u * kKeys + j, kKeys);
      }
    }
  }

  // Packs values into rows of units, and prefetches those of the next tile likewise.
  void pack_values(int64_t head) {
    const T* values = a_.value_cache + head * a_.dim;
    const int64_t count = tile_.count;
    for (int64_t j = 0; j < count; j += kPerUnit<T>) {
      fetch(a_.value_cache, head, j, j + kPerUnit<T> < count ? j + kPerUnit<T> : kKeys);
      const T* first = values + tile_.rows[j];
      const T* second = j + 1 < count ? values + tile_.rows[j + 1] : nullptr;
      float* to = s_.values + j / kPerUnit<T> * layout_.dim;
      for (int64_t i = 0; i < a_.dim; i += W) {
        const T* behind = second == nullptr ? nullptr : second + i;
        column_units(first + i, behind, std::min(W, a_.dim - i)).store(to + i);
      }
      std::fill(to + round_up(a_.dim, W), to + layout_.dim, 0.0f);
    }
  }

  // Accurate to 20 bits if the result is rounded to fewer.
  static Vec exponential(const Vec& x) {
    if constexpr (std::is_same_v<T, float>) {
      return x.exp();
    } else {
      return x.exp_u20();
    }
  }

  // Turns a row's scores into weights for keys [low, high) of the tile; the others get 0.
  void softmax(float* scores, int64_t row, int64_t low, int64_t high, int64_t columns) {
    if (low >= high) {
      std::fill_n(scores, columns, 0.0f);
      s_.keep[row] = 1.0f;
      return;
    }
    std::fill_n(scores, low, kNothing);
    std::fill(scores + high, scores + columns, kNothing);
    const Vec scale(a_.scale);
    Vec largest(kNothing);
    for (int64_t j = 0; j < columns; j += W) {
      largest = at::vec::clamp_min(Vec::loadu(scores + j) * scale, largest);
    }
    const float before = s_.maximum[row], maximum = std::max(before, largest.reduce_max());
    const Vec shift(maximum);
    Vec sum(0.0f);
    for (int64_t j = 0; j < columns; j += 2 * W) {
      const Vec left = exponential(Vec::loadu(scores + j) * scale - shift);
      const Vec right = exponential(Vec::loadu(scores + j + W) * scale - shift);
      sum += left + right;
      store_units<T>(scores + j / kPerUnit<T>, left, right);
    }
    s_.keep[row] = maximum == before ? 1.0f : std::exp(before - maximum);
    s_.sum[row] = s_.sum[row] * s_.keep[row] + sum.reduce_add();
    s_.maximum[row] = maximum;
  }

  void write(
      const Task& task, int64_t query_start, int64_t row, const float* from, float sum) {
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
  struct Tile {
    int64_t rows[kKeys];  // offsets into the caches: the first KV head of each key
    int64_t count = 0, kv_heads = 0;
  };
  Tile tile_, ahead_;
  const Task* located_ = nullptr;  // task whose first tile is already located and prefetched
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
          std::clamp<int64_t>(kTaskRows / (count * layout.group), 1, most_heads);
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
    const int64_t begin = task.key_begin, keys = task.key_end - begin;
    const int64_t most = std::max<int64_t>(1, keys / kRangeKeys);
    const int64_t length = round_up((keys - 1) / std::min(wanted, most) + 1, kKeys);
    task.parts = (keys + length - 1) / length;
    if (task.parts == 1) {
      out.push_back(task);
      continue;
    }
    for (int64_t part = 0; part < task.parts; ++part) {
      task.key_begin = begin + part * length;
      task.key_end = begin + std::min(keys, (part + 1) * length);
      task.partial = size;
      size += layout.partial_size(task.count);
      out.push_back(task);
    }
  }
  return out;
}

}  // namespace

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
  if (!tasks.empty() && too_few(tasks)) {
    tasks = split_tasks(tasks, layout, (wanted - 1) / std::ssize(tasks) + 1, partial_size);
  }
  const Floats partials = floats(partial_size);
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
