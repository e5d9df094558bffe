// What Python hands over: tensors, checked at the door.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

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

inline int64_t axis(const Array& array, int index) {
    return static_cast<int64_t>(array.shape(index));
}

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

// TypeError and ValueError that say what was given and what is wanted.
[[noreturn]] void throw_of_type(const Array& array, Number wanted, const char* name);
[[noreturn]] void throw_of_shape(const Array& array, std::initializer_list<int64_t> wanted,
                                 const char* name);

// The numbers of an array of this type whose last `inner` axes are contiguous.
template <typename T>
T* numbers(const Array& array, Number type, int inner, const char* name) {
    if (number_of(array) != type) throw_of_type(array, type, name);
    const int axes = static_cast<int>(array.ndim());
    int64_t expected = 1;
    for (int axis = axes - 1; axis >= 0 && axis >= axes - inner; --axis) {
        if (array.size() && array.shape(axis) != 1 && array.stride(axis) != expected)
            throw std::invalid_argument(std::string(name) + ": must be contiguous");
        expected *= static_cast<int64_t>(array.shape(axis));
    }
    return static_cast<T*>(array.data());
}

template <typename T>
T* contiguous(const Array& array, Number type, const char* name) {
    return numbers<T>(array, type, static_cast<int>(array.ndim()), name);
}

// u8 stands for bool as well.
template <typename T>
constexpr Number number_type = Number::other;
template <>
inline constexpr Number number_type<float> = Number::f32;
template <>
inline constexpr Number number_type<uint8_t> = Number::u8;
template <>
inline constexpr Number number_type<int32_t> = Number::i32;
template <>
inline constexpr Number number_type<int64_t> = Number::i64;

// The numbers of an array of this shape whose last `inner` axes are contiguous.
template <typename T>
T* shaped(const Array& array, std::initializer_list<int64_t> shape, int inner, const char* name) {
    T* found = numbers<T>(array, number_type<std::remove_const_t<T>>, inner, name);
    bool same = array.ndim() == shape.size();
    for (size_t axis = 0; same && axis < shape.size(); ++axis)
        same = static_cast<int64_t>(array.shape(axis)) == shape.begin()[axis];
    if (!same) throw_of_shape(array, shape, name);
    return found;
}

// The numbers of a contiguous array of this shape.
template <typename T>
T* dense(const Array& array, std::initializer_list<int64_t> shape, const char* name) {
    return shaped<T>(array, shape, static_cast<int>(shape.size()), name);
}

// Null where there is no array.
template <typename T>
T* dense(const std::optional<Array>& array, std::initializer_list<int64_t> shape,
         const char* name) {
    return array ? dense<T>(*array, shape, name) : nullptr;
}

// The length of an axis of an array that must have `axes` of them.
inline int64_t length(const Array& array, size_t axes, size_t axis, const char* name) {
    if (array.ndim() != axes)
        throw std::invalid_argument(std::string(name) + ": " + std::to_string(axes) + " axes");
    return static_cast<int64_t>(array.shape(axis));
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
