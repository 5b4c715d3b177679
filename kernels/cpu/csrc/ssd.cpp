// State space duality (Mamba 2) with its convolution, token by token.
//
// A task is some heads of a row and of one group, whose B and C it computes once, for a block of
// tokens; then head by head x and, for one tile of the state's columns after the other, each of
// which stays in the L1 cache, the states and results. One pass over a tile does all of a token. A
// sum runs over the rows of the state in their order, whatever the tile and wherever a block
// begins, so that no cut of a sequence changes a bit.
#include "kernels.h"
#include "state_heads.h"

namespace trident {
namespace {

constexpr int64_t kTokens = 64;  // of a block
constexpr int64_t kHeads = 16;   // of a task, at most

// The heads of a task, which divide those of a group: many, to compute B and C less often, if all
// threads have tasks enough.
template <typename T>
int64_t heads_of_task(const SSD<T>& a, int64_t rows) {
  const int64_t ratio = a.heads / a.groups, wanted = 4 * at::get_num_threads();
  int64_t count = std::min(kHeads, ratio);
  while (count > 1 && (ratio % count != 0 || rows * a.heads / count < wanted)) {
    --count;
  }
  return count;
}

// A block of tokens of a task's heads in float32, with rows padded by zeros to whole vectors.
template <typename T>
class HeadsBlock {
 public:
  HeadsBlock(const SSD<T>& a, int64_t heads)
      : a_(a),
        heads_(heads),
        key_size_(whole_vectors(a.key_dim)),
        value_size_(whole_vectors(a.value_dim)),
        head_size_(whole_vectors(heads)),
        convolution_(
            a.rings, a.inputs, a.input_stride, a.conv_weight, a.conv_bias, a.kernel_size,
            a.rings.channels, kTokens, std::max(a.key_dim, a.value_dim)),
        b_(aligned<float>(kTokens * key_size_)),
        c_(aligned<float>(kTokens * key_size_)),
        x_(aligned<float>(kTokens * value_size_)),
        dt_(aligned<float>(kTokens * head_size_)),
        decay_(aligned<float>(kTokens * head_size_)),
        tile_(aligned<float>(a.key_dim * kTileVectors * W)) {}

  // Computes all tokens of the heads from `head` on.
  void run(const StateRow& row, int64_t head) {
    const int64_t size = a_.key_dim * a_.value_dim;
    for_blocks(a_.step, row, kTokens, [&](int64_t done, int64_t tokens) {
      first_ = row.begin + done;
      tokens_ = tokens;
      convolution_.choose(row, done, tokens);
      const int64_t channel = a_.heads * a_.value_dim;
      const int64_t group = head / (a_.heads / a_.groups);
      convolution_.run(channel + group * a_.key_dim, a_.key_dim, b_.get());
      convolution_.run(channel + (a_.groups + group) * a_.key_dim, a_.key_dim, c_.get());
      compute_time_steps(head);
      for (int64_t i = 0; i < heads_; ++i) {
        const auto state = [&](int64_t block) {
          return a_.states + block * a_.state_stride + (head + i) * size;
        };
        float* const to = state(row.writes);
        convolution_.run((head + i) * a_.value_dim, a_.value_dim, x_.get());
        compute(head + i, i, done == 0 ? state(row.reads) : to, to);
        for_saves(a_.step, row, [&](int64_t position, int64_t block) {
          if (position == row.start + done + tokens) {
            std::memcpy(state(block), to, size * sizeof(float));
          }
        });
      }
    });
  }

 private:
  // The decay of each token compounds over a sequence: it is accurate to float32.
  void compute_time_steps(int64_t head) {
    const Vec least(a_.least_dt), most(a_.most_dt), zero(0.0f);
    for (int64_t i = 0; i < heads_; i += W) {
      const int64_t n = std::min(W, heads_ - i);
      const Vec rate = widen(a_.decay + head + i, n), bias = widen(a_.dt_bias + head + i, n);
      for (int64_t t = 0; t < tokens_; ++t) {
        const T* const input = a_.time_steps + (first_ + t) * a_.time_step_stride + head + i;
        const Vec x = widen(input, n) + bias;
        const Vec softplus = at::vec::maximum(x, zero) + x.abs().neg().exp().log1p();
        const Vec dt = at::vec::minimum(at::vec::maximum(softplus, least), most);
        dt.store(dt_.get() + t * head_size_ + i);
        (dt * rate).exp().store(decay_.get() + t * head_size_ + i);
      }
    }
  }

  // Computes the states and results of a head, the i-th of the task.
  void compute(int64_t head, int64_t i, const float* from, float* to) const {
    const Vec skip(a_.skip[head]);
    const auto compute_columns = [&](auto width, const float* old, float* state, int64_t stride,
                                     int64_t first) {
      constexpr int64_t n = width;
      for (int64_t t = 0; t < tokens_; ++t) {
        const float* const x = x_.get() + t * value_size_ + first;
        const Vec dt(dt_[t * head_size_ + i]);
        Vec delta[n], result[n], unused[n];
        for (int64_t j = 0; j < n; ++j) {
          delta[j] = dt * Vec::loadu(x + j * W);
        }
        update_state<n, false>(
            old, state, stride, a_.key_dim, decay_[t * head_size_ + i], b_.get() + t * key_size_,
            delta, c_.get() + t * key_size_, nullptr, result, unused);
        const int64_t column = head * a_.value_dim + first;
        float* const out = a_.out + (first_ + t) * a_.heads * a_.value_dim + column;
        for (int64_t j = 0; j < n; ++j) {
          const Vec sum = at::vec::fmadd(skip, Vec::loadu(x + j * W), result[j]);
          store(out + j * W, sum, std::min(W, a_.value_dim - first - j * W));
        }
      }
    };
    for_tiles(from, to, a_.key_dim, a_.value_dim, tokens_ == 1, tile_.get(), compute_columns);
  }

  const SSD<T>& a_;
  int64_t heads_, key_size_, value_size_, head_size_;
  BlockConvolution<T> convolution_;
  Aligned<float> b_, c_, x_, dt_, decay_, tile_;
  int64_t first_ = 0, tokens_ = 0;  // of the block: its first token is of the step
};

}  // namespace

template <typename T>
void ssd(const SSD<T>& a) {
  const std::vector<StateRow> rows = active_rows(a.step);
  zero_idle(rows, a.out, a.tokens, a.heads * a.value_dim);
  const int64_t heads = heads_of_task(a, rows.size());
  const auto copy = [&](int64_t token, T* to) {
    const T* const from = a.inputs + token * a.input_stride;
    std::memcpy(static_cast<void*>(to), from, a.rings.channels * sizeof(T));
  };
  for_row_tasks(a.step, rows, a.rings, a.heads / heads, copy, [&] {
    return [heads, block = HeadsBlock<T>(a, heads)](const StateRow& row, int64_t i) mutable {
      block.run(row, i * heads);
    };
  });
}

#define INSTANTIATE(T) template void ssd(const SSD<T>&);
TRIDENT_FOR_EACH_DTYPE(INSTANTIATE)

}  // namespace trident
