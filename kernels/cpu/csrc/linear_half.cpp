// Products of half.
#include "linear_products.h"

namespace trident {

template void linear(const Linear<at::Half, at::Half>&);
template void linear(const Linear<at::Half, float>&);
template void gated_linear(const Linear<at::Half, at::Half>&, Activation);

}  // namespace trident
