// Stacks of decoder layers in one call: what stands between their products is too short for Python.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "attention_objects.h"
#include "bindings.h"
#include "matmul.h"
#include "rows.h"
#include "tensor.h"

namespace slipstream {
namespace {

using Optional = std::optional<Array>;
using NormArray = std::optional<std::pair<Array, float>>;

// A product's weight and bias.
struct Product {
    const Matrix* weight;
    const void* bias;
};

// Without a weight there is no norm.
struct NormWeight {
    const void* weight;
    int64_t columns;
    float eps;
};

// Attention and gated feed-forward. Pointers lead to objects that Python keeps alive with the
// layer. A first layer may have no norm, or a second input: `beside` is the norm of that one.
struct Layer {
    NormWeight before_attention, beside, before_mlp;
    bool keeps_normed;
    AttentionShape shape;
    Product qkv, output, gate_up, down;
};

// Makes the stream of several sources side by side.
struct Entry {
    std::vector<NormWeight> norms;
    Product product;
};

// Rows that somebody hands in.
struct Source {
    const char* rows;
    int64_t columns, stride;
};

// Buffers of one pass over T rows, in one piece of scratch.
class Rooms {
  public:
    Rooms(const std::vector<Layer>& layers, const Entry* entry, int64_t rows,
          int64_t number_bytes) {
        const int64_t width = layers[0].output.weight->rows;
        int64_t widths[7] = {entry ? entry->product.weight->columns : 0, 0, 0, 0, 0, width, width};
        for (const Layer& layer : layers) {
            const int64_t sizes[5] = {layer.qkv.weight->columns, layer.qkv.weight->rows,
                                      layer.output.weight->columns, layer.gate_up.weight->rows,
                                      layer.down.weight->columns};
            for (int i = 0; i < 5; ++i) widths[i] = std::max(widths[i], sizes[i]);
        }
        int64_t offsets[7], total = 0;
        for (int i = 0; i < 7; ++i) {
            offsets[i] = total;
            total += (rows * widths[i] * number_bytes + 63) / 64 * 64;
        }
        char* memory = static_cast<char*>(scratch(Scratch::layer, total));
        char** rooms[7] = {&normed, &qkv, &mixed, &gate_up, &active, &addend, &stream};
        for (int i = 0; i < 7; ++i) *rooms[i] = memory + offsets[i];
    }

    char *normed, *qkv, *mixed, *gate_up, *active, *addend, *stream;
};

class Stack {
  public:
    explicit Stack(bool is_bf16) : type_(is_bf16 ? Number::bf16 : Number::f32) {}

    void set_entry(const std::vector<NormArray>& norms, nb::object weight, const Optional& bias) {
        entry_.norms.clear();
        for (const NormArray& norm : norms) entry_.norms.push_back(keep(norm));
        entry_.product = keep(weight, bias);
        has_entry_ = true;
    }

    void set_last(const NormArray& norm) { last_ = keep(norm); }

    void add(const NormArray& before_attention, const NormArray& beside, bool keeps_normed,
             nb::object attention, const NormArray& before_mlp,
             const std::vector<nb::object>& weights, const std::vector<Optional>& biases) {
        require(weights.size() == 4 && biases.size() == 4, "qkv, output, gate_up and down");
        Product products[4];
        for (int i = 0; i < 4; ++i) products[i] = keep(weights[i], biases[i]);
        const Layer layer{keep(before_attention),
                          keep(beside),
                          keep(before_mlp),
                          keeps_normed,
                          attention_shape(attention, type_),
                          products[0],
                          products[1],
                          products[2],
                          products[3]};
        check(layer);
        kept_.push_back(attention);
        layers_.push_back(layer);
    }

    // Keys and values of each layer: kept until others come.
    void set_caches(const std::vector<std::pair<Array, Array>>& caches) {
        require(caches.size() == layers_.size(), "a cache for each layer");
        std::vector<CacheView> views;
        for (size_t i = 0; i < caches.size(); ++i)
            views.push_back(view_cache(caches[i].first, caches[i].second,
                                       layers_[i].shape.num_kv_heads, layers_[i].shape.head_dim,
                                       type_));
        caches_ = std::move(views);
        cache_arrays_ = caches;
    }

    // `out` [T, H] gets what leaves, taken[i] [T, H] the stream that enters layer wanted[i], or
    // leaves the last one.
    void run(nb::object pass, const std::vector<Array>& given, const Array& out,
             const std::vector<int>& wanted, const std::vector<Array>& taken) const {
        const AttentionRows& rows = attention_rows(pass);
        require(!layers_.empty() && caches_.size() == layers_.size(), "layers without caches");
        require(wanted.size() == taken.size(), "a tensor for each wanted stream");
        for (const int index : wanted)
            require(index >= 0 && index <= static_cast<int>(layers_.size()),
                    "a wanted stream enters no layer and leaves none");
        const std::vector<Source> sources = look_at(given, rows.num_rows);
        char* hidden = rows_of(out, rows.num_rows);
        std::vector<char*> streams;
        for (const Array& array : taken) streams.push_back(rows_of(array, rows.num_rows));
        nb::gil_scoped_release released;
        const int64_t bytes = rows.num_rows * width() * number_bytes();
        const Rooms rooms(layers_, has_entry_ ? &entry_ : nullptr, rows.num_rows, number_bytes());
        const auto take = [&](size_t index) {
            for (size_t i = 0; i < wanted.size(); ++i)
                if (wanted[i] == static_cast<int>(index))
                    std::memcpy(streams[i], rooms.stream, bytes);
        };
        enter(sources, rows.num_rows, rooms);
        for (size_t index = 0; index < layers_.size(); ++index) {
            const Layer& layer = layers_[index];
            if (index == 0) first_norm(layer, sources, rows.num_rows, rooms);
            else norm(layer.before_attention, rows.num_rows, rooms, rooms.normed);
            attention(layer, caches_[index], rows, rooms);
            take(index);
            feed_forward(layer, rows.num_rows, rooms);
        }
        // Without a last norm only the sum is wanted.
        norm(last_.weight ? last_ : layers_.back().before_mlp, rows.num_rows, rooms, hidden);
        take(layers_.size());
        if (!last_.weight) std::memcpy(hidden, rooms.stream, bytes);
    }

  private:
    int64_t number_bytes() const { return type_ == Number::bf16 ? 2 : 4; }
    int64_t width() const { return layers_[0].output.weight->rows; }

    NormWeight keep(const NormArray& norm) {
        if (!norm) return {};
        arrays_.push_back(norm->first);
        const void* weight = contiguous<const void>(norm->first, type_, "norm");
        return {weight, static_cast<int64_t>(norm->first.size()), norm->second};
    }

    Product keep(const nb::object& weight, const Optional& bias) {
        kept_.push_back(weight);
        const Product product{&nb::cast<const Matrix&>(weight),
                              bias ? contiguous<const void>(*bias, type_, "bias") : nullptr};
        require(product.weight->takes(type_ == Number::bf16), "weights are in the norms' type");
        if (!bias) return product;
        arrays_.push_back(*bias);
        require(static_cast<int64_t>(bias->size()) == product.weight->rows, "bias: [N]");
        return product;
    }

    void check(const Layer& layer) const {
        const AttentionShape& shape = layer.shape;
        const int64_t width = layer.output.weight->rows, head_dim = shape.head_dim;
        const NormWeight& before = layer.before_attention;
        require(layer.before_mlp.columns == width && (!before.weight || before.columns == width) &&
                    layer.qkv.weight->columns == width + layer.beside.columns &&
                    layer.qkv.weight->rows ==
                        (shape.num_heads + 2 * int64_t{shape.num_kv_heads}) * head_dim &&
                    layer.output.weight->columns == shape.num_heads * head_dim &&
                    layer.gate_up.weight->columns == width &&
                    layer.gate_up.weight->rows == 2 * layer.down.weight->columns &&
                    layer.down.weight->rows == width,
                "the matrices of a layer do not fit each other");
        require(layers_.empty() || (before.weight && !layer.beside.weight && !layer.keeps_normed &&
                                    width == this->width()),
                "only the first layer is of its own kind");
    }

    std::vector<Source> look_at(const std::vector<Array>& given, int64_t num_rows) const {
        std::vector<Source> sources;
        int64_t columns = 0;
        for (const Array& array : given) {
            require(array.ndim() == 2 && static_cast<int64_t>(array.shape(0)) == num_rows,
                    "sources: [T, columns]");
            const auto* rows = numbers<const char>(array, type_, 1, "sources");
            sources.push_back({rows, static_cast<int64_t>(array.shape(1)), array.stride(0)});
            columns += sources.back().columns;
        }
        if (has_entry_) {
            bool fits = given.size() == entry_.norms.size();
            for (size_t i = 0; fits && i < given.size(); ++i)
                fits = !entry_.norms[i].weight || entry_.norms[i].columns == sources[i].columns;
            require(fits && columns == entry_.product.weight->columns &&
                        entry_.product.weight->rows == width() && !layers_[0].beside.weight,
                    "the sources do not fit the entry");
        } else {
            const NormWeight& beside = layers_[0].beside;
            require(given.size() == (beside.weight ? 2 : 1) &&
                        sources.back().columns == width() &&
                        columns == width() + beside.columns,
                    "the sources do not fit the first layer");
        }
        return sources;
    }

    char* rows_of(const Array& array, int64_t num_rows) const {
        require(array.ndim() == 2 && static_cast<int64_t>(array.shape(0)) == num_rows &&
                    static_cast<int64_t>(array.shape(1)) == width(),
                "hidden states and streams: [T, H]");
        return contiguous<char>(array, type_, "hidden states and streams");
    }

    // A source, normed or as it is, to columns of rows that are `stride` long.
    void put(const NormWeight& norm, const Source& source, int64_t num_rows, char* out,
             int64_t stride) const {
        if (norm.weight) {
            NormCall call{};
            call.is_bf16 = type_ == Number::bf16;
            call.num_rows = num_rows;
            call.columns = source.columns;
            call.x = source.rows;
            call.x_stride = source.stride;
            call.weight = norm.weight;
            call.eps = norm.eps;
            call.out = out;
            call.out_stride = stride;
            norm_rows(call);
            return;
        }
        for (int64_t row = 0; row < num_rows; ++row)
            std::memcpy(out + row * stride * number_bytes(),
                        source.rows + row * source.stride * number_bytes(),
                        source.columns * number_bytes());
    }

    // The stream that enters the first layer.
    void enter(const std::vector<Source>& sources, int64_t num_rows, const Rooms& rooms) const {
        if (!has_entry_) return put({}, sources.back(), num_rows, rooms.stream, width());
        int64_t place = 0;
        for (size_t i = 0; i < sources.size(); ++i) {
            put(entry_.norms[i], sources[i], num_rows, rooms.normed + place * number_bytes(),
                entry_.product.weight->columns);
            place += sources[i].columns;
        }
        multiply(entry_.product, rooms.normed, num_rows, rooms.stream);
    }

    // What the first layer's queries, keys and values are made of.
    void first_norm(const Layer& layer, const std::vector<Source>& sources, int64_t num_rows,
                    const Rooms& rooms) const {
        const int64_t columns = layer.qkv.weight->columns, bytes = number_bytes();
        const Source stream{rooms.stream, width(), width()};
        if (layer.beside.weight) put(layer.beside, sources[0], num_rows, rooms.normed, columns);
        char* normed = rooms.normed + layer.beside.columns * bytes;
        put(layer.before_attention, stream, num_rows, normed, columns);
        if (layer.keeps_normed) put({}, {normed, width(), columns}, num_rows, rooms.stream, width());
    }

    void multiply(const Product& product, const void* x, int64_t rows, void* out) const {
        MatmulCall call{};
        call.weight = product.weight;
        call.bias = product.bias;
        call.x = x;
        call.x_is_bf16 = call.out_is_bf16 = type_ == Number::bf16;
        call.num_rows = rows;
        call.x_stride = product.weight->columns;
        call.out = out;
        call.out_stride = product.weight->rows;
        matmul(call);
    }

    // stream += addend, and its norm to `out`.
    void norm(const NormWeight& weight, int64_t num_rows, const Rooms& rooms, char* out) const {
        NormCall call{};
        call.is_bf16 = type_ == Number::bf16;
        call.num_rows = num_rows;
        call.columns = width();
        call.x = rooms.addend;
        call.residual = call.sum = rooms.stream;
        call.x_stride = call.residual_stride = call.out_stride = call.sum_stride = width();
        call.weight = weight.weight;
        call.eps = weight.eps;
        call.out = out;
        norm_rows(call);
    }

    void attention(const Layer& layer, const CacheView& cache, const AttentionRows& rows,
                   const Rooms& rooms) const {
        multiply(layer.qkv, rooms.normed, rows.num_rows, rooms.qkv);
        AttentionCall call{};
        call.shape = &layer.shape;
        call.rows = &rows;
        call.cache = &cache;
        call.x = rooms.qkv;
        call.x_is_bf16 = type_ == Number::bf16;
        call.x_stride = layer.qkv.weight->rows;
        call.out = rooms.mixed;
        call.out_stride = layer.output.weight->columns;
        attend(call);
        multiply(layer.output, rooms.mixed, rows.num_rows, rooms.addend);
    }

    void feed_forward(const Layer& layer, int64_t num_rows, const Rooms& rooms) const {
        norm(layer.before_mlp, num_rows, rooms, rooms.normed);
        multiply(layer.gate_up, rooms.normed, num_rows, rooms.gate_up);
        GatedCall gated{};
        gated.is_bf16 = type_ == Number::bf16;
        gated.num_rows = num_rows;
        gated.columns = gated.out_stride = layer.down.weight->columns;
        gated.gate_up = rooms.gate_up;
        gated.gate_up_stride = layer.gate_up.weight->rows;
        gated.out = rooms.active;
        gated_rows(gated);
        multiply(layer.down, rooms.active, num_rows, rooms.addend);
    }

    Number type_;
    Entry entry_;
    bool has_entry_ = false;
    std::vector<Layer> layers_;
    NormWeight last_{};
    std::vector<CacheView> caches_;
    std::vector<nb::object> kept_;
    std::vector<Array> arrays_;
    std::vector<std::pair<Array, Array>> cache_arrays_;
};

}  // namespace

void bind_layers(nb::module_& module) {
    nb::class_<Stack>(module, "Stack")
        .def(nb::init<bool>(), nb::arg("is_bf16"))
        .def("set_entry", &Stack::set_entry, nb::arg("norms"), nb::arg("weight"),
             nb::arg("bias").none())
        .def("add", &Stack::add, nb::arg("before_attention").none(), nb::arg("beside").none(),
             nb::arg("keeps_normed"), nb::arg("attention"), nb::arg("before_mlp"),
             nb::arg("weights"), nb::arg("biases"))
        .def("set_last", &Stack::set_last, nb::arg("norm"))
        .def("set_caches", &Stack::set_caches, nb::arg("caches"))
        .def("run", &Stack::run, nb::arg("rows"), nb::arg("sources"), nb::arg("out"),
             nb::arg("wanted"), nb::arg("taken"));
}

}  // namespace slipstream
