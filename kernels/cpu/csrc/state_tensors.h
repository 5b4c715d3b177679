// The states of a step, in tensors, as the kernels take them.
#pragma once

#include <ATen/core/Tensor.h>

#include "states.h"

namespace trident {

// The arrays are those of `kernels.state.states.StepStates`.
inline StepStates step_states(
    const at::Tensor& query_start_loc, const at::Tensor& seq_lens, const at::Tensor& reads,
    const at::Tensor& writes, const at::Tensor& saves) {
  return {
      query_start_loc.const_data_ptr<int32_t>(), seq_lens.const_data_ptr<int32_t>(),
      reads.const_data_ptr<int32_t>(), writes.const_data_ptr<int32_t>(),
      saves.const_data_ptr<int32_t>(), seq_lens.size(0), saves.size(1)};
}

template <typename T>
Rings<T> rings(const at::Tensor& ring) {
  return {ring.mutable_data_ptr<T>(), ring.stride(0), ring.size(1), ring.size(2)};
}

}  // namespace trident
