// A decoder layer of the Llama family as one operation: of one token, what Python takes between the
// operations of a layer is a good part of what they take themselves.
#pragma once

#include <ATen/core/Dict.h>
#include <torch/custom_class.h>

#include <chrono>
#include <cmath>
#include <string>

#include "kernels.h"
#include "operators.h"

namespace trident {

class DecoderLayer : public torch::CustomClassHolder {
 public:
  using Tensor = at::Tensor;

  // `tensors` are, by the names that checkpoints have for their modules: `weight` of the norms, and
  // `weight`, `scale` and `bias` of the projections qkv_proj, o_proj, gate_up_proj and down_proj as
  // `linear` takes them. What is optional there, and the norms of queries and keys, may be missing.
  DecoderLayer(
      c10::Dict<std::string, Tensor> tensors, int64_t heads, int64_t kv_heads, int64_t head_dim,
      double norm_eps, std::optional<int64_t> sliding_window)
      : input_norm_(tensors.at("input_layernorm.weight")),
        post_attention_norm_(tensors.at("post_attention_layernorm.weight")),
        query_norm_(find(tensors, "q_norm.weight")),
        key_norm_(find(tensors, "k_norm.weight")),
        qkv_(tensors, "qkv_proj"),
        o_(tensors, "o_proj"),
        gate_up_(tensors, "gate_up_proj"),
        down_(tensors, "down_proj"),
        heads_(heads),
        kv_heads_(kv_heads),
        head_dim_(head_dim),
        norm_eps_(norm_eps),
        sliding_window_(sliding_window) {}

  // Returns the layer's output, not yet added, and the residual stream to add it to.
  std::tuple<Tensor, Tensor> forward(
      const Tensor& x, const std::optional<Tensor>& residual, const Tensor& cos,
      const Tensor& sin, const Tensor& slot_mapping, const Tensor& key_cache,
      const Tensor& value_cache, const Tensor& query_start_loc, const Tensor& seq_lens,
      const Tensor& block_tables) {
    using namespace operators;
    const int64_t tokens = x.size(0), size = x.size(1);
    Lap lap(seconds_);
    Tensor normed, total = x;
    if (residual.has_value()) {
      std::tie(normed, total) = rms_norm_add(x, *residual, input_norm_, norm_eps_, false);
    } else {
      normed = rms_norm(x, input_norm_, norm_eps_, false);
    }
    lap.ends(kNorms);
    const int64_t all_heads = heads_ + 2 * kv_heads_;
    const Tensor qkv =
        qkv_.multiply(normed, all_heads * head_dim_).view({tokens, all_heads, head_dim_});
    lap.ends(kQkv);
    const Tensor query = rotary_and_cache(
        qkv.narrow(1, 0, heads_), qkv.narrow(1, heads_, kv_heads_),
        qkv.narrow(1, heads_ + kv_heads_, kv_heads_), cos, sin, key_cache, value_cache,
        slot_mapping, query_norm_, key_norm_, norm_eps_, false);
    lap.ends(kRotary);
    const Tensor mixed = paged_attention(
        query, key_cache, value_cache, query_start_loc, seq_lens, block_tables,
        1.0 / std::sqrt(static_cast<double>(head_dim_)), sliding_window_);
    lap.ends(kAttention);
    const Tensor attended = o_.multiply(mixed.view({tokens, heads_ * head_dim_}), size);
    lap.ends(kO);
    std::tie(normed, total) =
        rms_norm_add(attended, total, post_attention_norm_, norm_eps_, false);
    lap.ends(kNorms);
    const Tensor gated = gated_linear(
        normed, gate_up_.weight, gate_up_.scale, gate_up_.bias, gate_up_.channels() / 2,
        static_cast<int64_t>(Activation::kSilu));
    lap.ends(kGateUp);
    const Tensor out = down_.multiply(gated, size);
    lap.ends(kDown);
    return {out, total};
  }

  // Returns what each part has taken since the last call, over all calls of `forward`.
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

  static std::optional<Tensor> find(
      const c10::Dict<std::string, Tensor>& tensors, const std::string& name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? std::nullopt : std::optional<Tensor>(found->value());
  }

  struct Projection {
    Tensor weight;
    std::optional<Tensor> scale, bias;

    Projection(const c10::Dict<std::string, Tensor>& tensors, const std::string& name)
        : weight(tensors.at(name + ".weight")),
          scale(find(tensors, name + ".scale")),
          bias(find(tensors, name + ".bias")) {}

    int64_t channels() const {  // those that packing adds among them
      return weight.size(0) * weight.size(2);
    }
    Tensor multiply(const Tensor& x, int64_t out_features) const {
      return operators::linear(x, weight, scale, bias, out_features, false);
    }
  };

  Tensor input_norm_, post_attention_norm_;
  std::optional<Tensor> query_norm_, key_norm_;
  Projection qkv_, o_, gate_up_, down_;
  int64_t heads_, kv_heads_, head_dim_;
  double norm_eps_;
  std::optional<int64_t> sliding_window_;
  double seconds_[kParts] = {};
};

}  // namespace trident
