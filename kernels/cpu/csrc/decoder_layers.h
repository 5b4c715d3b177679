// All decoder layers of a model as one operation: when decoding one token, Python overhead between
// operations and layers is a large part of the step.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "projection.h"
#include "shared_sum.h"

namespace trident {

class DecoderLayers : public torch::CustomClassHolder {
 public:
  using Tensor = at::Tensor;
  using Tensors = c10::Dict<std::string, Tensor>;
  using Numbers = c10::Dict<std::string, double>;

  // If invariant, attention does not split keys, and products are so: a token's results do not
  // depend on what else is computed.
  explicit DecoderLayers(bool invariant) : invariant_(invariant) {}

  // Has what the mixer and the MLP return summed over the ranks, of which these are one's layers.
  void sum_over(const c10::intrusive_ptr<SharedSum>& ranks) {
    ranks_ = ranks;
  }

  // Appends a layer: RMS norms before its mixer and before its MLP, which is gated by SiLU.
  //
  // `kind` of the mixer is "attention", "short_conv" or "delta_rule". `tensors` are `weight`,
  // `scale`, `offset` and `bias` of the projections, as `linear` takes them: gate_up_proj,
  // down_proj, qkv_proj and o_proj of attention, in_proj and out_proj of the others, gates of the
  // delta rule; the norms' weights; and those that the operator of the mixer takes. What is optional
  // there may be missing, as may q_norm and k_norm.
  //
  // `numbers`, 0 where they are missing: norm_eps and unit_offset, as `rms_norm` takes them; of
  // attention num_heads, num_kv_heads, head_dim, scale, sliding_window, rotary_interleaved,
  // qk_norm_eps, qk_unit_offset and has_gate, whether qkv_proj gives a gate of its output behind
  // each query; of the delta rule num_heads, num_key_heads, gated_norm_eps and gate_is_sigmoid.
  void append(const Tensors& tensors, const Numbers& numbers, const std::string& kind);

  // Sets each layer's keys, values and which of the groups of `forward` it is in; or, of a layer
  // that keeps states, its ring and states, which those of a short convolution have none of.
  void bind(
      std::vector<Tensor> keys_or_rings, std::vector<std::optional<Tensor>> values_or_states,
      std::vector<int64_t> groups);

  // Returns the last layer's output and the residual stream, to which it has not been added yet.
  // There are a slot mapping and block tables for each group of layers. `states` are reads, writes
  // and saves of `kernels.state.states.StepStates`; none if no layer keeps states.
  std::tuple<Tensor, Tensor> forward(
      const Tensor& x, const Tensor& cos, const Tensor& sin,
      const std::optional<Tensor>& query_scale, const std::vector<Tensor>& slot_mappings,
      const Tensor& query_start_loc, const Tensor& seq_lens,
      const std::vector<Tensor>& block_tables, const std::vector<Tensor>& states);

  // Returns the seconds of each part since the last call, summed over all calls of `forward`.
  c10::Dict<std::string, double> take_seconds();

 private:
  enum Part {
    kNorms, kQkv, kRotary, kAttention, kGate, kO, kIn, kConv, kState, kOut, kGateUp, kDown, kSums,
    kParts
  };

  struct Attention {
    Projection qkv, o;
    std::optional<Tensor> query_norm, key_norm;
    int64_t heads, kv_heads, dim, sliding_window;
    float scale, norm_eps;
    bool unit_offset, interleaved, has_gate;

    int64_t query_size() const {
      return heads * dim;
    }
    int64_t head_stride() const {  // of the queries of a token
      return has_gate ? 2 * dim : dim;
    }
    int64_t qkv_size() const {
      return heads * head_stride() + 2 * kv_heads * dim;
    }
  };

  struct Conv {
    Projection in, out;
    Tensor weight;  // [kernel size, channels]
    std::optional<Tensor> bias;

    int64_t channels() const {
      return weight.size(1);
    }
  };

  struct Delta {
    Projection in, gates, out;
    Tensor conv_weight, decay, dt_bias, norm_weight;
    int64_t heads, key_heads;
    float norm_eps;
    bool sigmoid;

    int64_t channels() const {
      return conv_weight.size(1);
    }
    int64_t value_size() const {
      return heads * norm_weight.size(0);
    }
  };

  struct Layer {
    Tensor mixer_norm, mlp_norm;
    float norm_eps;
    bool unit_offset;
    std::variant<Attention, Conv, Delta> mixer;
    Projection gate_up, down;

    int64_t inner_size() const {  // including the padding of the last panel
      return gate_up.weight.size(0) * gate_up.weight.size(2) / 2;
    }
  };

  // The most values of a token in a buffer, of all layers.
  struct Widths {
    int64_t projected = 0, query = 0, mixed = 0, gates = 0, inner = 0;
  };

  struct Caches {
    Tensor first;  // keys or rings
    std::optional<Tensor> second;
    int64_t group;
  };

  // What a step gives to all layers.
  struct Step {
    const Tensor &cos, &sin;
    const std::optional<Tensor>& query_scale;
    const std::vector<Tensor>& slot_mappings;
    const Tensor &query_start_loc, &seq_lens;
    const std::vector<Tensor>& block_tables;
    const std::vector<Tensor>& states;
  };

  template <typename T>
  class Pass;

  bool invariant_;
  std::vector<Layer> layers_;
  std::vector<Caches> caches_;
  Widths widths_;
  c10::intrusive_ptr<SharedSum> ranks_;
  std::array<bool, kParts> has_part_ = {};
  std::array<double, kParts> seconds_ = {};
};

}  // namespace trident
