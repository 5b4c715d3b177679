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

#include <cstdint>
#include <vector>

#include "attention_scratch.h"
#include "attention_tasks.h"
#include "attention_worker.h"
#include "kernels.h"
#include "shares.h"

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
