// The door of attention.
#include "attention.h"
#include "attention_objects.h"

#include "bindings.h"
#include "rows.h"
#include "tensor.h"

namespace slipstream {

ByLevel<AttentionKernels> attention_kernels;

void throw_of_query_start() {
    throw std::invalid_argument("query_start: not in order, or beyond the rows");
}

void attend(const AttentionCall& call) {
    attention_kernels.active().attend(call);
    const AttentionShape& shape = *call.shape;
    if (!shape.gated) return;
    GateCall gate{};
    gate.is_bf16 = call.x_is_bf16;
    gate.num_rows = call.rows->num_rows;
    gate.columns = shape.query_columns();
    gate.gates =
        static_cast<const char*>(call.x) + shape.gate_column() * (call.x_is_bf16 ? 2 : 4);
    gate.gates_stride = call.x_stride;
    gate.out = call.out;
    gate.out_stride = call.out_stride;
    gate_rows(gate);
}

namespace {

using Optional = std::optional<Array>;

}  // namespace

CacheView view_cache(const Array& keys, const Array& values, int num_kv_heads, int head_dim,
                     Number x_type) {
    const Number type = number_of(keys);
    require(type == number_of(values) && keys.ndim() == 4 && values.ndim() == 4,
            "cache: keys and values [blocks, block size, Hk, D] of one dtype");
    require(type == x_type || type == Number::i8, "cache: in the rows' dtype or int8");
    const int64_t stored = head_dim + (type == Number::i8 ? 4 : 0);
    for (int i = 0; i < 4; ++i)
        require(keys.shape(i) == values.shape(i) && keys.stride(i) == values.stride(i),
                "cache: keys and values must be laid out alike");
    require(axis(keys, 2) == num_kv_heads && axis(keys, 3) == stored,
            "cache: heads or their size are others than the layer's");
    CacheView view{};
    view.keys = numbers<void>(keys, type, 1, "keys");
    view.values = numbers<void>(values, type, 1, "values");
    view.type = type == Number::f32    ? CacheType::f32
                : type == Number::bf16 ? CacheType::bf16
                                       : CacheType::i8;
    view.num_blocks = axis(keys, 0);
    view.block_size = axis(keys, 1);
    view.block_stride = keys.stride(0);
    view.token_stride = keys.stride(1);
    view.head_stride = keys.stride(2);
    return view;
}

namespace {

Number float_type(const Array& x) {
    const Number type = number_of(x);
    require(x.ndim() == 2 && (type == Number::bf16 || type == Number::f32),
            "rows are [T, columns], bfloat16 or float32");
    return type;
}

// One layer, kept by Python: checked once, not in every pass.
class AttentionLayer {
  public:
    AttentionLayer(int num_heads, int num_kv_heads, int head_dim, const Optional& query_norm,
                   const Optional& key_norm, float norm_eps, const Array& cos_sin, float scale,
                   int64_t window, const Optional& sinks, bool gated,
                   float softcap)
        : query_norm_(query_norm), key_norm_(key_norm), sinks_(sinks), cos_sin_(cos_sin) {
        require(num_kv_heads > 0 && num_heads % num_kv_heads == 0, "heads: one of KV heads");
        require(head_dim > 0 && head_dim <= 512 && head_dim % 4 == 0,
                "a head has up to 512 numbers, a multiple of 4");
        require(query_norm.has_value() == key_norm.has_value(), "norms: both or none");
        require(cos_sin.ndim() == 2 && axis(cos_sin, 1) > 0 && axis(cos_sin, 1) <= head_dim &&
                    axis(cos_sin, 1) % 2 == 0 && axis(cos_sin, 0) > 0,
                "cos_sin: [positions, R], R even and at most D");
        shape_.num_heads = num_heads;
        shape_.num_kv_heads = num_kv_heads;
        shape_.head_dim = head_dim;
        shape_.scale = scale;
        shape_.softcap = softcap;
        shape_.window = window;
        shape_.norm_eps = norm_eps;
        shape_.gated = gated;
        shape_.num_positions = axis(cos_sin, 0);
        shape_.rotary_dim = static_cast<int>(axis(cos_sin, 1));
        shape_.cos_sin = contiguous<const float>(cos_sin, Number::f32, "cos_sin");
        if (sinks) {
            require(sinks->size() == static_cast<size_t>(num_heads), "sinks: [Hq]");
            shape_.sinks = contiguous<const float>(*sinks, Number::f32, "sinks");
        }
        if (!query_norm) return;
        norm_type_ = number_of(*query_norm);
        require(query_norm->size() == static_cast<size_t>(head_dim) &&
                    key_norm->size() == static_cast<size_t>(head_dim),
                "norms: [D]");
        shape_.query_norm = contiguous<const void>(*query_norm, norm_type_, "query norm");
        shape_.key_norm = contiguous<const void>(*key_norm, norm_type_, "key norm");
    }

    const AttentionShape& shape() const { return shape_; }
    void require_type(Number type) const {
        require(!shape_.query_norm || norm_type_ == type, "norms: in the rows' dtype");
    }

  private:
    Optional query_norm_, key_norm_, sinks_;
    Array cos_sin_;
    Number norm_type_ = Number::other;
    AttentionShape shape_{};
};

const int64_t* long_numbers(const Array& array, int64_t count, const char* name) {
    const auto* values = contiguous<const int64_t>(array, Number::i64, name);
    if (static_cast<int64_t>(array.size()) != count)
        throw std::invalid_argument(std::string(name) + ": of another length");
    return values;
}

// Where the rows of a pass stand, made once for all layers; keeps the tensors alive.
class AttentionPass {
  public:
    AttentionPass(const Array& query_start, const Array& context_lens, const Array& block_tables,
                  const Array& positions, const Array& places, const Array& slots,
                  int64_t first_seen, bool causal,
                  const Optional& tree_starts, const Optional& tree_tokens,
                  const Optional& tree_ancestors)
        : kept_{query_start, context_lens, block_tables, positions, places, slots},
          tree_{tree_starts, tree_tokens, tree_ancestors} {
        rows_.num_rows = static_cast<int64_t>(positions.size());
        rows_.num_requests = static_cast<int64_t>(context_lens.size());
        rows_.query_start = long_numbers(query_start, rows_.num_requests + 1, "query_start");
        rows_.context_lens = long_numbers(context_lens, rows_.num_requests, "context_lens");
        rows_.positions = long_numbers(positions, rows_.num_rows, "positions");
        rows_.places = long_numbers(places, rows_.num_rows, "places");
        rows_.slots = long_numbers(slots, rows_.num_rows, "slots");
        require(block_tables.ndim() == 2 && axis(block_tables, 0) >= rows_.num_requests,
                "block_tables: [R, blocks]");
        rows_.block_tables = numbers<const int32_t>(block_tables, Number::i32, 1, "block_tables");
        rows_.table_stride = block_tables.stride(0);
        rows_.table_width = axis(block_tables, 1);
        rows_.first_seen = first_seen;
        rows_.causal = causal;
        require(tree_starts.has_value() == tree_tokens.has_value() &&
                    tree_starts.has_value() == tree_ancestors.has_value(),
                "trees: starts, tokens and ancestors, or none");
        if (!tree_starts) return;
        rows_.tree_starts = long_numbers(*tree_starts, rows_.num_requests, "tree starts");
        rows_.tree_tokens = long_numbers(*tree_tokens, rows_.num_rows, "tree tokens");
        rows_.tree_ancestors = long_numbers(*tree_ancestors, rows_.num_rows, "tree ancestors");
    }

    // Rows see tokens after their own, up to these [T]; call it before `set_windowed`.
    void set_last_seen(const Array& last_seen) {
        rows_.last_seen = long_numbers(last_seen, rows_.num_rows, "last_seen");
        last_seen_ = last_seen;
    }

    // Layers with a window have other tables [R, blocks] and slots [T].
    void set_windowed(const Array& block_tables, const Array& slots) {
        require(block_tables.ndim() == 2 && axis(block_tables, 0) >= rows_.num_requests,
                "windowed block_tables: [R, blocks]");
        windowed_ = rows_;
        windowed_.slots = long_numbers(slots, rows_.num_rows, "windowed slots");
        windowed_.block_tables =
            numbers<const int32_t>(block_tables, Number::i32, 1, "windowed block_tables");
        windowed_.table_stride = block_tables.stride(0);
        windowed_.table_width = axis(block_tables, 1);
        kept_[6] = block_tables;
        kept_[7] = slots;
        rows_.windowed = &windowed_;
    }

    // How the states of the requests move on, each [R].
    void set_states(const Array& slots, const Array& num_known, const Array& pending,
                    const Array& save_at, const Array& saved) {
        const Array* given[5] = {&slots, &num_known, &pending, &save_at, &saved};
        const int64_t** places[5] = {&states_.slots, &states_.num_known, &states_.pending,
                                     &states_.save_at, &states_.saved};
        for (int i = 0; i < 5; ++i) {
            *places[i] = long_numbers(*given[i], rows_.num_requests, "states");
            kept_[8 + i] = *given[i];
        }
        rows_.states = &states_;
    }

    // The slot of each row's adapter [T], or -1.
    void set_adapters(const Array& adapters) {
        rows_.adapters = long_numbers(adapters, rows_.num_rows, "adapters");
        kept_[13] = adapters;
    }

    const AttentionRows& rows() const { return rows_; }

  private:
    Array kept_[14];
    Optional tree_[3], last_seen_;
    AttentionRows rows_{}, windowed_{};
    StateRows states_{};
};

AttentionCall prepare(const AttentionLayer& layer, const AttentionRows& rows, const CacheView& cache,
                      const Array& x, Number type, int64_t columns) {
    require(axis(x, 0) == rows.num_rows && axis(x, 1) == columns, "rows: of another shape");
    layer.require_type(type);
    AttentionCall call{};
    call.shape = &layer.shape();
    call.rows = &rows;
    call.cache = &cache;
    call.x = numbers<const void>(x, type, 1, "rows");
    call.x_is_bf16 = type == Number::bf16;
    call.x_stride = x.stride(0);
    return call;
}

void run_attend(const AttentionLayer& layer, const AttentionPass& pass, const Array& qkv,
                const Array& keys, const Array& values, const Array& out) {
    const AttentionShape& shape = layer.shape();
    const Number type = float_type(qkv);
    const CacheView cache = view_cache(keys, values, shape.num_kv_heads, shape.head_dim, type);
    AttentionCall call = prepare(layer, pass.rows(), cache, qkv, type, shape.columns());
    require(out.ndim() == 2 && axis(out, 0) == axis(qkv, 0) &&
                axis(out, 1) == shape.query_columns(),
            "out: [T, Hq D]");
    call.out = numbers<void>(out, type, 1, "out");
    call.out_stride = out.stride(0);
    nb::gil_scoped_release released;
    attend(call);
}

void run_store(const AttentionLayer& layer, const Array& kv, const Array& positions,
               const Array& slots, const Array& keys, const Array& values) {
    const AttentionShape& shape = layer.shape();
    const Number type = float_type(kv);
    const CacheView cache = view_cache(keys, values, shape.num_kv_heads, shape.head_dim, type);
    AttentionRows rows{};
    rows.num_rows = axis(kv, 0);
    rows.positions = long_numbers(positions, rows.num_rows, "positions");
    rows.slots = long_numbers(slots, rows.num_rows, "slots");
    const AttentionCall call = prepare(layer, rows, cache, kv, type,
                                       2 * int64_t{shape.num_kv_heads} * shape.head_dim);
    nb::gil_scoped_release released;
    store_kv(call);
}

}  // namespace

const AttentionShape& attention_shape(nb::handle layer, Number rows) {
    const auto& given = nb::cast<const AttentionLayer&>(layer);
    given.require_type(rows);
    return given.shape();
}

const AttentionRows& attention_rows(nb::handle pass) {
    return nb::cast<const AttentionPass&>(pass).rows();
}

void bind_attention(nb::module_& module) {
    nb::class_<AttentionLayer>(module, "AttentionLayer")
        .def(nb::init<int, int, int, const Optional&, const Optional&, float, const Array&, float,
                      int64_t, const Optional&, bool, float>(),
             nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
             nb::arg("query_norm").none(), nb::arg("key_norm").none(), nb::arg("norm_eps"),
             nb::arg("cos_sin"), nb::arg("scale"), nb::arg("window"), nb::arg("sinks").none(),
             nb::arg("gated"), nb::arg("softcap"));
    nb::class_<AttentionPass>(module, "AttentionPass")
        .def(nb::init<const Array&, const Array&, const Array&, const Array&, const Array&,
                      const Array&, int64_t, bool, const Optional&, const Optional&, const Optional&>(),
             nb::arg("query_start"), nb::arg("context_lens"), nb::arg("block_tables"),
             nb::arg("positions"), nb::arg("places"), nb::arg("slots"), nb::arg("first_seen"),
             nb::arg("causal"),
             nb::arg("tree_starts").none(), nb::arg("tree_tokens").none(),
             nb::arg("tree_ancestors").none())
        .def("set_states", &AttentionPass::set_states, nb::arg("slots"), nb::arg("num_known"),
             nb::arg("pending"), nb::arg("save_at"), nb::arg("saved"))
        .def("set_adapters", &AttentionPass::set_adapters, nb::arg("adapters"))
        .def("set_last_seen", &AttentionPass::set_last_seen, nb::arg("last_seen"))
        .def("set_windowed", &AttentionPass::set_windowed, nb::arg("block_tables"),
             nb::arg("slots"));
    module.def("attend", run_attend, nb::arg("layer"), nb::arg("rows"), nb::arg("qkv"),
               nb::arg("keys"), nb::arg("values"), nb::arg("out"));
    module.def("store", run_store, nb::arg("layer"), nb::arg("kv"), nb::arg("positions"),
               nb::arg("slots"), nb::arg("keys"), nb::arg("values"));
}

}  // namespace slipstream
