// Work distribution over torch's threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

namespace trident {

// Runs `count` tasks: each thread calls make() once, and the callable it returns with each index. A
// thread takes a range of adjacent tasks, for sequential memory access, and then takes over tasks
// of other threads, so that a core busy with another program delays nobody.
template <typename Make>
void share_out(int64_t count, Make make) {
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count);
  const auto shares = std::make_unique<Share[]>(threads);
  for (int64_t i = 0; i < threads; ++i) {
    shares[i].next = i * count / threads;
    shares[i].end = (i + 1) * count / threads;
  }
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) {
    auto run = make();
    for (int64_t k = 0; k < threads; ++k) {
      Share& share = shares[(begin + k) % threads];
      for (int64_t i = share.next++; i < share.end; i = share.next++) {
        run(i);
      }
    }
  });
}

}  // namespace trident
