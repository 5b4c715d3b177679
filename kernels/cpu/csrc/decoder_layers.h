// The decoder layers of the Llama family as one operation: when decoding one token, Python overhead
// between operations and layers is a large part of the step.
#pragma once

#include <ATen/core/Dict.h>
#include <torch/custom_class.h>

#include <chrono>
#include <cmath>
#include <string>
#include <vector>

#include "kernels.h"
#include "operators.h"

namespace trident {

class DecoderLayers : public torch::CustomClassHolder {
 public:
  using Tensor = at::Tensor;
  using Tensors = c10::Dict<std::string, Tensor>;

  // If invariant, attention does not split keys, and products are so: a token's results do not
  // depend on what else is computed.
  DecoderLayers(
      int64_t heads, int64_t kv_heads, int64_t head_dim, double norm_eps, bool invariant)
      : heads_(heads),
        kv_heads_(kv_heads),
        head_dim_(head_dim),
        norm_eps_(norm_eps),
        invariant_(invariant) {}

  // Appends a layer. `tensors` are named after a checkpoint's modules: `weight` of the norms, and
  // `weight`, `scale`, `offset` and `bias` of the projections qkv_proj, o_proj, gate_up_proj and down_proj as
  // `linear` takes them. Arguments optional there, and q_norm and k_norm, may be missing.
  void append(const Tensors& tensors, std::optional<int64_t> sliding_window) {
    layers_.push_back(
        {tensors.at("input_layernorm.weight"), tensors.at("post_attention_layernorm.weight"),
         find(tensors, "q_norm.weight"), find(tensors, "k_norm.weight"), {tensors, "qkv_proj"},
         {tensors, "o_proj"}, {tensors, "gate_up_proj"}, {tensors, "down_proj"}, sliding_window});
  }

  // Returns the last layer's output and the residual stream, to which it has not been added yet.
  // There is a key cache and a value cache for each layer, a slot mapping and block tables.
  std::tuple<Tensor, Tensor> forward(
      Tensor x, const Tensor& cos, const Tensor& sin, const std::vector<Tensor>& slot_mappings,
      const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches,
      const Tensor& query_start_loc, const Tensor& seq_lens,
      const std::vector<Tensor>& block_tables) {
    using namespace operators;
    const int64_t tokens = x.size(0), size = x.size(1);
    const int64_t all_heads = heads_ + 2 * kv_heads_;
    const double scale = 1.0 / std::sqrt(static_cast<double>(head_dim_));
    Lap lap(seconds_);
    Tensor normed, total;
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      const Tensor &keys = key_caches.at(i), &values = value_caches.at(i);
      if (i == 0) {
        normed = rms_norm(x, layer.input_norm, norm_eps_, false);
        total = x;
      } else {
        std::tie(normed, total) = rms_norm_add(x, total, layer.input_norm, norm_eps_, false);
      }
      lap.ends(kNorms);
      const Tensor qkv = layer.qkv.multiply(normed, all_heads * head_dim_, invariant_)
                             .view({tokens, all_heads, head_dim_});
      lap.ends(kQkv);
      const Tensor query = rotary_and_cache(
          qkv.narrow(1, 0, heads_), qkv.narrow(1, heads_, kv_heads_),
          qkv.narrow(1, heads_ + kv_heads_, kv_heads_), cos, sin, keys, values,
          slot_mappings.at(i),
          layer.query_norm, layer.key_norm, norm_eps_, false);
      lap.ends(kRotary);
      const Tensor mixed = paged_attention(
          query, keys, values, query_start_loc, seq_lens, block_tables.at(i), scale,
          layer.sliding_window, std::nullopt, std::nullopt, !invariant_);
      lap.ends(kAttention);
      x = layer.o.multiply(mixed.view({tokens, heads_ * head_dim_}), size, invariant_);
      lap.ends(kO);
      std::tie(normed, total) =
          rms_norm_add(x, total, layer.post_attention_norm, norm_eps_, false);
      lap.ends(kNorms);
      const Projection& gate_up = layer.gate_up;
      const Tensor gated = gated_linear(
          normed, gate_up.weight, gate_up.scale, gate_up.offset, gate_up.bias, gate_up.channels() / 2,
          static_cast<int64_t>(Activation::kSilu), invariant_);
      lap.ends(kGateUp);
      x = layer.down.multiply(gated, size, invariant_);
      lap.ends(kDown);
    }
    return {x, total};
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

  struct Projection {
    Tensor weight;
    std::optional<Tensor> scale, offset, bias;

    Projection(const Tensors& tensors, const std::string& name)
        : weight(tensors.at(name + ".weight")),
          scale(find(tensors, name + ".scale")),
          offset(find(tensors, name + ".offset")),
          bias(find(tensors, name + ".bias")) {}

    int64_t channels() const {  // including the padding of the last panel
      return weight.size(0) * weight.size(2);
    }
    Tensor multiply(const Tensor& x, int64_t out_features, bool invariant) const {
      return operators::linear(x, weight, scale, offset, bias, out_features, false, invariant);
    }
  };

  struct Layer {
    Tensor input_norm, post_attention_norm;
    std::optional<Tensor> query_norm, key_norm;
    Projection qkv, o, gate_up, down;
    std::optional<int64_t> sliding_window;
  };

  int64_t heads_, kv_heads_, head_dim_;
  double norm_eps_;
  bool invariant_;
  std::vector<Layer> layers_;
  double seconds_[kParts] = {};
};

}  // namespace trident
