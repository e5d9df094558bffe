// The door of gated delta nets.
#include "delta_net.h"

#include "attention_objects.h"
#include "bindings.h"
#include "delta_net_objects.h"

namespace slipstream {

ByLevel<DeltaKernels> delta_kernels;

namespace {

void check(const DeltaCall& call) {
    const AttentionRows& rows = *call.rows;
    const DeltaCacheView& cache = *call.cache;
    require(rows.states, "layers with a state are told of it");
    const StateRows& states = *rows.states;
    require(rows.query_start[0] == 0 && rows.query_start[rows.num_requests] <= rows.num_rows,
            "query_start: beyond the rows");
    for (int64_t i = 0; i < rows.num_requests; ++i) {
        const int64_t given = rows.query_start[i + 1] - rows.query_start[i];
        require(given >= 0, "query_start: not in order");
        if (!given) continue;
        const int64_t pending = states.pending[i], known = states.num_known[i];
        require(states.slots[i] >= 0 && states.slots[i] < cache.num_slots, "slots: out of range");
        require(known >= 0 && known <= given, "num_known: more than the rows");
        require(pending >= 0 && pending <= cache.most_drafted, "pending: more than are kept");
        const int64_t start = rows.places[rows.query_start[i]];
        const int64_t save_at = states.save_at[i];
        const bool saves = save_at > start - pending && save_at <= start + known;
        require(!saves || (states.saved[i] >= 0 && states.saved[i] < cache.num_places),
                "saved: out of range");
    }
}

// One layer, kept by Python: checked once, not in every pass.
class DeltaLayer {
  public:
    DeltaLayer(int64_t num_key_heads, int64_t num_value_heads, int64_t key_dim, int64_t value_dim,
               const Array& taps, const Array& decay, const Array& step_bias,
               const Array& norm_weight, float eps)
        : kept_{taps, decay, step_bias, norm_weight} {
        require(num_key_heads > 0 && num_value_heads % num_key_heads == 0 && key_dim > 0 &&
                    value_dim > 0,
                "value heads: a multiple of the key heads");
        shape_.num_key_heads = num_key_heads;
        shape_.num_value_heads = num_value_heads;
        shape_.key_dim = key_dim;
        shape_.value_dim = value_dim;
        shape_.width = length(taps, 2, 0, "taps");
        require(shape_.width > 0 && shape_.width <= most_taps, "taps: 1 to 16 of a channel");
        shape_.taps = dense<const float>(taps, {shape_.width, shape_.num_channels()}, "taps");
        shape_.decay = dense<const float>(decay, {num_value_heads}, "decay");
        shape_.step_bias = dense<const float>(step_bias, {num_value_heads}, "step_bias");
        shape_.norm_weight = dense<const float>(norm_weight, {value_dim}, "norm_weight");
        shape_.eps = eps;
    }

    const DeltaShape& shape() const { return shape_; }

  private:
    Array kept_[4];
    DeltaShape shape_{};
};

// Columns of rows that may be wider.
const void* columns(const Array& rows, const Array& like, int64_t count, const char* name) {
    if (length(rows, 2, 0, name) != length(like, 2, 0, name) || length(rows, 2, 1, name) != count)
        throw_of_shape(rows, {length(like, 2, 0, name), count}, name);
    return numbers<const void>(rows, number_of(like), 1, name);
}

void run(const DeltaLayer& layer, nb::handle pass, const Array& mixed, const Array& gates,
         const Array& z, const DeltaCacheArrays& cache, const Array& out) {
    const DeltaShape& shape = layer.shape();
    const Number type = number_of(mixed);
    require(type == Number::bf16 || type == Number::f32, "rows are bfloat16 or float32");
    const int64_t width = shape.num_value_heads * shape.value_dim;
    const DeltaCacheView view = view_delta_cache(cache, shape, type);
    DeltaCall call{};
    call.shape = &shape;
    call.rows = &attention_rows(pass);
    call.cache = &view;
    call.is_bf16 = type == Number::bf16;
    call.mixed = columns(mixed, mixed, shape.num_channels(), "mixed");
    call.gates = columns(gates, mixed, 2 * shape.num_value_heads, "gates");
    call.z = columns(z, mixed, width, "z");
    call.out = const_cast<void*>(columns(out, mixed, width, "out"));
    call.mixed_stride = mixed.stride(0);
    call.gates_stride = gates.stride(0);
    call.z_stride = z.stride(0);
    call.out_stride = out.stride(0);
    require(length(mixed, 2, 0, "mixed") == call.rows->num_rows, "rows: of another number");
    nb::gil_scoped_release released;
    run_delta_net(call);
}

}  // namespace

void run_delta_net(const DeltaCall& call) {
    check(call);
    delta_kernels.active().run(call);
}

const DeltaShape& delta_shape(nb::handle layer) {
    return nb::cast<const DeltaLayer&>(layer).shape();
}

DeltaCacheView view_delta_cache(const DeltaCacheArrays& cache, const DeltaShape& shape,
                                Number type) {
    const auto& [states, windows, drafted, gates] = cache;
    DeltaCacheView view{};
    view.num_places = length(states, 4, 0, "states");
    view.num_slots = length(drafted, 3, 0, "drafted");
    view.most_drafted = length(drafted, 3, 1, "drafted");
    const auto fits = [&](const Array& array, int64_t places, int64_t rows, int64_t columns) {
        require(array.ndim() == 3 && static_cast<int64_t>(array.shape(0)) == places &&
                    static_cast<int64_t>(array.shape(1)) == rows &&
                    static_cast<int64_t>(array.shape(2)) == columns,
                "windows [places, W - 1, C], drafted [slots, K, C] and their gates "
                "[slots, K, 2 Hv]");
        return numbers<void>(array, type, 2, "windows and draft rows");
    };
    view.states = shaped<float>(
        states, {view.num_places, shape.num_value_heads, shape.key_dim, shape.value_dim}, 3,
        "states");
    view.windows = fits(windows, view.num_places, shape.width - 1, shape.num_channels());
    view.drafted = fits(drafted, view.num_slots, view.most_drafted, shape.num_channels());
    view.drafted_gates = fits(gates, view.num_slots, view.most_drafted, 2 * shape.num_value_heads);
    require(view.num_slots <= view.num_places, "slots are the first places");
    view.state_stride = states.stride(0);
    view.window_stride = windows.stride(0);
    view.drafted_stride = drafted.stride(0);
    view.gates_stride = gates.stride(0);
    return view;
}

void bind_delta_net(nb::module_& module) {
    nb::class_<DeltaLayer>(module, "DeltaLayer")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t, const Array&, const Array&, const Array&,
                      const Array&, float>(),
             nb::arg("num_key_heads"), nb::arg("num_value_heads"), nb::arg("key_dim"),
             nb::arg("value_dim"), nb::arg("taps"), nb::arg("decay"), nb::arg("step_bias"),
             nb::arg("norm_weight"), nb::arg("eps"));
    module.def("delta_net", run, nb::arg("layer"), nb::arg("rows"), nb::arg("mixed"),
               nb::arg("gates"), nb::arg("z"), nb::arg("cache"), nb::arg("out"));
}

}  // namespace slipstream
