// The tensors of a projection, and the product with them on raw pointers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "linear.h"

namespace trident {

// Calls run with a value of the C++ type that corresponds to the dtype.
template <typename Run>
void for_dtype(const at::Tensor& x, Run run) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return run(float{});
    case at::kBFloat16:
      return run(at::BFloat16{});
    case at::kHalf:
      return run(at::Half{});
    default:
      TORCH_CHECK(false, "trident_cpu: no kernel for ", x.scalar_type());
  }
}

template <typename T>
const T* pointer(const std::optional<at::Tensor>& x) {
  return x.has_value() ? x->const_data_ptr<T>() : nullptr;
}

// As the operator `linear` takes them.
struct Projection {
  at::Tensor weight;
  std::optional<at::Tensor> scale, offset, bias;

  template <typename In, typename Out>
  Linear<In, Out> product(
      const In* x, int64_t rows, int64_t in_features, int64_t x_stride, Out* out,
      int64_t out_features, bool invariant) const {
    const int64_t groups = scale && scale->dim() == 3 ? scale->size(1) : 0;
    const int64_t bits = 32 * weight.size(1) / in_features;  // a unit has 32
    return {
        x, weight.const_data_ptr(), groups > 0 ? nullptr : pointer<float>(scale),
        groups > 0 ? pointer<at::Half>(scale) : nullptr, pointer<at::Half>(offset),
        pointer<In>(bias), out, rows, in_features, out_features, x_stride, groups, bits, invariant};
  }
};

}  // namespace trident
