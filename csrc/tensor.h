// What Python hands over: tensors, checked at the door.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace slipstream {

namespace nb = nanobind;

// A tensor of the host, which it keeps alive; to be copied and dropped under Python's lock only.
class Array {
  public:
    // Looks at a tensor by DLPack's table of functions, in a tenth of a microsecond; false where the
    // object has none, or is not on the host.
    bool look_at(nb::handle source) noexcept;
    // By a capsule that it has given, which takes twenty times as long.
    bool look_at(nb::handle source, const nb::ndarray<nb::device::cpu>& given) noexcept;

    size_t ndim() const { return axes_; }
    size_t shape(size_t axis) const { return static_cast<size_t>(shape_[axis]); }
    int64_t stride(size_t axis) const { return strides_[axis]; }
    size_t size() const { return size_; }
    void* data() const { return data_; }
    nb::dlpack::dtype dtype() const { return type_; }

    static constexpr int most_axes = 6;

  private:
    bool take(nb::handle source, void* data, nb::dlpack::dtype type, size_t axes,
              const int64_t* shape, const int64_t* strides) noexcept;

    nb::object owner_;
    void* data_ = nullptr;
    size_t axes_ = 0, size_ = 0;
    int64_t shape_[most_axes] = {}, strides_[most_axes] = {};
    nb::dlpack::dtype type_{};
};

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

namespace nanobind::detail {

template <>
struct type_caster<slipstream::Array> {
    NB_TYPE_CASTER(slipstream::Array, const_name("Tensor"))

    template <typename Flags>
    bool from_python(handle source, Flags flags, cleanup_list* cleanup) noexcept {
        if (value.look_at(source)) return true;
        make_caster<ndarray<device::cpu>> by_capsule;
        if (!by_capsule.from_python(source, flags, cleanup)) return false;
        return value.look_at(source, by_capsule.value);
    }
};

}  // namespace nanobind::detail
