// The door of packed weights and their products.
#include "matmul.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "matmul_blocks.h"
#include "matmul_pack.h"
#include "rounding.h"
#include "tensor.h"

namespace slipstream {

ByLevel<MatmulKernels> matmul_kernels;

namespace {

constexpr int64_t most_int8_columns = 65536;

Floats floats(const Array& values) {
    require(values.ndim() == 2, "a weight has two axes");
    const Number type = number_of(values);
    require(type == Number::f32 || type == Number::bf16, "a weight is float32 or bfloat16");
    const auto* from = contiguous<const void>(values, type, "weight");
    return {from, type == Number::bf16, static_cast<int64_t>(values.shape(0)),
            static_cast<int64_t>(values.shape(1))};
}

std::unique_ptr<Matrix> pack(const Array& values) {
    const Floats from = floats(values);
    nb::gil_scoped_release released;
    return pack_floats(from.is_bf16 ? Storage::bf16 : Storage::f32, from.values, from.rows,
                       from.columns);
}

std::unique_ptr<Matrix> pack_i8(const Array& values, const Array& scales, bool one_digit) {
    require(values.ndim() == 2 && scales.ndim() == 1 && scales.shape(0) == values.shape(0),
            "values [N, K], scales [N]");
    require(static_cast<int64_t>(values.shape(1)) <= most_int8_columns,
            "sums of so many int8 columns may overflow");
    const auto* from = contiguous<const int8_t>(values, Number::i8, "values");
    const auto* by = contiguous<const float>(scales, Number::f32, "scales");
    nb::gil_scoped_release released;
    return pack_int8(from, by, values.shape(0), values.shape(1), one_digit);
}

std::unique_ptr<Matrix> pack_i4(const Array& values, const Array& scales,
                                std::optional<Array> zeros, int64_t group) {
    require(values.ndim() == 2 && scales.ndim() == 2, "values and scales have two axes");
    const int64_t rows = values.shape(0), columns = 2 * static_cast<int64_t>(values.shape(1));
    require(group > 0 && group % 32 == 0 && columns % group == 0,
            "int4 groups are multiples of 32 columns, and K one of groups");
    require(group <= 8192, "sums of more than 8,192 int4 columns may overflow");
    require(static_cast<int64_t>(scales.shape(0)) == rows &&
                static_cast<int64_t>(scales.shape(1)) == columns / group &&
                (!zeros || zeros->size() == scales.size()),
            "values [N, K / 2], scales and zeros [N, K / group]");
    const auto* from = contiguous<const uint8_t>(values, Number::u8, "values");
    const auto* by = contiguous<const float>(scales, Number::f32, "scales");
    const auto* zero = zeros ? contiguous<const uint8_t>(*zeros, Number::u8, "zeros") : nullptr;
    nb::gil_scoped_release released;
    return pack_int4(from, by, zero, rows, columns, group);
}

// Of e2m1 numbers, two a byte, with `group` columns a scale: (rows, columns).
std::pair<int64_t, int64_t> e2m1_shape(const Array& values, const Array& scales, int64_t group) {
    require(values.ndim() == 2 && scales.ndim() == 2, "values and scales have two axes");
    const int64_t rows = values.shape(0), columns = 2 * static_cast<int64_t>(values.shape(1));
    require(columns % group == 0 && static_cast<int64_t>(scales.shape(0)) == rows &&
                static_cast<int64_t>(scales.shape(1)) == columns / group,
            "values [N, K / 2], scales [N, K / group]");
    return {rows, columns};
}

std::unique_ptr<Matrix> pack_mx(const Array& values, const Array& scales) {
    const auto [rows, columns] = e2m1_shape(values, scales, 32);
    const auto* from = contiguous<const uint8_t>(values, Number::u8, "values");
    const auto* by = contiguous<const uint8_t>(scales, Number::u8, "scales");
    nb::gil_scoped_release released;
    return pack_mxfp4(from, by, rows, columns);
}

std::unique_ptr<Matrix> pack_nv(const Array& values, const Array& scales, const Array& factors) {
    const auto [rows, columns] = e2m1_shape(values, scales, 16);
    require(static_cast<int64_t>(factors.size()) == rows, "factors [N]");
    const auto* from = contiguous<const uint8_t>(values, Number::u8, "values");
    const auto* by = contiguous<const float>(scales, Number::f32, "scales");
    const auto* factor = contiguous<const float>(factors, Number::f32, "factors");
    nb::gil_scoped_release released;
    return pack_nvfp4(from, by, factor, rows, columns);
}

// Rows of blocks [N, bytes of a row] of parts of a weight, one below the other; null where their
// types do not go together.
std::unique_ptr<Matrix> pack_gguf(const std::vector<Array>& parts,
                                  const std::vector<std::string>& types) {
    require(!parts.empty() && parts.size() == types.size(), "each part has a type");
    std::vector<BlockRows> rows;
    for (size_t i = 0; i < parts.size(); ++i) {
        const Array& part = parts[i];
        const BlockType* type = block_type(types[i].c_str());
        require(type != nullptr, "blocks of this type are not packed");
        require(part.ndim() == 2 && part.shape(1) % type->bytes == 0, "rows are whole blocks");
        rows.push_back({type, contiguous<const uint8_t>(part, Number::u8, "blocks"),
                        static_cast<int64_t>(part.shape(0)),
                        static_cast<int64_t>(part.shape(1)) / type->bytes});
        require(rows[i].columns() == rows[0].columns(), "parts have as many columns");
    }
    nb::gil_scoped_release released;
    return pack_blocks(rows);
}

std::unique_ptr<Matrix> round_i8(const Array& values, bool one_digit) {
    const Floats from = floats(values);
    require(from.columns <= most_int8_columns, "sums of so many int8 columns may overflow");
    nb::gil_scoped_release released;
    return round_to_int8(from, one_digit);
}

std::unique_ptr<Matrix> round_i4(const Array& values, int64_t group, bool has_zeros) {
    const Floats from = floats(values);
    require((group == 32 || group == 128) && from.columns % group == 0,
            "int4 groups are 32 or 128 columns, and K a multiple of them");
    nb::gil_scoped_release released;
    return round_to_int4(from, group, has_zeros);
}

void run_matmul(const Matrix& weight, const Array& x, std::optional<Array> bias, const Array& out) {
    const Number type = number_of(x), out_type = number_of(out);
    require(x.ndim() == 2 && static_cast<int64_t>(x.shape(1)) == weight.columns, "x: [M, K]");
    require(out.ndim() == 2 && out.shape(0) == x.shape(0) &&
                static_cast<int64_t>(out.shape(1)) == weight.rows,
            "out: [M, N]");
    require(type == Number::bf16 || type == Number::f32, "x is bfloat16 or float32");
    require(out_type == type || out_type == Number::f32, "out is in x's type or float32");
    require(weight.takes(type == Number::bf16), "x is in the type of the weight");
    MatmulCall call{};
    call.weight = &weight;
    call.x = numbers<const void>(x, type, 1, "x");
    call.x_is_bf16 = type == Number::bf16;
    call.num_rows = static_cast<int64_t>(x.shape(0));
    call.x_stride = x.stride(0);
    if (bias) {
        require(static_cast<int64_t>(bias->size()) == weight.rows, "bias: [N]");
        call.bias = contiguous<const void>(*bias, type, "bias");
    }
    call.out = numbers<void>(out, out_type, 1, "out");
    call.out_is_bf16 = out_type == Number::bf16;
    call.out_stride = out.stride(0);
    nb::gil_scoped_release released;
    matmul(call);
}

std::unique_ptr<Matrix> part(const Matrix& weight, int64_t start, int64_t stop) {
    require(start % block_rows == 0 && 0 <= start && start < stop && stop <= weight.rows,
            "a part begins with a block and has rows of the weight");
    return std::make_unique<Matrix>(part_of(weight, start, stop));
}

void run_look_up(const Matrix& table, const Array& ids, const Array& out) {
    const bool is_floats = table.storage == Storage::f32 || table.storage == Storage::bf16;
    require(is_floats || table.of_blocks, "rounded weights are no tables");
    const auto* from = contiguous<const int64_t>(ids, Number::i64, "ids");
    const Number type = !is_floats ? number_of(out)
                        : table.storage == Storage::f32 ? Number::f32
                                                        : Number::bf16;
    require(type == Number::f32 || type == Number::bf16, "rows are float32 or bfloat16");
    auto* to = contiguous<void>(out, type, "out");
    require(static_cast<int64_t>(out.size()) == static_cast<int64_t>(ids.size()) * table.columns,
            "out: [ids, K]");
    for (size_t i = 0; i < ids.size(); ++i)
        require(from[i] >= 0 && from[i] < table.rows, "an id is not a row of the table");
    nb::gil_scoped_release released;
    if (!is_floats) {
        look_up_blocks(table, from, static_cast<int64_t>(ids.size()), to, type == Number::bf16);
        return;
    }
    matmul_kernels.active().look_up(table, from, static_cast<int64_t>(ids.size()), to,
                                    table.columns);
}

}  // namespace

void bind_matmul(nb::module_& module) {
    nb::class_<Matrix>(module, "Matrix")
        .def_ro("rows", &Matrix::rows)
        .def_ro("columns", &Matrix::columns)
        .def_prop_ro("nbytes",
                     [](const Matrix& m) {
                         return m.num_blocks() * (m.block_bytes() + m.factor_count() * 2 +
                                                  (m.scales ? block_rows * 4 : 0));
                     })
        .def("part", part, nb::arg("start"), nb::arg("stop"))
        .def("select", [](const Matrix& weight, const Array& ids) {
            const auto* from = contiguous<const int64_t>(ids, Number::i64, "ids");
            for (size_t i = 0; i < ids.size(); ++i)
                require(from[i] >= 0 && from[i] < weight.rows, "an id is not a row");
            return select_rows(weight, from, static_cast<int64_t>(ids.size()));
        });
    module.def("pack", pack, nb::arg("values"));
    module.def("pack_int8", pack_i8, nb::arg("values"), nb::arg("scales"), nb::arg("one_digit"));
    module.def("pack_int4", pack_i4, nb::arg("values"), nb::arg("scales"),
               nb::arg("zeros").none(), nb::arg("group"));
    module.def("pack_mxfp4", pack_mx, nb::arg("values"), nb::arg("scales"));
    module.def("pack_nvfp4", pack_nv, nb::arg("values"), nb::arg("scales"), nb::arg("factors"));
    module.def("pack_blocks", pack_gguf, nb::arg("parts"), nb::arg("types"));
    module.def("round_to_int8", round_i8, nb::arg("values"), nb::arg("one_digit"));
    module.def("round_to_int4", round_i4, nb::arg("values"), nb::arg("group"),
               nb::arg("has_zeros"));
    module.def("matmul", run_matmul, nb::arg("weight"), nb::arg("x"), nb::arg("bias").none(),
               nb::arg("out"));
    module.def("look_up", run_look_up, nb::arg("table"), nb::arg("ids"), nb::arg("out"));
}

}  // namespace slipstream
