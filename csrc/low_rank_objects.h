// Adapters' Python objects, as stacks of layers see them.
#pragma once

#include "low_rank.h"
#include "tensor.h"

namespace slipstream {

// Of a `LowRank`; valid while the object lives.
const LowRankFactors& low_rank_of(nb::handle factors);

}  // namespace slipstream
