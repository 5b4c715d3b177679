// Registers the operators of torch.ops.trident_cpu. The Python wrappers check their arguments;
// `engine.models.fused_layers` is responsible for those of `DecoderLayers`.
#include <ATen/core/Dict.h>
#include <ATen/ops/empty.h>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <torch/custom_class.h>
#include <torch/library.h>
#include <vector>

#include "experts.h"
#include "kernels.h"
#include "linear.h"
#include "operators.h"
#include "projection.h"
#include "shared_sum.h"
#include "states.h"
#include "vector.h"

// The decoder layers of the Llama family as one operation: when decoding one token, Python overhead
// between operations and layers is a large part of the step.
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

  // Has what the attention and the MLP return summed over the ranks, of which these are one's layers.
  void sum_over(const c10::intrusive_ptr<SharedSum>& ranks) {
    ranks_ = ranks;
  }

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
    for (int64_t part = 0; part < (ranks_ ? kParts : kSums); ++part) {
      taken.insert(kNames[part], seconds_[part]);
      seconds_[part] = 0.0;
    }
    return taken;
  }

 private:
  enum Part { kNorms, kQkv, kRotary, kAttention, kO, kGateUp, kDown, kSums, kParts };
  static constexpr const char* kNames[kParts] = {
      "norms", "qkv_proj", "rotary", "attention", "o_proj", "gate_up_proj", "down_proj", "sums"};

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
    // A rank's part of a sum stays in float32.
    Tensor part = ranks_ ? at::empty({tokens, size}, x.options().dtype(at::kFloat)) : Tensor();
    const auto project = [&](const Projection& projection, const T* from, int64_t width, Part which) {
      if (!ranks_) {
        linear(projection.product(from, tokens, width, width, output, size, invariant_));
        lap.ends(which);
        return;
      }
      float* const sum = part.mutable_data_ptr<float>();
      linear(projection.product(from, tokens, width, width, sum, size, invariant_));
      lap.ends(which);
      ranks_->add(sum, output, tokens * size);
      lap.ends(kSums);
    };
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
      project(layer.o, mixed, query_size, kO);
      add_and_norm(layer.post_attention_norm);
      lap.ends(kNorms);
      gated_linear(
          layer.gate_up.product(normed, tokens, size, size, gated, 2 * inner, invariant_),
          Activation::kSilu);
      lap.ends(kGateUp);
      project(layer.down, gated, inner, kDown);
    }
  }

  int64_t heads_, kv_heads_, head_dim_;
  double norm_eps_;
  bool interleaved_, invariant_;
  std::vector<Layer> layers_;
  int64_t most_inner_ = 0;
  std::vector<Tensor> key_caches_, value_caches_;
  std::vector<int64_t> groups_;
  c10::intrusive_ptr<SharedSum> ranks_;
  double seconds_[kParts] = {};
};

}  // namespace trident

namespace trident::operators {
namespace {

// Returns x as a matrix of rows of `size`; a view is not made where x is one already.
Tensor as_rows(const Tensor& x, int64_t size) {
  return x.dim() == 2 && x.stride(1) == 1 ? x : x.reshape({-1, size});
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, bool unit_offset) {
  const int64_t size = x.size(-1);
  const Tensor flat = as_rows(x, size);
  Tensor out = at::empty(x.sizes(), x.options());
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    trident::rms_norm(RmsNorm<T>{
        flat.const_data_ptr<T>(), nullptr, weight.const_data_ptr<T>(), out.mutable_data_ptr<T>(),
        nullptr, flat.size(0), size, flat.stride(0), 0, static_cast<float>(eps), unit_offset});
  });
  return out;
}

std::tuple<Tensor, Tensor> rms_norm_add(
    const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, bool unit_offset) {
  const int64_t size = x.size(-1);
  const Tensor flat = as_rows(x, size), added = as_rows(residual, size);
  Tensor out = at::empty(x.sizes(), x.options()), total = at::empty(x.sizes(), x.options());
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    trident::rms_norm(RmsNorm<T>{
        flat.const_data_ptr<T>(), added.const_data_ptr<T>(), weight.const_data_ptr<T>(),
        out.mutable_data_ptr<T>(), total.mutable_data_ptr<T>(), flat.size(0), size, flat.stride(0),
        added.stride(0), static_cast<float>(eps), unit_offset});
  });
  return {out, total};
}

// `activation` is an `Activation`.
Tensor plain_activation(const Tensor& x, int64_t activation) {
  const Tensor flat = x.contiguous();
  Tensor out = at::empty(x.sizes(), x.options());
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    trident::plain_activation(PlainActivation<T>{
        flat.const_data_ptr<T>(), out.mutable_data_ptr<T>(), flat.numel(),
        static_cast<Activation>(activation)});
  });
  return out;
}

Tensor gated_activation(const Tensor& gate_up, int64_t activation) {
  const int64_t size = gate_up.size(-1) / 2;
  auto shape = gate_up.sizes().vec();
  shape.back() = size;
  const Tensor flat = as_rows(gate_up, 2 * size);
  Tensor out = at::empty(shape, gate_up.options());
  for_dtype(gate_up, [&](auto zero) {
    using T = decltype(zero);
    trident::gated_activation(GatedActivation<T>{
        flat.const_data_ptr<T>(), out.mutable_data_ptr<T>(), flat.size(0), size, flat.stride(0),
        static_cast<Activation>(activation)});
  });
  return out;
}

Tensor rotary_and_cache(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cos,
    const Tensor& sin, Tensor key_cache, Tensor value_cache, const Tensor& slot_mapping,
    const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm,
    double norm_eps, bool interleaved, const std::optional<Tensor>& query_scale) {
  Tensor out = at::empty(query.sizes(), query.options());
  for_dtype(query, [&](auto zero) {
    using T = decltype(zero);
    trident::rotary_and_cache(Rotary<T>{
        query.const_data_ptr<T>(), key.const_data_ptr<T>(), value.const_data_ptr<T>(),
        cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), pointer<float>(query_scale),
        pointer<T>(query_norm), pointer<T>(key_norm), slot_mapping.const_data_ptr<int64_t>(), out.mutable_data_ptr<T>(),
        key_cache.mutable_data_ptr<T>(), value_cache.mutable_data_ptr<T>(), query.size(0),
        query.size(1), key.size(1), query.size(2), cos.size(1), query.stride(0), key.stride(0),
        value.stride(0), static_cast<float>(norm_eps), interleaved});
  });
  return out;
}

Tensor paged_attention(
    const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
    const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& block_tables,
    double scale, std::optional<int64_t> sliding_window, std::optional<double> soft_cap,
    const std::optional<Tensor>& sinks, bool splits) {
  const Tensor q = query.contiguous();
  Tensor out = at::empty(query.sizes(), query.options());
  for_dtype(q, [&](auto zero) {
    using T = decltype(zero);
    trident::paged_attention(PagedAttention<T>{
        q.const_data_ptr<T>(), key_cache.const_data_ptr<T>(), value_cache.const_data_ptr<T>(),
        out.mutable_data_ptr<T>(), query_start_loc.const_data_ptr<int32_t>(),
        seq_lens.const_data_ptr<int32_t>(), block_tables.const_data_ptr<int32_t>(),
        seq_lens.size(0), block_tables.stride(0), key_cache.size(1), q.size(1),
        key_cache.size(2), q.size(2), static_cast<float>(scale), sliding_window.value_or(0),
        static_cast<float>(soft_cap.value_or(0.0)), pointer<float>(sinks), splits});
  });
  return out;
}

namespace {

StepStates step_states(
    const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& reads,
    const Tensor& writes, const Tensor& saves) {
  return {
      query_start_loc.const_data_ptr<int32_t>(), seq_lens.const_data_ptr<int32_t>(),
      reads.const_data_ptr<int32_t>(), writes.const_data_ptr<int32_t>(),
      saves.const_data_ptr<int32_t>(), seq_lens.size(0), saves.size(1)};
}

template <typename T>
Rings<T> rings(const Tensor& ring) {
  return {ring.mutable_data_ptr<T>(), ring.stride(0), ring.size(1), ring.size(2)};
}

}  // namespace

Tensor short_conv(
    const Tensor& projected, const Tensor& weight, const std::optional<Tensor>& bias, Tensor ring,
    const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& reads,
    const Tensor& writes, const Tensor& saves) {
  Tensor out = at::empty({projected.size(0), ring.size(2)}, projected.options());
  for_dtype(projected, [&](auto zero) {
    using T = decltype(zero);
    trident::short_conv(ShortConv<T>{
        projected.const_data_ptr<T>(), weight.const_data_ptr<T>(), pointer<T>(bias),
        out.mutable_data_ptr<T>(), rings<T>(ring),
        step_states(query_start_loc, seq_lens, reads, writes, saves), projected.size(0),
        weight.size(0), projected.stride(0)});
  });
  return out;
}

Tensor gated_delta_rule(
    const Tensor& qkv, const Tensor& z, const Tensor& beta_logits, const Tensor& decay_inputs,
    const Tensor& conv_weight, const Tensor& decay, const Tensor& dt_bias,
    const Tensor& norm_weight, double norm_eps, int64_t key_heads, bool sigmoid, Tensor ring,
    Tensor state, const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& reads,
    const Tensor& writes, const Tensor& saves) {
  Tensor out = at::empty(z.sizes(), z.options());
  for_dtype(qkv, [&](auto zero) {
    using T = decltype(zero);
    trident::gated_delta_rule(DeltaRule<T>{
        qkv.const_data_ptr<T>(), z.const_data_ptr<T>(), beta_logits.const_data_ptr<T>(),
        decay_inputs.const_data_ptr<T>(), conv_weight.const_data_ptr<T>(),
        decay.const_data_ptr<float>(), dt_bias.const_data_ptr<float>(),
        norm_weight.const_data_ptr<float>(), out.mutable_data_ptr<T>(), rings<T>(ring),
        state.mutable_data_ptr<float>(),
        step_states(query_start_loc, seq_lens, reads, writes, saves), qkv.size(0), key_heads,
        state.size(1), state.size(2), state.size(3), conv_weight.size(0), qkv.stride(0),
        z.stride(0), beta_logits.stride(0), decay_inputs.stride(0), state.stride(0),
        static_cast<float>(norm_eps), sigmoid});
  });
  return out;
}

namespace {

// Calls run with a `Linear` whose result has out_channels channels of type Out.
template <typename In, typename Out, typename Run>
Tensor multiply(
    const Tensor& x, const Projection& projection, int64_t out_features, int64_t out_channels,
    bool invariant, Run run) {
  const int64_t in_features = x.size(-1);
  const Tensor flat = as_rows(x, in_features);
  auto shape = x.sizes().vec();
  shape.back() = out_channels;
  Tensor out = at::empty(shape, x.options().dtype(c10::CppTypeToScalarType<Out>::value));
  run(projection.product(
      flat.const_data_ptr<In>(), flat.size(0), in_features, flat.stride(0),
      out.mutable_data_ptr<Out>(), out_features, invariant));
  return out;
}

}  // namespace

Tensor linear(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& scale,
    const std::optional<Tensor>& offset, const std::optional<Tensor>& bias, int64_t out_features,
    bool wide, bool invariant) {
  const auto run_as = [&]<typename In, typename Out>() {
    return multiply<In, Out>(
        x, {weight, scale, offset, bias}, out_features, out_features, invariant,
        [](const auto& a) { trident::linear(a); });
  };
  Tensor out;
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    out = wide ? run_as.operator()<T, float>() : run_as.operator()<T, T>();
  });
  return out;
}

// `activation` is an `Activation`.
Tensor gated_linear(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& scale,
    const std::optional<Tensor>& offset, const std::optional<Tensor>& bias, int64_t size,
    int64_t activation, bool invariant) {
  Tensor out;
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    out = multiply<T, T>(
        x, {weight, scale, offset, bias}, 2 * size, size, invariant, [&](const auto& a) {
          trident::gated_linear(a, static_cast<Activation>(activation));
        });
  });
  return out;
}

Tensor experts(
    const Tensor& x, const Tensor& experts, const Tensor& weights, Tensor totals,
    const Tensor& gate_up, const std::optional<Tensor>& gate_up_scale,
    const std::optional<Tensor>& gate_up_bias, const Tensor& down,
    const std::optional<Tensor>& down_scale, const std::optional<Tensor>& down_bias, int64_t size,
    int64_t activation, double alpha, double limit, double offset) {
  Tensor out = at::empty(x.sizes(), x.options());
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    trident::experts(Experts<T>{
        x.const_data_ptr<T>(), experts.const_data_ptr<int32_t>(), weights.const_data_ptr<float>(),
        totals.mutable_data_ptr<int64_t>(),
        {gate_up.const_data_ptr(), pointer<float>(gate_up_scale), pointer<T>(gate_up_bias)},
        {down.const_data_ptr(), pointer<float>(down_scale), pointer<T>(down_bias)},
        out.mutable_data_ptr<T>(), x.size(0), experts.size(1), totals.size(0), x.size(1), size,
        x.stride(0),
        {static_cast<Activation>(activation), static_cast<float>(alpha),
         static_cast<float>(limit), static_cast<float>(offset)}});
  });
  return out;
}

}  // namespace trident::operators

TORCH_LIBRARY(trident_cpu, m) {
  m.def(
      "rms_norm(Tensor x, Tensor weight, float eps, bool unit_offset) -> Tensor",
      &trident::operators::rms_norm);
  m.def(
      "rms_norm_add(Tensor x, Tensor residual, Tensor weight, float eps, bool unit_offset)"
      " -> (Tensor, Tensor)",
      &trident::operators::rms_norm_add);
  m.def(
      "plain_activation(Tensor x, int activation) -> Tensor",
      &trident::operators::plain_activation);
  m.def(
      "gated_activation(Tensor gate_up, int activation) -> Tensor",
      &trident::operators::gated_activation);
  m.def(
      "rotary_and_cache(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin,"
      " Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, Tensor? query_norm,"
      " Tensor? key_norm, float norm_eps, bool interleaved, Tensor? query_scale) -> Tensor",
      &trident::operators::rotary_and_cache);
  m.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor query_start_loc,"
      " Tensor seq_lens, Tensor block_tables, float scale, int? sliding_window,"
      " float? soft_cap, Tensor? sinks, bool splits) -> Tensor",
      &trident::operators::paged_attention);
  m.def(
      "short_conv(Tensor projected, Tensor weight, Tensor? bias, Tensor(a!) ring,"
      " Tensor query_start_loc, Tensor seq_lens, Tensor reads, Tensor writes, Tensor saves)"
      " -> Tensor",
      &trident::operators::short_conv);
  m.def(
      "gated_delta_rule(Tensor qkv, Tensor z, Tensor beta_logits, Tensor decay_inputs,"
      " Tensor conv_weight, Tensor decay, Tensor dt_bias, Tensor norm_weight, float norm_eps,"
      " int key_heads, bool sigmoid, Tensor(a!) ring, Tensor(b!) state, Tensor query_start_loc,"
      " Tensor seq_lens, Tensor reads, Tensor writes, Tensor saves) -> Tensor",
      &trident::operators::gated_delta_rule);
  m.def(
      "draw(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,"
      " Tensor uniform) -> Tensor",
      &trident::operators::draw);
  m.def(
      "truncate(Tensor(a!) logits, Tensor temperature, Tensor top_n_sigma, Tensor typical_p)"
      " -> ()",
      &trident::operators::truncate);
  m.def(
      "prepare_inputs(Tensor token_ids, Tensor block_tables, Tensor num_tokens,"
      " Tensor(a!) num_computed_tokens, Tensor finish_reasons, Tensor slots,"
      " Tensor query_start_loc, int num_tokens_padded, int block_size, int num_groups)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
      &trident::operators::prepare_inputs);
  m.def(
      "scatter_tokens(Tensor(a!) token_ids, Tensor stop_token_ids, Tensor(b!) num_tokens,"
      " Tensor num_prompt_tokens, Tensor min_tokens, Tensor max_tokens, Tensor(c!) finish_reasons,"
      " Tensor slots, Tensor sampled) -> Tensor",
      &trident::operators::scatter_tokens);
  m.def("panel_columns() -> int", [] { return trident::kColumns; });  // output channels
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? scale, Tensor? offset, Tensor? bias,"
      " int out_features, bool wide, bool invariant) -> Tensor",
      &trident::operators::linear);
  m.def(
      "gated_linear(Tensor x, Tensor weight, Tensor? scale, Tensor? offset, Tensor? bias, int size,"
      " int activation, bool invariant) -> Tensor",
      &trident::operators::gated_linear);
  m.def(
      "experts(Tensor x, Tensor experts, Tensor weights, Tensor(a!) totals, Tensor gate_up,"
      " Tensor? gate_up_scale, Tensor? gate_up_bias, Tensor down, Tensor? down_scale,"
      " Tensor? down_bias, int size, int activation, float alpha, float limit,"
      " float offset) -> Tensor",
      &trident::operators::experts);
  m.class_<trident::SharedSum>("SharedSum")
      .def(torch::init<int64_t, int64_t, int64_t, double>())
      .def_static("bytes", &trident::SharedSum::bytes)
      .def("sum", &trident::SharedSum::sum)
      .def("gather", &trident::SharedSum::gather)
      .def("share", &trident::SharedSum::share)
      .def("all", &trident::SharedSum::all)
      .def("abort", &trident::SharedSum::abort)
      .def("wait_seconds", &trident::SharedSum::wait_seconds);
  m.class_<trident::DecoderLayers>("DecoderLayers")
      .def(torch::init<int64_t, int64_t, int64_t, double, bool, bool>())
      .def("sum_over", &trident::DecoderLayers::sum_over)
      .def("append", &trident::DecoderLayers::append)
      .def("bind", &trident::DecoderLayers::bind)
      .def("forward", &trident::DecoderLayers::forward)
      .def("take_seconds", &trident::DecoderLayers::take_seconds);
}
