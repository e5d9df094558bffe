// Looking at tensors.
#include "tensor.h"

#include <cstring>

namespace slipstream {
namespace {

// Of DLPack 1.3, as far as it is used: what a type's `__dlpack_c_exchange_api__` holds.
struct ExchangeTable {
    uint32_t major, minor;
    const ExchangeTable* older;
    void* managed_tensor_functions[3];
    // 0, or -1 with a Python exception set; the numbers stay the tensor's own.
    int (*look_at)(void* tensor, nb::dlpack::dltensor* found);
};

// The table of the type that was asked for last: of all tensors the same one.
const ExchangeTable* table_of(PyTypeObject* type) {
    static PyTypeObject* last_type = nullptr;
    static const ExchangeTable* last_table = nullptr;
    if (type == last_type) return last_table;
    const ExchangeTable* table = nullptr;
    PyObject* capsule =
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
    if (capsule) {
        table = static_cast<const ExchangeTable*>(
            PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
        Py_DECREF(capsule);
    }
    PyErr_Clear();
    while (table && table->major > 1) table = table->older;
    if (table && table->major < 1) table = nullptr;
    Py_INCREF(type);
    Py_XDECREF(last_type);
    last_type = type;
    return last_table = table;
}

std::string name_of(const Array& array) {
    const auto type = array.dtype();
    static const char* const kinds[] = {"int", "uint", "float", "handle", "bfloat", "complex",
                                        "bool"};
    const char* kind = type.code < 7 ? kinds[type.code] : "?";
    return type.code == 6 ? kind : kind + std::to_string(type.bits);
}

const char* name_of(Number number) {
    switch (number) {
        case Number::f32: return "float32";
        case Number::bf16: return "bfloat16";
        case Number::i8: return "int8";
        case Number::u8: return "bool or uint8";
        case Number::i32: return "int32";
        case Number::i64: return "int64";
        default: return "another";
    }
}

template <typename Axis>
std::string list_of(size_t count, Axis axis) {
    std::string text = "[";
    for (size_t index = 0; index < count; ++index)
        text += (index ? ", " : "") + std::to_string(axis(index));
    return text + "]";
}

}  // namespace

void throw_of_type(const Array& array, Number wanted, const char* name) {
    const std::string text =
        std::string(name) + ": dtype " + name_of(array) + ", not " + name_of(wanted);
    throw nb::type_error(text.c_str());
}

void throw_of_shape(const Array& array, std::initializer_list<int64_t> wanted, const char* name) {
    throw std::invalid_argument(
        std::string(name) + ": shape " +
        list_of(array.ndim(), [&](size_t axis) { return array.shape(axis); }) + ", not " +
        list_of(wanted.size(), [&](size_t axis) { return wanted.begin()[axis]; }));
}

bool Array::look_at(nb::handle source) noexcept {
    const ExchangeTable* table = table_of(Py_TYPE(source.ptr()));
    nb::dlpack::dltensor found;
    if (!table) return false;
    if (table->look_at(source.ptr(), &found) != 0) {
        PyErr_Clear();
        return false;
    }
    if (found.device.device_type != nb::device::cpu::value) return false;
    return take(source, static_cast<char*>(found.data) + found.byte_offset, found.dtype,
                static_cast<size_t>(found.ndim), found.shape, found.strides);
}

bool Array::look_at(nb::handle source, const nb::ndarray<nb::device::cpu>& given) noexcept {
    return take(source, given.data(), given.dtype(), given.ndim(), given.shape_ptr(),
                given.stride_ptr());
}

bool Array::take(nb::handle source, void* data, nb::dlpack::dtype type, size_t axes,
                 const int64_t* shape, const int64_t* strides) noexcept {
    if (axes > most_axes) return false;
    owner_ = nb::borrow(source);
    data_ = data, type_ = type, axes_ = axes, size_ = 1;
    for (size_t axis = axes; axis-- > 0;) {
        shape_[axis] = shape[axis];
        strides_[axis] = strides ? strides[axis] : static_cast<int64_t>(size_);
        size_ *= static_cast<size_t>(shape[axis]);
    }
    return true;
}

}  // namespace slipstream
