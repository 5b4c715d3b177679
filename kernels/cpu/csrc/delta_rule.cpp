// The gated delta rule with its convolution, norms and gates, token by token.
//
// A task is a value head of a row. For a block of tokens it computes queries, keys, values and
// gates; then the rule, for one tile of the state's columns after the other, each of which stays in
// the L1 cache; then norm and gate. One pass over a tile does all of a token: the state decays and
// is updated, and is multiplied by the token's query and by the next token's key. A sum runs over
// the rows of the state in their order, whatever the tile and wherever a block begins, so that no
// cut of a sequence changes a bit.
#include <cmath>

#include "kernels.h"
#include "state_heads.h"

namespace trident {
namespace {

constexpr int64_t kTokens = 64;  // of a block
constexpr double kL2Eps = 1e-6;

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

// A block of a head's tokens in float32, with rows padded by zeros to whole vectors.
template <typename T>
class HeadBlock {
 public:
  explicit HeadBlock(const DeltaRule<T>& a)
      : a_(a),
        key_size_(whole_vectors(a.key_dim)),
        value_size_(whole_vectors(a.value_dim)),
        convolution_(
            a.rings, a.qkv, a.qkv_stride, a.conv_weight, nullptr, a.kernel_size,
            a.rings.channels, kTokens, std::max(a.key_dim, a.value_dim)),
        query_(aligned<float>(kTokens * key_size_)),
        key_(aligned<float>(kTokens * key_size_)),
        value_(aligned<float>(kTokens * value_size_)),
        out_(aligned<float>(kTokens * value_size_)),
        decay_(aligned<float>(whole_vectors(kTokens))),
        beta_(aligned<float>(whole_vectors(kTokens))),
        tile_(aligned<float>(a.key_dim * kTileVectors * W)) {}

  // Computes all tokens of a row's head.
  void run(const StateRow& row, int64_t head) {
    head_ = head;
    const int64_t size = a_.key_dim * a_.value_dim;
    const auto state = [&](int64_t block) {
      return a_.states + block * a_.state_stride + head * size;
    };
    const float* from = state(row.reads);
    float* const to = state(row.writes);
    for_blocks(a_.step, row, kTokens, [&](int64_t done, int64_t tokens) {
      first_ = row.begin + done;
      tokens_ = tokens;
      convolution_.choose(row, done, tokens);
      convolve();
      compute_gates();
      apply_rule(from, to);
      write_outputs();
      from = to;
      for_saves(a_.step, row, [&](int64_t position, int64_t block) {
        if (position == row.start + done + tokens) {
          std::memcpy(state(block), to, size * sizeof(float));
        }
      });
    });
  }

 private:
  void convolve() {
    const int64_t key_head = head_ / (a_.heads / a_.key_heads);
    const int64_t keys = a_.key_heads * a_.key_dim;
    convolution_.run(key_head * a_.key_dim, a_.key_dim, query_.get());
    convolution_.run(keys + key_head * a_.key_dim, a_.key_dim, key_.get());
    convolution_.run(2 * keys + head_ * a_.value_dim, a_.value_dim, value_.get());
    const double scale = 1.0 / std::sqrt(static_cast<double>(a_.key_dim));
    for (int64_t t = 0; t < tokens_; ++t) {
      normalise(query_.get() + t * key_size_, scale);
      normalise(key_.get() + t * key_size_, 1.0);
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
    const auto compute_columns = [&](auto n, const float* old, float* state, int64_t stride,
                                     int64_t first) { compute<n>(old, state, stride, first); };
    for_tiles(from, to, a_.key_dim, a_.value_dim, tokens_ == 1, tile_.get(), compute_columns);
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
        update_state<N, true>(
            from, to, stride, a_.key_dim, decay_[t], key, delta, query, key + key_size_, out,
            known);
      } else {
        update_state<N, false>(
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
  BlockConvolution<T> convolution_;
  Aligned<float> query_, key_, value_, out_, decay_, beta_, tile_;
  int64_t head_ = 0, first_ = 0, tokens_ = 0;  // of the block: its first token is of the step
};

}  // namespace

template <typename T>
void gated_delta_rule(const DeltaRule<T>& a) {
  const std::vector<StateRow> rows = active_rows(a.step);
  zero_idle(rows, a.out, a.tokens, a.heads * a.value_dim);
  const auto copy = [&](int64_t token, T* to) {
    const T* const from = a.qkv + token * a.qkv_stride;
    std::memcpy(static_cast<void*>(to), from, a.rings.channels * sizeof(T));
  };
  for_row_tasks(a.step, rows, a.rings, a.heads, copy, [&] {
    return [block = HeadBlock<T>(a)](const StateRow& row, int64_t head) mutable {
      block.run(row, head);
    };
  });
}

#define INSTANTIATE(T) template void gated_delta_rule(const DeltaRule<T>&);
TRIDENT_FOR_EACH_DTYPE(INSTANTIATE)

}  // namespace trident
