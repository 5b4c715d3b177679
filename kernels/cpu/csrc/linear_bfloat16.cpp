// Products of bfloat16.
#include "linear_products.h"

namespace trident {

template void linear(const Linear<at::BFloat16, at::BFloat16>&);
template void linear(const Linear<at::BFloat16, float>&);
template void gated_linear(const Linear<at::BFloat16, at::BFloat16>&, Activation);

}  // namespace trident
