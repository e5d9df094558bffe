// What each subject adds to the module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

namespace slipstream {

void bind_runtime(nanobind::module_& module);
void bind_matmul(nanobind::module_& module);
void bind_experts(nanobind::module_& module);
void bind_layers(nanobind::module_& module);
void bind_attention(nanobind::module_& module);
void bind_delta_net(nanobind::module_& module);
void bind_latent(nanobind::module_& module);
void bind_low_rank(nanobind::module_& module);
void bind_rows(nanobind::module_& module);
void bind_preparation(nanobind::module_& module);
void bind_sampling(nanobind::module_& module);
void bind_drafting(nanobind::module_& module);

}  // namespace slipstream
