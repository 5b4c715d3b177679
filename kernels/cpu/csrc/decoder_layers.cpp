#include "decoder_layers.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>

#include "kernels.h"
#include "state_tensors.h"

namespace trident {
namespace {

constexpr const char* kPartNames[] = {
    "norms", "qkv_proj", "rotary", "attention", "gate", "o_proj", "in_proj", "conv", "state",
    "out_proj", "gate_up_proj", "down_proj", "sums"};

std::optional<at::Tensor> find(const DecoderLayers::Tensors& tensors, const std::string& name) {
  const auto found = tensors.find(name);
  return found == tensors.end() ? std::nullopt : std::optional<at::Tensor>(found->value());
}

double number(const DecoderLayers::Numbers& numbers, const std::string& name) {
  const auto found = numbers.find(name);
  return found == numbers.end() ? 0.0 : found->value();
}

Projection projection(const DecoderLayers::Tensors& tensors, const std::string& name) {
  return {
      tensors.at(name + ".weight"), find(tensors, name + ".scale"), find(tensors, name + ".offset"),
      find(tensors, name + ".bias")};
}

class Lap {
 public:
  explicit Lap(double* seconds) : seconds_(seconds) {}

  void ends(int part) {
    const auto now = Clock::now();
    seconds_[part] += std::chrono::duration<double>(now - begin_).count();
    begin_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  double* seconds_;
  Clock::time_point begin_ = Clock::now();
};

}  // namespace

void DecoderLayers::append(
    const Tensors& tensors, const Numbers& numbers, const std::string& kind) {
  const auto real = [&](const char* name) { return static_cast<float>(number(numbers, name)); };
  const auto integer = [&](const char* name) {
    return static_cast<int64_t>(number(numbers, name));
  };
  const auto is = [&](const char* name) { return number(numbers, name) != 0.0; };
  Layer layer{
      .mixer_norm = tensors.at("input_layernorm.weight"),
      .mlp_norm = tensors.at("post_attention_layernorm.weight"),
      .norm_eps = real("norm_eps"),
      .unit_offset = is("unit_offset"),
      .mixer = {},
      .gate_up = projection(tensors, "gate_up_proj"),
      .down = projection(tensors, "down_proj")};
  std::vector<Part> parts = {kNorms, kGateUp, kDown};
  const auto use = [&](std::initializer_list<Part> more) {
    parts.insert(parts.end(), more);
  };
  const auto widen_to = [](int64_t& width, int64_t size) { width = std::max(width, size); };
  widen_to(widths_.inner, layer.inner_size());
  if (kind == "attention") {
    const Attention attention{
        projection(tensors, "qkv_proj"), projection(tensors, "o_proj"),
        find(tensors, "q_norm.weight"), find(tensors, "k_norm.weight"), integer("num_heads"),
        integer("num_kv_heads"), integer("head_dim"), integer("sliding_window"), real("scale"),
        real("qk_norm_eps"), is("qk_unit_offset"), is("rotary_interleaved"), is("has_gate")};
    widen_to(widths_.projected, attention.qkv_size());
    widen_to(widths_.query, attention.query_size());
    widen_to(widths_.mixed, attention.query_size());
    use({kQkv, kRotary, kAttention, kO});
    if (attention.has_gate) {
      use({kGate});
    }
    layer.mixer = attention;
  } else if (kind == "short_conv") {
    const Conv conv{
        projection(tensors, "in_proj"), projection(tensors, "out_proj"), tensors.at("conv_weight"),
        find(tensors, "conv_bias")};
    widen_to(widths_.projected, 3 * conv.channels());
    widen_to(widths_.mixed, conv.channels());
    use({kIn, kConv, kOut});
    layer.mixer = conv;
  } else {
    TORCH_CHECK(kind == "delta_rule", "append: no layer is computed by ", kind);
    const Delta delta{
        projection(tensors, "in_proj"), projection(tensors, "gates"),
        projection(tensors, "out_proj"), tensors.at("conv_weight"), tensors.at("decay"),
        tensors.at("dt_bias"), tensors.at("norm_weight"), integer("num_heads"),
        integer("num_key_heads"), real("gated_norm_eps"), is("gate_is_sigmoid")};
    widen_to(widths_.projected, delta.channels() + delta.value_size());
    widen_to(widths_.gates, 2 * delta.heads);
    widen_to(widths_.mixed, delta.value_size());
    use({kIn, kState, kOut});
    layer.mixer = delta;
  }
  for (const Part part : parts) {
    has_part_[part] = true;
  }
  layers_.push_back(std::move(layer));
}

void DecoderLayers::bind(
    std::vector<Tensor> keys_or_rings, std::vector<std::optional<Tensor>> values_or_states,
    std::vector<int64_t> groups) {
  TORCH_CHECK(
      keys_or_rings.size() == layers_.size() && values_or_states.size() == layers_.size() &&
          groups.size() == layers_.size(),
      "bind: one of each per layer");
  caches_.clear();
  for (size_t i = 0; i < layers_.size(); ++i) {
    caches_.push_back({keys_or_rings[i], values_or_states[i], groups[i]});
  }
}

// One call of `forward`. Layers follow each other in the same few buffers.
template <typename T>
class DecoderLayers::Pass {
 public:
  Pass(DecoderLayers& layers, const Tensor& x, const Step& step, Tensor& out, Tensor& total)
      : layers_(layers),
        step_(step),
        tokens_(x.size(0)),
        size_(x.size(1)),
        stream_(x.const_data_ptr<T>()),
        stride_(x.stride(0)),
        output_(out.mutable_data_ptr<T>()),
        residual_(total.mutable_data_ptr<T>()),
        lap_(layers.seconds_.data()) {
    const Widths& widths = layers.widths_;
    const int64_t columns[] = {size_,        widths.projected, widths.query,
                               widths.mixed, widths.gates,     widths.inner};
    T** const buffers[] = {&normed_, &projected_, &query_, &mixed_, &gates_, &inner_};
    for (size_t i = 0; i < std::size(buffers); ++i) {
      memory_[i] = at::empty({tokens_, columns[i]}, x.options());
      *buffers[i] = memory_[i].template mutable_data_ptr<T>();
    }
    if (layers.ranks_) {  // whose parts of a sum stay in float32
      part_ = at::empty({tokens_, size_}, x.options().dtype(at::kFloat));
    }
  }

  void run(const Layer& layer, const Caches& caches) {
    norm(layer, layer.mixer_norm);
    std::visit([&](const auto& mixer) { mix(mixer, caches); }, layer.mixer);
    norm(layer, layer.mlp_norm);
    const int64_t inner = layer.inner_size();
    gated_linear(
        layer.gate_up.product(
            normed_, tokens_, size_, size_, inner_, 2 * inner, layers_.invariant_),
        Activation::kSilu);
    lap_.ends(kGateUp);
    add(layer.down, inner_, inner, kDown);
  }

 private:
  // The norm of the stream, to which the output of what came before is added.
  void norm(const Layer& layer, const Tensor& weight) {
    if (is_first_) {
      rms_norm(RmsNorm<T>{
          stream_, nullptr, weight.const_data_ptr<T>(), normed_, nullptr, tokens_, size_, stride_,
          0, layer.norm_eps, layer.unit_offset});
    } else {
      rms_norm(RmsNorm<T>{
          output_, stream_, weight.const_data_ptr<T>(), normed_, residual_, tokens_, size_, size_,
          stride_, layer.norm_eps, layer.unit_offset});
      stream_ = residual_;
      stride_ = size_;
    }
    is_first_ = false;
    lap_.ends(kNorms);
  }

  void project(const Projection& projection, T* out, int64_t out_features, Part part) {
    linear(projection.product(
        normed_, tokens_, size_, size_, out, out_features, layers_.invariant_));
    lap_.ends(part);
  }

  // The output, which the next norm adds to the stream.
  void add(const Projection& projection, const T* from, int64_t width, Part part) {
    if (!layers_.ranks_) {
      linear(projection.product(
          from, tokens_, width, width, output_, size_, layers_.invariant_));
      lap_.ends(part);
      return;
    }
    float* const sum = part_.mutable_data_ptr<float>();
    linear(projection.product(from, tokens_, width, width, sum, size_, layers_.invariant_));
    lap_.ends(part);
    layers_.ranks_->add(sum, output_, tokens_ * size_);
    lap_.ends(kSums);
  }

  void mix(const Attention& a, const Caches& caches) {
    T* const keys = caches.first.mutable_data_ptr<T>();
    T* const values = caches.second->mutable_data_ptr<T>();
    const int64_t qkv_size = a.qkv_size();
    const T* const key = projected_ + a.heads * a.head_stride();
    project(a.qkv, projected_, qkv_size, kQkv);
    rotary_and_cache(Rotary<T>{
        projected_, key, key + a.kv_heads * a.dim, step_.cos.const_data_ptr<float>(),
        step_.sin.const_data_ptr<float>(), pointer<float>(step_.query_scale),
        pointer<T>(a.query_norm), pointer<T>(a.key_norm),
        step_.slot_mappings.at(caches.group).const_data_ptr<int64_t>(), query_, keys, values,
        tokens_, a.heads, a.kv_heads, a.dim, step_.cos.size(1), qkv_size, a.head_stride(), qkv_size,
        qkv_size, a.norm_eps, a.unit_offset, a.interleaved});
    lap_.ends(kRotary);
    const Tensor& tables = step_.block_tables.at(caches.group);
    paged_attention(PagedAttention<T>{
        query_, keys, values, mixed_, step_.query_start_loc.const_data_ptr<int32_t>(),
        step_.seq_lens.const_data_ptr<int32_t>(), tables.const_data_ptr<int32_t>(),
        step_.seq_lens.size(0), tables.stride(0), caches.first.size(1), a.heads, a.kv_heads, a.dim,
        a.scale, a.sliding_window, 0.0f, nullptr, !layers_.invariant_});
    lap_.ends(kAttention);
    if (a.has_gate) {
      sigmoid_gate(SigmoidGate<T>{
          mixed_, projected_ + a.dim, mixed_, tokens_, a.heads, a.dim, qkv_size, 2 * a.dim});
      lap_.ends(kGate);
    }
    add(a.o, mixed_, a.query_size(), kO);
  }

  void mix(const Conv& a, const Caches& caches) {
    const int64_t channels = a.channels();
    project(a.in, projected_, 3 * channels, kIn);
    short_conv(ShortConv<T>{
        projected_, a.weight.const_data_ptr<T>(), pointer<T>(a.bias), mixed_,
        rings<T>(caches.first), states(), tokens_, a.weight.size(0), 3 * channels});
    lap_.ends(kConv);
    add(a.out, mixed_, channels, kOut);
  }

  void mix(const Delta& a, const Caches& caches) {
    const int64_t channels = a.channels(), width = channels + a.value_size();
    const Tensor& state = *caches.second;
    project(a.in, projected_, width, kIn);
    project(a.gates, gates_, 2 * a.heads, kIn);
    gated_delta_rule(DeltaRule<T>{
        projected_, projected_ + channels, gates_, gates_ + a.heads,
        a.conv_weight.const_data_ptr<T>(), a.decay.const_data_ptr<float>(),
        a.dt_bias.const_data_ptr<float>(), a.norm_weight.const_data_ptr<float>(), mixed_,
        rings<T>(caches.first), state.mutable_data_ptr<float>(), states(), tokens_, a.key_heads,
        a.heads, state.size(2), state.size(3), a.conv_weight.size(0), width, width, 2 * a.heads,
        2 * a.heads, state.stride(0), a.norm_eps, a.sigmoid});
    lap_.ends(kState);
    add(a.out, mixed_, a.value_size(), kOut);
  }

  StepStates states() const {
    return step_states(
        step_.query_start_loc, step_.seq_lens, step_.states.at(0), step_.states.at(1),
        step_.states.at(2));
  }

  DecoderLayers& layers_;
  const Step& step_;
  const int64_t tokens_, size_;
  const T* stream_;  // to which is added; the input of the layers does not change
  int64_t stride_;
  bool is_first_ = true;
  T *const output_, *const residual_;
  Tensor memory_[6], part_;
  T *normed_, *projected_, *query_, *mixed_, *gates_, *inner_;
  Lap lap_;
};

std::tuple<at::Tensor, at::Tensor> DecoderLayers::forward(
    const Tensor& x, const Tensor& cos, const Tensor& sin,
    const std::optional<Tensor>& query_scale, const std::vector<Tensor>& slot_mappings,
    const Tensor& query_start_loc, const Tensor& seq_lens, const std::vector<Tensor>& block_tables,
    const std::vector<Tensor>& states) {
  Tensor out = at::empty(x.sizes(), x.options()), total = at::empty(x.sizes(), x.options());
  const Step step{cos,      sin,          query_scale, slot_mappings, query_start_loc,
                  seq_lens, block_tables, states};
  for_dtype(x, [&](auto zero) {
    Pass<decltype(zero)> pass(*this, x, step, out, total);
    for (size_t i = 0; i < layers_.size(); ++i) {
      pass.run(layers_[i], caches_.at(i));
    }
  });
  return {out, total};
}

c10::Dict<std::string, double> DecoderLayers::take_seconds() {
  c10::Dict<std::string, double> taken;
  for (int part = 0; part < kParts; ++part) {
    if (has_part_[part] || (part == kSums && ranks_)) {
      taken.insert(kPartNames[part], seconds_[part]);
    }
    seconds_[part] = 0.0;
  }
  return taken;
}

}  // namespace trident
