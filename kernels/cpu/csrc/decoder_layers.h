// The decoder layers of the Llama family as one operation: when decoding one token, Python overhead
// between operations and layers is a large part of the step.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <vector>

#include "kernels.h"
#include "linear.h"
#include "projection.h"

namespace trident {

class DecoderLayers : public torch::CustomClassHolder {
 public:
  using Tensor = at::Tensor;
  using Tensors = c10::Dict<std::string, Tensor>;

  // Rotation is interleaved, or not, as that of `rotary_and_cache`. If invariant, attention does not split keys, and products are so: a token's results do not
  // depend on what else is computed.
  DecoderLayers(
      int64_t heads, int64_t kv_heads, int64_t head_dim, double norm_eps, bool interleaved,
      bool invariant)
      : heads_(heads),
        kv_heads_(kv_heads),
        head_dim_(head_dim),
        norm_eps_(norm_eps),
        interleaved_(interleaved),
        invariant_(invariant) {}

  // Appends a layer. `tensors` are named after a checkpoint's modules: `weight` of the norms, and
  // `weight`, `scale`, `offset` and `bias` of the projections qkv_proj, o_proj, gate_up_proj and down_proj as
  // `linear` takes them. Arguments optional there, and q_norm and k_norm, may be missing.
  void append(const Tensors& tensors, std::optional<int64_t> sliding_window) {
    layers_.push_back(
        {tensors.at("input_layernorm.weight"), tensors.at("post_attention_layernorm.weight"),
         find(tensors, "q_norm.weight"), find(tensors, "k_norm.weight"),
         projection(tensors, "qkv_proj"), projection(tensors, "o_proj"),
         projection(tensors, "gate_up_proj"), projection(tensors, "down_proj"), sliding_window});
    most_inner_ = std::max(most_inner_, layers_.back().inner_size());
  }

  // Sets each layer's caches, and which of the groups of `forward` it is in.
  void bind(
      std::vector<Tensor> key_caches, std::vector<Tensor> value_caches,
      std::vector<int64_t> groups) {
    TORCH_CHECK(
        key_caches.size() == layers_.size() && value_caches.size() == layers_.size() &&
            groups.size() == layers_.size(),
        "bind: one of each per layer");
    key_caches_ = std::move(key_caches);
    value_caches_ = std::move(value_caches);
    groups_ = std::move(groups);
  }

  // Returns the last layer's output and the residual stream, to which it has not been added yet.
  // There are a slot mapping and block tables for each group of layers.
  std::tuple<Tensor, Tensor> forward(
      const Tensor& x, const Tensor& cos, const Tensor& sin,
      const std::optional<Tensor>& query_scale, const std::vector<Tensor>& slot_mappings,
      const Tensor& query_start_loc, const Tensor& seq_lens,
      const std::vector<Tensor>& block_tables) {
    Tensor out = at::empty(x.sizes(), x.options()), total = at::empty(x.sizes(), x.options());
    for_dtype(x, [&](auto zero) {
      run<decltype(zero)>(
          x, cos, sin, query_scale, slot_mappings, query_start_loc, seq_lens, block_tables, out,
          total);
    });
    return {out, total};
  }

  // Returns the seconds of each part since the last call, summed over all calls of `forward`.
  c10::Dict<std::string, double> take_seconds() {
    c10::Dict<std::string, double> taken;
    for (int64_t part = 0; part < kParts; ++part) {
      taken.insert(kNames[part], seconds_[part]);
      seconds_[part] = 0.0;
    }
    return taken;
  }

 private:
  enum Part { kNorms, kQkv, kRotary, kAttention, kO, kGateUp, kDown, kParts };
  static constexpr const char* kNames[kParts] = {
      "norms", "qkv_proj", "rotary", "attention", "o_proj", "gate_up_proj", "down_proj"};

  class Lap {
   public:
    explicit Lap(double* seconds) : seconds_(seconds) {}

    void ends(Part part) {
      const auto now = Clock::now();
      seconds_[part] += std::chrono::duration<double>(now - begin_).count();
      begin_ = now;
    }

   private:
    using Clock = std::chrono::steady_clock;
    double* seconds_;
    Clock::time_point begin_ = Clock::now();
  };

  static std::optional<Tensor> find(const Tensors& tensors, const std::string& name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? std::nullopt : std::optional<Tensor>(found->value());
  }

  static Projection projection(const Tensors& tensors, const std::string& name) {
    return {
        tensors.at(name + ".weight"), find(tensors, name + ".scale"),
        find(tensors, name + ".offset"), find(tensors, name + ".bias")};
  }

  struct Layer {
    Tensor input_norm, post_attention_norm;
    std::optional<Tensor> query_norm, key_norm;
    Projection qkv, o, gate_up, down;
    std::optional<int64_t> sliding_window;

    int64_t inner_size() const {  // including the padding of the last panel
      return gate_up.weight.size(0) * gate_up.weight.size(2) / 2;
    }
  };

  // Layers follow each other in the same few buffers.
  template <typename T>
  void run(
      const Tensor& x, const Tensor& cos, const Tensor& sin,
      const std::optional<Tensor>& query_scale, const std::vector<Tensor>& slot_mappings,
      const Tensor& query_start_loc, const Tensor& seq_lens,
      const std::vector<Tensor>& block_tables, Tensor& out, Tensor& total) {
    const int64_t tokens = x.size(0), size = x.size(1), dim = head_dim_;
    const int64_t query_size = heads_ * dim, kv_size = kv_heads_ * dim;
    const int64_t qkv_size = query_size + 2 * kv_size;
    const auto buffer = [&](int64_t columns) { return at::empty({tokens, columns}, x.options()); };
    const Tensor buffers[5] = {
        buffer(size), buffer(qkv_size), buffer(query_size), buffer(query_size),
        buffer(most_inner_)};
    T* const normed = buffers[0].mutable_data_ptr<T>();
    T* const qkv = buffers[1].mutable_data_ptr<T>();
    T* const query = buffers[2].mutable_data_ptr<T>();
    T* const mixed = buffers[3].mutable_data_ptr<T>();
    T* const gated = buffers[4].mutable_data_ptr<T>();
    T* const output = out.mutable_data_ptr<T>();
    T* const residual = total.mutable_data_ptr<T>();
    const float eps = static_cast<float>(norm_eps_);
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
    const T* stream = x.const_data_ptr<T>();  // to which is added; x itself does not change
    int64_t stride = x.stride(0);
    const auto add_and_norm = [&](const Tensor& weight) {
      rms_norm(RmsNorm<T>{
          output, stream, weight.const_data_ptr<T>(), normed, residual, tokens, size, size, stride,
          eps, false});
      stream = residual;
      stride = size;
    };
    Lap lap(seconds_);
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      T* const keys = key_caches_.at(i).mutable_data_ptr<T>();
      T* const values = value_caches_[i].mutable_data_ptr<T>();
      const int64_t inner = layer.inner_size();
      const Tensor& tables = block_tables.at(groups_[i]);
      if (i == 0) {
        rms_norm(RmsNorm<T>{
            stream, nullptr, layer.input_norm.const_data_ptr<T>(), normed, nullptr, tokens, size,
            stride, 0, eps, false});
      } else {
        add_and_norm(layer.input_norm);
      }
      lap.ends(kNorms);
      linear(layer.qkv.product(normed, tokens, size, size, qkv, qkv_size, invariant_));
      lap.ends(kQkv);
      rotary_and_cache(Rotary<T>{
          qkv, qkv + query_size, qkv + query_size + kv_size, cos.const_data_ptr<float>(),
          sin.const_data_ptr<float>(), pointer<float>(query_scale), pointer<T>(layer.query_norm),
          pointer<T>(layer.key_norm), slot_mappings.at(groups_[i]).const_data_ptr<int64_t>(), query, keys, values, tokens,
          heads_, kv_heads_, dim, cos.size(1), qkv_size, qkv_size, qkv_size, eps,
          interleaved_});
      lap.ends(kRotary);
      paged_attention(PagedAttention<T>{
          query, keys, values, mixed, query_start_loc.const_data_ptr<int32_t>(),
          seq_lens.const_data_ptr<int32_t>(), tables.const_data_ptr<int32_t>(), seq_lens.size(0),
          tables.stride(0), key_caches_[i].size(1), heads_, kv_heads_, dim, scale,
          layer.sliding_window.value_or(0), 0.0f, nullptr, !invariant_});
      lap.ends(kAttention);
      linear(layer.o.product(mixed, tokens, query_size, query_size, output, size, invariant_));
      lap.ends(kO);
      add_and_norm(layer.post_attention_norm);
      lap.ends(kNorms);
      gated_linear(
          layer.gate_up.product(normed, tokens, size, size, gated, 2 * inner, invariant_),
          Activation::kSilu);
      lap.ends(kGateUp);
      linear(layer.down.product(gated, tokens, inner, inner, output, size, invariant_));
      lap.ends(kDown);
    }
  }

  int64_t heads_, kv_heads_, head_dim_;
  double norm_eps_;
  bool interleaved_, invariant_;
  std::vector<Layer> layers_;
  int64_t most_inner_ = 0;
  std::vector<Tensor> key_caches_, value_caches_;
  std::vector<int64_t> groups_;
  double seconds_[kParts] = {};
};

}  // namespace trident
