// The operators of torch.ops.trident_cpu, on tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace trident::operators {

using at::Tensor;

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, bool unit_offset);

std::tuple<Tensor, Tensor> rms_norm_add(
    const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, bool unit_offset);

// Both are [tokens, heads, dim]; x is contiguous.
Tensor sigmoid_gate(const Tensor& x, const Tensor& gate);

Tensor rotary_and_cache(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cos,
    const Tensor& sin, Tensor key_cache, Tensor value_cache, const Tensor& slot_mapping,
    const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm,
    double norm_eps, bool interleaved, const std::optional<Tensor>& query_scale);

Tensor paged_attention(
    const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
    const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& block_tables,
    double scale, std::optional<int64_t> sliding_window, std::optional<double> soft_cap,
    const std::optional<Tensor>& sinks, bool splits);

// The arrays of a step are those of `kernels.state.states.StepStates`; weight is [kernel size,
// channels].
Tensor short_conv(
    const Tensor& projected, const Tensor& weight, const std::optional<Tensor>& bias, Tensor ring,
    const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& reads,
    const Tensor& writes, const Tensor& saves);

// conv_weight is [kernel size, channels]; decay, dt_bias and norm_weight are float32.
Tensor gated_delta_rule(
    const Tensor& qkv, const Tensor& z, const Tensor& beta_logits, const Tensor& decay_inputs,
    const Tensor& conv_weight, const Tensor& decay, const Tensor& dt_bias,
    const Tensor& norm_weight, double norm_eps, int64_t key_heads, bool sigmoid, Tensor ring,
    Tensor state, const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& reads,
    const Tensor& writes, const Tensor& saves);

// conv_weight is [kernel size, channels]; decay, dt_bias and skip are float32.
Tensor ssd(
    const Tensor& inputs, const Tensor& time_steps, const Tensor& conv_weight,
    const std::optional<Tensor>& conv_bias, const Tensor& decay, const Tensor& dt_bias,
    double least_dt, double most_dt, const Tensor& skip, int64_t groups, Tensor ring, Tensor state,
    const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& reads,
    const Tensor& writes, const Tensor& saves);

// With integers in groups, scale and offset are [panels, groups, columns].
Tensor linear(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& scale,
    const std::optional<Tensor>& offset, const std::optional<Tensor>& bias, int64_t out_features,
    bool wide, bool invariant);

Tensor gated_linear(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& scale,
    const std::optional<Tensor>& offset, const std::optional<Tensor>& bias, int64_t size,
    int64_t activation, bool invariant);

// Adds to `totals` how often each expert was chosen.
Tensor experts(
    const Tensor& x, const Tensor& experts, const Tensor& weights, Tensor totals,
    const Tensor& gate_up, const std::optional<Tensor>& gate_up_scale,
    const std::optional<Tensor>& gate_up_bias, const Tensor& down,
    const std::optional<Tensor>& down_scale, const std::optional<Tensor>& down_bias, int64_t size,
    int64_t activation, double alpha, double limit, double offset);

// logits are float32 [rows, size], top_k is int32 [rows], the other arguments float64 [rows].
Tensor draw(
    const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
    const Tensor& min_p, const Tensor& uniform);

// logits are float32 [rows, size], the other arguments float32 [rows].
void truncate(
    Tensor logits, const Tensor& temperature, const Tensor& top_n_sigma, const Tensor& typical_p);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> prepare_inputs(
    const Tensor& token_ids, const Tensor& block_tables, const Tensor& num_tokens,
    Tensor num_computed_tokens, const Tensor& finish_reasons, const Tensor& slots,
    const Tensor& query_start_loc, int64_t num_tokens_padded, int64_t block_size,
    int64_t num_groups);

Tensor scatter_tokens(
    Tensor token_ids, const Tensor& stop_token_ids, Tensor num_tokens,
    const Tensor& num_prompt_tokens, const Tensor& min_tokens, const Tensor& max_tokens,
    Tensor finish_reasons, const Tensor& slots, const Tensor& sampled);

}  // namespace trident::operators
