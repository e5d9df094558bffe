// The door of norms and activations.
#include "rows.h"

#include <nanobind/stl/string.h>

#include "bindings.h"
#include "tensor.h"

namespace slipstream {

ByLevel<RowKernels> row_kernels;

Activation activation_named(const std::string& name) {
    if (name == "silu") return Activation::silu;
    require(name == "gelu_tanh", "no such activation");
    return Activation::gelu_tanh;
}

namespace {

Number row_type(const Array& x) {
    const Number type = number_of(x);
    require(x.ndim() == 2 && (type == Number::bf16 || type == Number::f32),
            "rows are [T, columns], bfloat16 or float32");
    return type;
}

template <typename T>
T* alike(const Array& rows, const Array& x, const char* name) {
    require(rows.ndim() == 2 && rows.shape(0) == x.shape(0) && rows.shape(1) == x.shape(1), name);
    return numbers<T>(rows, number_of(x), 1, name);
}

NormCall prepare(const Array& x, const Array& weight, float eps, const Array& out) {
    const Number type = row_type(x);
    require(weight.size() == x.shape(1), "weight: [columns]");
    NormCall call{};
    call.is_bf16 = type == Number::bf16;
    call.num_rows = static_cast<int64_t>(x.shape(0));
    call.columns = static_cast<int64_t>(x.shape(1));
    call.x = numbers<const void>(x, type, 1, "x");
    call.x_stride = x.stride(0);
    call.norm = {contiguous<const void>(weight, type, "weight"), call.columns, eps};
    call.factor = 1.0f;
    call.out = alike<void>(out, x, "out: as x");
    call.out_stride = out.stride(0);
    return call;
}

void run_norm(const Array& x, const Array& weight, float eps, const Array& out) {
    const NormCall call = prepare(x, weight, eps, out);
    nb::gil_scoped_release released;
    norm_rows(call);
}

void run_add_norm(const Array& x, const Array& residual, const Array& weight, float eps,
                  const Array& out, const Array& sum) {
    NormCall call = prepare(x, weight, eps, out);
    call.residual = alike<const void>(residual, x, "residual: as x");
    call.residual_stride = residual.stride(0);
    call.sum = alike<void>(sum, x, "sum: as x");
    call.sum_stride = sum.stride(0);
    nb::gil_scoped_release released;
    norm_rows(call);
}

void run_gated(const Array& gate_up, const std::string& activation, const Array& out) {
    const Number type = row_type(gate_up);
    require(out.ndim() == 2 && out.shape(0) == gate_up.shape(0) &&
                2 * out.shape(1) == gate_up.shape(1),
            "gate_up [T, 2 I], out [T, I]");
    GatedCall call{};
    call.activation = activation_named(activation);
    call.is_bf16 = type == Number::bf16;
    call.num_rows = static_cast<int64_t>(out.shape(0));
    call.columns = static_cast<int64_t>(out.shape(1));
    call.gate_up = numbers<const void>(gate_up, type, 1, "gate_up");
    call.gate_up_stride = gate_up.stride(0);
    call.out = numbers<void>(out, type, 1, "out");
    call.out_stride = out.stride(0);
    nb::gil_scoped_release released;
    gated_rows(call);
}

}  // namespace

void bind_rows(nb::module_& module) {
    module.def("norm", run_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out"));
    module.def("add_norm", run_add_norm, nb::arg("x"), nb::arg("residual"), nb::arg("weight"),
               nb::arg("eps"), nb::arg("out"), nb::arg("sum"));
    module.def("gated", run_gated, nb::arg("gate_up"), nb::arg("activation"), nb::arg("out"));
}

}  // namespace slipstream
