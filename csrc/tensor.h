// What Python hands over: tensors by DLPack, checked at the door.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace slipstream {

namespace nb = nanobind;

using Array = nb::ndarray<nb::device::cpu>;

enum class Number { f32, bf16, i8, u8, i32, i64, other };

inline Number number_of(const Array& array) {
    const auto type = array.dtype();
    const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
    if (code == nb::dlpack::dtype_code::Float && type.bits == 32) return Number::f32;
    if (code == nb::dlpack::dtype_code::Bfloat && type.bits == 16) return Number::bf16;
    if (code == nb::dlpack::dtype_code::Int && type.bits == 8) return Number::i8;
    if (code == nb::dlpack::dtype_code::UInt && type.bits == 8) return Number::u8;
    if (code == nb::dlpack::dtype_code::Bool && type.bits == 8) return Number::u8;
    if (code == nb::dlpack::dtype_code::Int && type.bits == 32) return Number::i32;
    if (code == nb::dlpack::dtype_code::Int && type.bits == 64) return Number::i64;
    return Number::other;
}

inline void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

// The numbers of an array of this type whose last `inner` axes lie one behind the other.
template <typename T>
T* numbers(const Array& array, Number type, int inner, const char* name) {
    if (number_of(array) != type) throw std::invalid_argument(std::string(name) + ": dtype");
    const int axes = static_cast<int>(array.ndim());
    int64_t expected = 1;
    for (int axis = axes - 1; axis >= 0 && axis >= axes - inner; --axis) {
        if (array.shape(axis) != 1 && array.stride(axis) != expected)
            throw std::invalid_argument(std::string(name) + ": must be contiguous");
        expected *= static_cast<int64_t>(array.shape(axis));
    }
    return static_cast<T*>(array.data());
}

template <typename T>
T* contiguous(const Array& array, Number type, const char* name) {
    return numbers<T>(array, type, static_cast<int>(array.ndim()), name);
}

}  // namespace slipstream
