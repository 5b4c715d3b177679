// What layers whose heads keep states [rows, columns] share: the convolution before the heads, the
// pass of a token over a state, and the tasks of a step.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <type_traits>
#include <vector>

#include "activation.h"
#include "aligned.h"
#include "shares.h"
#include "states.h"
#include "vector.h"

namespace trident {

constexpr int64_t kTileVectors = 4;   // of columns; 32 KiB of a state with 128 rows on AVX-512
constexpr int64_t kTokenVectors = 8;  // of columns, of single tokens, which read the cache in place

inline int64_t whole_vectors(int64_t size) {
  return (size + W - 1) / W * W;
}

// Calls run(done, tokens) for one block of a row's tokens after the other, `done` of which come
// before it. A block has at most `most` tokens, and ends at each save.
template <typename Run>
void for_blocks(const StepStates& step, const StateRow& row, int64_t most, Run run) {
  for (int64_t done = 0; done < row.size;) {
    int64_t tokens = std::min(most, row.size - done);
    for_saves(step, row, [&](int64_t position, int64_t) {
      if (position > row.start + done) {
        tokens = std::min(tokens, position - row.start - done);
      }
    });
    run(done, tokens);
    done += tokens;
  }
}

// Runs `tasks` tasks of each row: each thread calls make() once, and the callable it returns with a
// row and the number of a task. The last task of a row to end, when none reads its ring any more,
// writes the ring. copy(token, to) writes the inputs of one of the step's tokens.
template <typename T, typename Copy, typename Make>
void for_row_tasks(
    const StepStates& step, const std::vector<StateRow>& rows, const Rings<T>& rings,
    int64_t tasks, Copy copy, Make make) {
  const auto unread = std::make_unique<std::atomic<int64_t>[]>(rows.size());  // tasks
  for (size_t i = 0; i < rows.size(); ++i) {
    unread[i] = tasks;
  }
  share_out(rows.size() * tasks, [&] {
    return [&, run = make()](int64_t i) mutable {
      const StateRow& row = rows[i / tasks];
      run(row, i % tasks);
      if (--unread[i / tasks] == 0) {
        rings.store(step, row, 0, rings.channels, [&](int64_t token, T* to) {
          copy(row.begin + token, to);
        });
      }
    };
  });
}

// SiLU of the convolution of a row's channels, for a block of at most `most` tokens.
template <typename T>
class BlockConvolution {
 public:
  // `inputs` are those of a step, `stride` apart; weight is [kernel_size, channels]; bias may be
  // null. At most max_channels are computed at once.
  BlockConvolution(
      const Rings<T>& rings, const T* inputs, int64_t stride, const T* weight, const T* bias,
      int64_t kernel_size, int64_t channels, int64_t most, int64_t max_channels)
      : rings_(rings),
        step_inputs_(inputs),
        stride_(stride),
        weight_(weight),
        bias_(bias),
        kernel_size_(kernel_size),
        channels_(channels),
        taps_(aligned<float>(kernel_size * whole_vectors(max_channels))),
        wide_(aligned<float>((most + kernel_size - 1) * whole_vectors(max_channels))),
        inputs_(most + kernel_size - 1) {}

  // Chooses the tokens: `done` of the row come before the block.
  void choose(const StateRow& row, int64_t done, int64_t tokens) {
    tokens_ = tokens;
    const int64_t before = kernel_size_ - 1;
    for (int64_t i = 0; i < tokens + before; ++i) {
      const int64_t token = done - before + i;  // of the row
      inputs_[i] = token < 0 ? rings_.before(row, row.start + token)
                             : step_inputs_ + (row.begin + token) * stride_;
    }
  }

  // Computes `count` channels from `first` on. Rows of `out` are padded by zeros to whole vectors.
  void run(int64_t first, int64_t count, float* out) {
    const int64_t size = whole_vectors(count);
    const auto widen_row = [&](const T* from, float* to) {
      for (int64_t i = 0; i < count; i += W) {
        widen(from + first + i, std::min(W, count - i)).store(to + i);
      }
    };
    for (int64_t j = 0; j < kernel_size_; ++j) {
      widen_row(weight_ + j * channels_, taps_.get() + j * size);
    }
    for (int64_t i = 0; i < tokens_ + kernel_size_ - 1; ++i) {
      widen_row(inputs_[i], wide_.get() + i * size);
    }
    for (int64_t i = 0; i < size; i += W) {
      const int64_t n = std::min(W, count - i);
      const Vec bias = bias_ == nullptr ? Vec(0.0f) : widen(bias_ + first + i, n);
      for (int64_t t = 0; t < tokens_; ++t) {
        Vec sum(0.0f);
        for (int64_t j = 0; j < kernel_size_; ++j) {
          const Vec tap = Vec::loadu(taps_.get() + j * size + i);
          sum = at::vec::fmadd(tap, Vec::loadu(wide_.get() + (t + j) * size + i), sum);
        }
        activate<Activation::kSilu, T>(sum + bias).store(out + t * size + i);
      }
    }
  }

 private:
  const Rings<T>& rings_;
  const T* step_inputs_;
  int64_t stride_;
  const T *weight_, *bias_;
  int64_t kernel_size_, channels_, tokens_ = 0;
  Aligned<float> taps_, wide_;
  std::vector<const T*> inputs_;  // of the chosen tokens, and of those before them
};

// A state's update by a token, S <- decay S + key delta^T, in N vectors of columns, with its output
// S^T query and, if there is a next token, what the new state returns for that one's key.
template <int64_t N, bool kHasNext>
void update_state(
    const float* from, float* to, int64_t stride, int64_t rows, float decay, const float* key,
    const Vec (&delta)[N], const float* query, const float* next_key, Vec (&out)[N],
    Vec (&next)[N]) {
  for (int64_t j = 0; j < N; ++j) {
    out[j] = next[j] = Vec(0.0f);
  }
  const Vec g(decay);
  for (int64_t i = 0; i < rows; ++i) {
    const Vec k(key[i]), q(query[i]), n(kHasNext ? next_key[i] : 0.0f);
    for (int64_t j = 0; j < N; ++j) {
      const Vec old = Vec::loadu(from + i * stride + j * W);
      const Vec state = at::vec::fmadd(k, delta[j], old * g);
      state.store(to + i * stride + j * W);
      out[j] = at::vec::fmadd(state, q, out[j]);
      if constexpr (kHasNext) {
        next[j] = at::vec::fmadd(state, n, next[j]);
      }
    }
  }
}

// Calls run with N, at most kTokenVectors, as a compile-time constant.
template <typename Run>
void for_width(int64_t vectors, Run run) {
  switch (vectors) {
    case 1:
      return run(std::integral_constant<int64_t, 1>{});
    case 2:
      return run(std::integral_constant<int64_t, 2>{});
    case 3:
      return run(std::integral_constant<int64_t, 3>{});
    case 4:
      return run(std::integral_constant<int64_t, 4>{});
    default:
      return run(std::integral_constant<int64_t, kTokenVectors>{});
  }
}

// Calls compute(n, from, to, stride, first) for the columns of a state from `first` on, n vectors
// at a time, n a compile-time constant; rows are `stride` apart. `from` and `to` are those given,
// which may differ, for a single token; for a block of tokens, both are a copy in `tile`, which has
// room for kTileVectors and stays in the L1 cache.
template <typename Compute>
void for_tiles(
    const float* from, float* to, int64_t rows, int64_t columns, bool single, float* tile,
    Compute compute) {
  const auto compute_copy = [&](auto width, int64_t first, int64_t count) {
    constexpr int64_t n = width;
    const auto for_vectors = [&](auto run) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          run(i * columns + first + j * W, (i * n + j) * W, std::min(W, count - j * W));
        }
      }
    };
    for_vectors([&](int64_t at, int64_t i, int64_t m) { widen(from + at, m).store(tile + i); });
    compute(width, tile, tile, n * W, first);
    for_vectors([&](int64_t at, int64_t i, int64_t m) { store(to + at, Vec::loadu(tile + i), m); });
  };
  int64_t first = 0;
  while (single && columns - first >= W) {
    const int64_t vectors = (columns - first) / W;
    for_width(vectors < kTokenVectors ? std::min(vectors, kTileVectors) : vectors, [&](auto n) {
      compute(n, from + first, to + first, columns, first);
      first += n * W;
    });
  }
  for (; first < columns; first += kTileVectors * W) {
    const int64_t count = std::min(kTileVectors * W, columns - first);
    for_width((count + W - 1) / W, [&](auto n) { compute_copy(n, first, count); });
  }
}

}  // namespace trident
