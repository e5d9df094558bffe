// What each subject adds to the module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

namespace slipstream {

void bind_runtime(nanobind::module_& module);
void bind_matmul(nanobind::module_& module);

}  // namespace slipstream
