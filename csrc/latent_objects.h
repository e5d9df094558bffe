// Latent attention's Python objects, as stacks of layers see them.
#pragma once

#include "latent.h"
#include "tensor.h"

namespace slipstream {

// Of a `LatentLayer`; valid while the object lives.
const Latent& latent_of(nb::handle layer);

}  // namespace slipstream
