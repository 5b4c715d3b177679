// Registers the operators of torch.ops.trident_cpu. The Python wrappers check their arguments;
// `engine.models.decoder` is responsible for those of `DecoderLayers`.
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "decoder_layers.h"
#include "experts.h"
#include "kernels.h"
#include "linear.h"
#include "operators.h"
#include "projection.h"
#include "shared_sum.h"
#include "state_tensors.h"
#include "vector.h"

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

Tensor sigmoid_gate(const Tensor& x, const Tensor& gate) {
  Tensor out = at::empty(x.sizes(), x.options());
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    trident::sigmoid_gate(SigmoidGate<T>{
        x.const_data_ptr<T>(), gate.const_data_ptr<T>(), out.mutable_data_ptr<T>(), x.size(0),
        x.size(1), x.size(2), gate.stride(0), gate.stride(1)});
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
        query.size(1), key.size(1), query.size(2), cos.size(1), query.stride(0), query.size(2),
        key.stride(0), value.stride(0), static_cast<float>(norm_eps), false, interleaved});
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

Tensor ssd(
    const Tensor& inputs, const Tensor& time_steps, const Tensor& conv_weight,
    const std::optional<Tensor>& conv_bias, const Tensor& decay, const Tensor& dt_bias,
    double least_dt, double most_dt, const Tensor& skip, int64_t groups, Tensor ring, Tensor state,
    const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& reads,
    const Tensor& writes, const Tensor& saves) {
  Tensor out = at::empty(
      {inputs.size(0), state.size(1) * state.size(3)}, inputs.options().dtype(at::kFloat));
  for_dtype(inputs, [&](auto zero) {
    using T = decltype(zero);
    trident::ssd(SSD<T>{
        inputs.const_data_ptr<T>(), time_steps.const_data_ptr<T>(), conv_weight.const_data_ptr<T>(),
        pointer<T>(conv_bias), decay.const_data_ptr<float>(), dt_bias.const_data_ptr<float>(),
        skip.const_data_ptr<float>(), out.mutable_data_ptr<float>(), rings<T>(ring),
        state.mutable_data_ptr<float>(),
        step_states(query_start_loc, seq_lens, reads, writes, saves), inputs.size(0), groups,
        state.size(1), state.size(2), state.size(3), conv_weight.size(0), inputs.stride(0),
        time_steps.stride(0), state.stride(0), static_cast<float>(least_dt),
        static_cast<float>(most_dt)});
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
      "sigmoid_gate(Tensor x, Tensor gate) -> Tensor", &trident::operators::sigmoid_gate);
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
      "ssd(Tensor inputs, Tensor time_steps, Tensor conv_weight, Tensor? conv_bias, Tensor decay,"
      " Tensor dt_bias, float least_dt, float most_dt, Tensor skip, int groups, Tensor(a!) ring,"
      " Tensor(b!) state, Tensor query_start_loc, Tensor seq_lens, Tensor reads, Tensor writes,"
      " Tensor saves) -> Tensor",
      &trident::operators::ssd);
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
      .def(torch::init<bool>())
      .def("sum_over", &trident::DecoderLayers::sum_over)
      .def("append", &trident::DecoderLayers::append)
      .def("bind", &trident::DecoderLayers::bind)
      .def("forward", &trident::DecoderLayers::forward)
      .def("take_seconds", &trident::DecoderLayers::take_seconds);
}
