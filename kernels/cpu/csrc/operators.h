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

Tensor rotary_and_cache(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cos,
    const Tensor& sin, Tensor key_cache, Tensor value_cache, const Tensor& slot_mapping,
    const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm,
    double norm_eps, bool interleaved);

Tensor paged_attention(
    const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
    const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& block_tables,
    double scale, std::optional<int64_t> sliding_window);

Tensor linear(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& scale,
    const std::optional<Tensor>& bias, int64_t out_features, bool wide);

Tensor gated_linear(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& scale,
    const std::optional<Tensor>& bias, int64_t size, int64_t activation);

}  // namespace trident::operators
