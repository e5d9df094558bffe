// The door of adapters.
#include "low_rank.h"

#include <vector>

#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "low_rank_objects.h"

namespace slipstream {

ByLevel<LowRankKernels> low_rank_kernels;

namespace {

// Keeps the tensors of the factors alive.
class LowRank {
  public:
    LowRank(const Array& down, const Array& up, const std::vector<int64_t>& ends)
        : down_(down), up_(up), ends_(ends) {
        const Number type = number_of(down);
        require(type == Number::bf16 || type == Number::f32, "factors are bfloat16 or float32");
        require(down.ndim() == 3 && up.ndim() == 3 && down.shape(0) == up.shape(0) &&
                    !ends.empty() && down.shape(1) == up.shape(1) * ends.size() &&
                    ends.back() == static_cast<int64_t>(up.shape(2)),
                "factors: down [S, P R, K], up [S, R, N], ends [P]");
        for (size_t part = 1; part < ends.size(); ++part)
            require(ends[part - 1] <= ends[part] && ends[0] >= 0, "ends of parts rise");
        factors_ = {type == Number::bf16,
                    length(up, 3, 0, "up"),
                    static_cast<int64_t>(ends.size()),
                    length(up, 3, 1, "up"),
                    length(up, 3, 2, "up"),
                    length(down, 3, 2, "down"),
                    contiguous<const void>(down, type, "down"),
                    contiguous<const void>(up, type, "up"),
                    ends_.data()};
    }

    const LowRankFactors& factors() const { return factors_; }

  private:
    Array down_, up_;
    std::vector<int64_t> ends_;
    LowRankFactors factors_;
};

void run_add(const LowRank& low_rank, const Array& x, const Array& adapters, const Array& y) {
    const LowRankFactors& factors = low_rank.factors();
    const Number type = factors.is_bf16 ? Number::bf16 : Number::f32;
    LowRankCall call{};
    call.factors = &factors;
    call.num_rows = length(x, 2, 0, "x");
    require(length(x, 2, 1, "x") == factors.columns && length(y, 2, 0, "y") == call.num_rows &&
                length(y, 2, 1, "y") == factors.rows,
            "x [T, K], y [T, N]");
    call.adapters = dense<const int64_t>(adapters, {call.num_rows}, "adapters");
    for (int64_t row = 0; row < call.num_rows; ++row)
        require(call.adapters[row] < factors.slots, "there is no such slot of an adapter");
    call.x = numbers<const void>(x, type, 1, "x");
    call.x_stride = x.stride(0);
    call.y = numbers<void>(y, type, 1, "y");
    call.y_stride = y.stride(0);
    nb::gil_scoped_release released;
    add_low_rank(call);
}

}  // namespace

const LowRankFactors& low_rank_of(nb::handle factors) {
    return nb::cast<const LowRank&>(factors).factors();
}

void bind_low_rank(nb::module_& module) {
    nb::class_<LowRank>(module, "LowRank")
        .def(nb::init<const Array&, const Array&, const std::vector<int64_t>&>(), nb::arg("down"),
             nb::arg("up"), nb::arg("ends"));
    module.def("add_low_rank", run_add, nb::arg("low_rank"), nb::arg("x"), nb::arg("adapters"),
               nb::arg("y"));
}

}  // namespace slipstream
