// Gated delta nets' Python objects, as other subjects of the module see them.
#pragma once

#include <nanobind/stl/tuple.h>

#include <tuple>

#include "delta_net.h"
#include "tensor.h"

namespace slipstream {

// states, windows, drafted and drafted_gates as `DeltaCache` of kernels/delta_net.py has them.
using DeltaCacheArrays = std::tuple<Array, Array, Array, Array>;

// Of a `DeltaLayer`; valid while the object lives.
const DeltaShape& delta_shape(nb::handle layer);

// All but the states in this type.
DeltaCacheView view_delta_cache(const DeltaCacheArrays& cache, const DeltaShape& shape,
                                Number type);

}  // namespace slipstream
