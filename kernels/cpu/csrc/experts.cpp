// Mixture of experts: the gated MLPs that each token has chosen, one expert after another, so that
// the weights of those that no token has chosen are never read.
#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "linear.h"
#include "operators.h"

#ifdef TRIDENT_LINEAR
namespace trident::operators {

// Returns the sum over its chosen experts of each row of x, [T, hidden] in the dtype of x. The sum is
// in float32 and in the order of the experts: it depends on the row alone.
//   gate_up, down: panels of every expert, stacked; their scales likewise, with int8 weights.
//   expert_ids: int64 [T, top_k]; weights: float32 [T, top_k]; both contiguous.
Tensor experts(
    const Tensor& x, const Tensor& gate_up, const std::optional<Tensor>& gate_up_scale,
    const Tensor& down, const std::optional<Tensor>& down_scale, const Tensor& expert_ids,
    const Tensor& weights, int64_t size, int64_t activation) {
  const int64_t tokens = x.size(0), hidden = x.size(1), top_k = expert_ids.size(1);
  Tensor out = at::zeros({tokens, hidden}, x.options().dtype(at::kFloat));
  struct Row {
    int64_t token;
    float weight;
  };
  std::vector<std::vector<Row>> chosen(gate_up.size(0));
  const int64_t* ids = expert_ids.const_data_ptr<int64_t>();
  const float* shares = weights.const_data_ptr<float>();
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    chosen[ids[i]].push_back({i / top_k, shares[i]});
  }
  const auto part = [](const std::optional<Tensor>& all, int64_t expert) {
    return all.has_value() ? std::optional<Tensor>(all->select(0, expert)) : std::nullopt;
  };
  float* sums = out.mutable_data_ptr<float>();
  for (int64_t expert = 0; expert < std::ssize(chosen); ++expert) {
    const std::vector<Row>& rows = chosen[expert];
    const int64_t count = std::ssize(rows);
    if (count == 0) {
      continue;
    }
    Tensor given = x;
    if (count < tokens) {
      Tensor places = at::empty({count}, at::kLong);
      for (int64_t i = 0; i < count; ++i) {
        places.mutable_data_ptr<int64_t>()[i] = rows[i].token;
      }
      given = x.index_select(0, places);
    }
    const Tensor inner = gated_linear(
        given, gate_up.select(0, expert), part(gate_up_scale, expert), std::nullopt, size,
        activation);
    const Tensor product = linear(
        inner, down.select(0, expert), part(down_scale, expert), std::nullopt, hidden, true);
    const float* values = product.const_data_ptr<float>();
    for (int64_t i = 0; i < count; ++i) {
      float* sum = sums + rows[i].token * hidden;
      for (int64_t j = 0; j < hidden; ++j) {
        sum[j] += rows[i].weight * values[i * hidden + j];
      }
    }
  }
  return out.to(x.scalar_type());
}

}  // namespace trident::operators
#endif
