// The gated delta rule with its convolution, norms and gates, token by token.
//
// A task is a value head of a row. For a block of tokens it computes queries, keys, values and
// gates; then the rule, for one tile of the state's columns after the other, each of which stays in
// the L1 cache; then norm and gate. One pass over a tile does all of a token: the state decays and
// is updated, and is multiplied by the token's query and by the next token's key. A sum runs over
// the rows of the state in their order, whatever the tile and wherever a block begins, so that no
// cut of a sequence changes a bit.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>

#include "activation.h"
#include "aligned.h"
#include "kernels.h"
#include "shares.h"
#include "states.h"
#include "vector.h"

namespace trident {
namespace {

constexpr int64_t kTokens = 64;        // of a block
constexpr int64_t kTileVectors = 4;   // of columns; 32 KiB of a state with 128 rows on AVX-512
constexpr int64_t kTokenVectors = 8;  // of columns, of single tokens, which read the cache in place
constexpr double kL2Eps = 1e-6;

inline int64_t whole_vectors(int64_t size) {
  return (size + W - 1) / W * W;
}

// S^T k of N vectors of columns.
template <int64_t N>
void recall(const float* state, int64_t stride, int64_t rows, const float* key, Vec (&sums)[N]) {
  for (Vec& sum : sums) {
    sum = Vec(0.0f);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const Vec k(key[i]);
    for (int64_t j = 0; j < N; ++j) {
      sums[j] = at::vec::fmadd(Vec::loadu(state + i * stride + j * W), k, sums[j]);
    }
  }
}

// The state's update by a token, with its output S^T q and, if there is a next token, what the new
// state returns for that one's key.
template <int64_t N, bool kHasNext>
void update(
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

// A block of a head's tokens in float32, with rows padded by zeros to whole vectors.
template <typename T>
class HeadBlock {
 public:
  explicit HeadBlock(const DeltaRule<T>& a)
      : a_(a),
        key_size_(whole_vectors(a.key_dim)),
        value_size_(whole_vectors(a.value_dim)),
        query_(aligned<float>(kTokens * key_size_)),
        key_(aligned<float>(kTokens * key_size_)),
        value_(aligned<float>(kTokens * value_size_)),
        out_(aligned<float>(kTokens * value_size_)),
        decay_(aligned<float>(whole_vectors(kTokens))),
        beta_(aligned<float>(whole_vectors(kTokens))),
        tile_(aligned<float>(a.key_dim * kTileVectors * W)),
        taps_(aligned<float>(a.kernel_size * std::max(key_size_, value_size_))),
        wide_(aligned<float>((kTokens + a.kernel_size - 1) * std::max(key_size_, value_size_))),
        inputs_(kTokens + a.kernel_size - 1) {}

  // Computes all tokens of a row's head.
  void run(const StateRow& row, int64_t head) {
    head_ = head;
    const int64_t size = a_.key_dim * a_.value_dim;
    const auto state = [&](int64_t block) {
      return a_.states + block * a_.state_stride + head * size;
    };
    const float* from = state(row.reads);
    float* const to = state(row.writes);
    for (int64_t done = 0; done < row.size; done += tokens_) {
      tokens_ = std::min(kTokens, row.size - done);
      first_ = row.begin + done;
      for_saves(a_.step, row, [&](int64_t position, int64_t) {
        if (position > row.start + done) {  // a block ends there
          tokens_ = std::min(tokens_, position - row.start - done);
        }
      });
      convolve(row, done);
      compute_gates();
      apply_rule(from, to);
      write_outputs();
      from = to;
      for_saves(a_.step, row, [&](int64_t position, int64_t block) {
        if (position == row.start + done + tokens_) {
          std::memcpy(state(block), to, size * sizeof(float));
        }
      });
    }
  }

 private:
  void convolve(const StateRow& row, int64_t done) {
    const int64_t before = a_.kernel_size - 1;
    for (int64_t i = 0; i < tokens_ + before; ++i) {
      const int64_t token = done - before + i;  // of the row
      inputs_[i] = token < 0 ? a_.rings.before(row, row.start + token)
                             : a_.qkv + (row.begin + token) * a_.qkv_stride;
    }
    const int64_t key_head = head_ / (a_.heads / a_.key_heads);
    const int64_t keys = a_.key_heads * a_.key_dim;
    convolve(key_head * a_.key_dim, a_.key_dim, query_.get());
    convolve(keys + key_head * a_.key_dim, a_.key_dim, key_.get());
    convolve(2 * keys + head_ * a_.value_dim, a_.value_dim, value_.get());
    const double scale = 1.0 / std::sqrt(static_cast<double>(a_.key_dim));
    for (int64_t t = 0; t < tokens_; ++t) {
      normalise(query_.get() + t * key_size_, scale);
      normalise(key_.get() + t * key_size_, 1.0);
    }
  }

  // SiLU of the convolution of `count` channels from `first` on.
  void convolve(int64_t first, int64_t count, float* out) {
    const int64_t size = whole_vectors(count);
    const auto widen_row = [&](const T* from, float* to) {
      for (int64_t i = 0; i < count; i += W) {
        widen(from + first + i, std::min(W, count - i)).store(to + i);
      }
    };
    for (int64_t j = 0; j < a_.kernel_size; ++j) {
      widen_row(a_.conv_weight + j * a_.rings.channels, taps_.get() + j * size);
    }
    for (int64_t i = 0; i < tokens_ + a_.kernel_size - 1; ++i) {
      widen_row(inputs_[i], wide_.get() + i * size);
    }
    for (int64_t t = 0; t < tokens_; ++t) {
      for (int64_t i = 0; i < size; i += W) {
        Vec sum(0.0f);
        for (int64_t j = 0; j < a_.kernel_size; ++j) {
          const Vec tap = Vec::loadu(taps_.get() + j * size + i);
          sum = at::vec::fmadd(tap, Vec::loadu(wide_.get() + (t + j) * size + i), sum);
        }
        activate<Activation::kSilu, T>(sum).store(out + t * size + i);
      }
    }
  }

  void normalise(float* x, double scale) const {
    Vec squares(0.0f);
    for (int64_t i = 0; i < key_size_; i += W) {
      const Vec value = Vec::loadu(x + i);
      squares = at::vec::fmadd(value, value, squares);
    }
    const Vec factor(static_cast<float>(scale / std::sqrt(sum_of_lanes(squares) + kL2Eps)));
    for (int64_t i = 0; i < key_size_; i += W) {
      (Vec::loadu(x + i) * factor).store(x + i);
    }
  }

  // The decay of each token, exp(g), compounds over a sequence: it is accurate to float32.
  void compute_gates() {
    for (int64_t t = 0; t < tokens_; ++t) {
      beta_[t] = a_.beta_logits[(first_ + t) * a_.beta_stride + head_];
      decay_[t] = a_.decay_inputs[(first_ + t) * a_.decay_stride + head_];
    }
    const Vec rate(a_.decay[head_]), bias(a_.dt_bias[head_]), one(1.0f), zero(0.0f);
    for (int64_t t = 0; t < tokens_; t += W) {
      const Vec x = Vec::loadu(decay_.get() + t) + bias;
      const Vec softplus = at::vec::maximum(x, zero) + x.abs().neg().exp().log1p();
      (rate * softplus).exp().store(decay_.get() + t);
      sigmoid_times<float>(one, Vec::loadu(beta_.get() + t)).store(beta_.get() + t);
    }
  }

  void apply_rule(const float* from, float* to) {
    const int64_t columns = a_.value_dim;
    if (tokens_ == 1) {
      int64_t i = 0;
      while (columns - i >= W) {
        const int64_t vectors = (columns - i) / W;
        for_width(vectors < kTokenVectors ? std::min(vectors, kTileVectors) : vectors, [&](auto n) {
          compute<n>(from + i, to + i, columns, i);
          i += n * W;
        });
      }
      if (i < columns) {
        compute_tile<1>(from, to, i, columns - i);
      }
      return;
    }
    for (int64_t i = 0; i < columns; i += kTileVectors * W) {
      const int64_t count = std::min(kTileVectors * W, columns - i);
      for_width((count + W - 1) / W, [&](auto n) { compute_tile<n>(from, to, i, count); });
    }
  }

  // Computes `count` columns from `first` on, at most N vectors, in a copy.
  template <int64_t N>
  void compute_tile(const float* from, float* to, int64_t first, int64_t count) {
    float* const tile = tile_.get();
    const auto for_vectors = [&](auto run) {
      for (int64_t i = 0; i < a_.key_dim; ++i) {
        for (int64_t j = 0; j < N; ++j) {
          run(i * a_.value_dim + first + j * W, (i * N + j) * W, std::min(W, count - j * W));
        }
      }
    };
    for_vectors([&](int64_t at, int64_t i, int64_t n) { widen(from + at, n).store(tile + i); });
    compute<N>(tile, tile, N * W, first);
    for_vectors([&](int64_t at, int64_t i, int64_t n) { store(to + at, Vec::loadu(tile + i), n); });
  }

  // Computes the block's tokens for N vectors of columns, which are columns of values from `first`
  // on. `from` and `to` differ for a single token only.
  template <int64_t N>
  void compute(const float* from, float* to, int64_t stride, int64_t first) {
    Vec known[N], delta[N], out[N];
    recall(from, stride, a_.key_dim, key_.get(), known);
    for (int64_t t = 0; t < tokens_; ++t) {
      const float* const key = key_.get() + t * key_size_;
      const float* const query = query_.get() + t * key_size_;
      const Vec decay(decay_[t]), beta(beta_[t]);
      for (int64_t j = 0; j < N; ++j) {
        const Vec value = Vec::loadu(value_.get() + t * value_size_ + first + j * W);
        delta[j] = beta * (value - decay * known[j]);
      }
      if (t + 1 < tokens_) {
        update<N, true>(
            from, to, stride, a_.key_dim, decay_[t], key, delta, query, key + key_size_, out,
            known);
      } else {
        update<N, false>(
            from, to, stride, a_.key_dim, decay_[t], key, delta, query, nullptr, out, known);
      }
      for (int64_t j = 0; j < N; ++j) {
        out[j].store(out_.get() + t * value_size_ + first + j * W);
      }
    }
  }

  void write_outputs() const {
    for (int64_t t = 0; t < tokens_; ++t) {
      const float* const x = out_.get() + t * value_size_;
      const int64_t offset = head_ * a_.value_dim;
      const T* const z = a_.z + (first_ + t) * a_.z_stride + offset;
      T* const out = a_.out + (first_ + t) * a_.heads * a_.value_dim + offset;
      Vec squares(0.0f);
      for (int64_t i = 0; i < a_.value_dim; i += W) {
        const Vec value = Vec::loadu(x + i);
        squares = at::vec::fmadd(value, value, squares);
      }
      const Vec scale = inverse_rms(squares, a_.value_dim, a_.norm_eps);
      for (int64_t i = 0; i < a_.value_dim; i += W) {
        const int64_t n = std::min(W, a_.value_dim - i);
        const Vec gate = widen(z + i, n);
        const Vec normed = Vec::loadu(x + i) * scale * widen(a_.norm_weight + i, n);
        store(out + i, normed * sigmoid_times<T>(a_.sigmoid ? Vec(1.0f) : gate, gate), n);
      }
    }
  }

  const DeltaRule<T>& a_;
  int64_t key_size_, value_size_;
  Aligned<float> query_, key_, value_, out_, decay_, beta_, tile_, taps_, wide_;
  std::vector<const T*> inputs_;             // of the convolution, by token
  int64_t head_ = 0, first_ = 0, tokens_ = 0;  // of the block: its first token is of the step
};

}  // namespace

template <typename T>
void gated_delta_rule(const DeltaRule<T>& a) {
  const std::vector<StateRow> rows = active_rows(a.step);
  zero_idle(rows, a.out, a.tokens, a.heads * a.value_dim);
  const auto unread = std::make_unique<std::atomic<int64_t>[]>(rows.size());  // heads
  for (size_t i = 0; i < rows.size(); ++i) {
    unread[i] = a.heads;
  }
  share_out(rows.size() * a.heads, [&] {
    return [&a, &rows, &unread, block = HeadBlock<T>(a)](int64_t i) mutable {
      const StateRow& row = rows[i / a.heads];
      block.run(row, i % a.heads);
      // The last of its heads to read the ring writes it.
      if (--unread[i / a.heads] == 0) {
        const int64_t channels = a.rings.channels;
        a.rings.store(a.step, row, 0, channels, [&](int64_t token, T* to) {
          const T* const from = a.qkv + (row.begin + token) * a.qkv_stride;
          std::memcpy(static_cast<void*>(to), from, channels * sizeof(T));
        });
      }
    };
  });
}

#define INSTANTIATE(T) template void gated_delta_rule(const DeltaRule<T>&);
TRIDENT_FOR_EACH_DTYPE(INSTANTIATE)

}  // namespace trident
