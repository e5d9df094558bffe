// Tensors by their addresses, for calls that are as short as what the conversion of one tensor
// takes. Whoever calls has checked dtypes, shapes and strides: slipstream/kernels/cpu.
#pragma once

#include <cstdint>

namespace slipstream {

// 0 is null.
using Address = uintptr_t;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace slipstream
