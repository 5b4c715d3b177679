// Builds a step's inputs from the slot tables, and appends the step's tokens to them.
// Same rules as kernels/step/step_inputs.py and kernels/step/token_scatter.py.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>

#include "operators.h"

namespace trident::operators {
namespace {

constexpr int32_t kRunning = 0, kStop = 1, kLength = 2, kSkipped = -1;

struct Table {
  const int32_t* values;
  int64_t width;

  explicit Table(const Tensor& table)
      : values(table.const_data_ptr<int32_t>()), width(table.dim() == 2 ? table.size(1) : 1) {}

  const int32_t* operator[](int64_t slot) const {
    return values + slot * width;
  }
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> prepare_inputs(
    const Tensor& token_ids, const Tensor& block_tables, const Tensor& num_tokens,
    Tensor num_computed_tokens, const Tensor& finish_reasons, const Tensor& slots,
    const Tensor& query_start_loc, int64_t num_tokens_padded, int64_t block_size,
    int64_t num_groups) {
  const Table all_tokens(token_ids), all_blocks(block_tables), known(num_tokens);
  const Table reasons(finish_reasons), slot_of(slots), starts(query_start_loc);
  int32_t* computed = num_computed_tokens.mutable_data_ptr<int32_t>();
  const int64_t rows = slots.size(0);
  const auto ints = slots.options(), longs = ints.dtype(at::kLong);
  Tensor step_tokens = at::full({num_tokens_padded}, 0, longs);
  Tensor positions = at::full({num_tokens_padded}, 0, longs);
  Tensor slot_mapping = at::full({num_groups * num_tokens_padded}, -1, longs);
  Tensor seq_lens = at::full({rows}, 0, ints);
  Tensor blocks = at::full({rows, all_blocks.width}, 0, ints);
  const int64_t max_blocks = all_blocks.width / num_groups;
  Tensor logits_rows = at::full({rows}, 0, longs);
  Tensor sample_slots = at::full({rows}, -1, ints);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t slot = *slot_of[i], begin = *starts[i], end = *starts[i + 1];
    if (slot < 0 || *reasons[slot] != kRunning || end <= begin) {
      continue;
    }
    const int64_t first = computed[slot], length = first + end - begin;
    if (length > *known[slot]) {
      continue;
    }
    const int32_t* table = all_blocks[slot];
    for (int64_t token = begin; token < end; ++token) {
      const int64_t position = first + token - begin;
      step_tokens.mutable_data_ptr<int64_t>()[token] = all_tokens[slot][position];
      positions.mutable_data_ptr<int64_t>()[token] = position;
      for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t block = table[group * max_blocks + position / block_size];
        slot_mapping.mutable_data_ptr<int64_t>()[group * num_tokens_padded + token] =
            block * block_size + position % block_size;
      }
    }
    for (int64_t group = 0; group < num_groups; ++group) {
      std::copy_n(
          table + group * max_blocks, (length + block_size - 1) / block_size,
          blocks.mutable_data_ptr<int32_t>() + i * all_blocks.width + group * max_blocks);
    }
    seq_lens.mutable_data_ptr<int32_t>()[i] = length;
    logits_rows.mutable_data_ptr<int64_t>()[i] = end - 1;
    if (length == *known[slot]) {
      sample_slots.mutable_data_ptr<int32_t>()[i] = slot;
    }
    computed[slot] = length;
  }
  return {step_tokens, positions, slot_mapping, seq_lens, blocks, logits_rows, sample_slots};
}

Tensor scatter_tokens(
    Tensor token_ids, const Tensor& stop_token_ids, Tensor num_tokens,
    const Tensor& num_prompt_tokens, const Tensor& min_tokens, const Tensor& max_tokens,
    Tensor finish_reasons, const Tensor& slots, const Tensor& sampled) {
  const Table stops(stop_token_ids), prompts(num_prompt_tokens), least(min_tokens);
  const Table most(max_tokens), slot_of(slots);
  const int64_t max_model_len = token_ids.size(1), rows = slots.size(0);
  int32_t* all_tokens = token_ids.mutable_data_ptr<int32_t>();
  int32_t* known = num_tokens.mutable_data_ptr<int32_t>();
  int32_t* finished = finish_reasons.mutable_data_ptr<int32_t>();
  Tensor reasons = at::full({rows}, kSkipped, slots.options());
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t slot = *slot_of[i];
    if (slot < 0 || finished[slot] != kRunning || known[slot] >= max_model_len) {
      continue;
    }
    const int32_t token = static_cast<int32_t>(sampled.const_data_ptr<int64_t>()[i]);
    all_tokens[slot * max_model_len + known[slot]] = token;
    const int32_t outputs = ++known[slot] - *prompts[slot];
    const int32_t* end = stops[slot] + stops.width;
    if (outputs > *least[slot] && std::find(stops[slot], end, token) != end) {
      finished[slot] = kStop;
    } else if (outputs >= *most[slot] || known[slot] == max_model_len) {
      finished[slot] = kLength;
    }
    reasons.mutable_data_ptr<int32_t>()[i] = finished[slot];
  }
  return reasons;
}

}  // namespace trident::operators
