// Products of float.
#include "linear_products.h"

namespace trident {

template void linear(const Linear<float, float>&);
template void gated_linear(const Linear<float, float>&, Activation);

}  // namespace trident
