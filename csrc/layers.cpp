// Decoder layers in one call: what stands between their products is too short for Python.
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

// A product's weight and bias.
struct Product {
    const Matrix* weight;
    const void* bias;
};

struct NormWeight {
    const void* weight;
    float eps;
};

// Pre-norm attention and gated feed-forward. Pointers lead to objects that Python keeps alive with
// the layer.
struct Layer {
    NormWeight before_attention, before_mlp;
    AttentionShape shape;
    Product qkv, output, gate_up, down;
};

// Buffers of one pass over T rows, in one piece of scratch.
class Rooms {
  public:
    Rooms(const std::vector<Layer>& layers, int64_t rows, int64_t number_bytes) {
        int64_t widths[5] = {};
        for (const Layer& layer : layers) {
            const int64_t sizes[5] = {layer.qkv.weight->columns, layer.qkv.weight->rows,
                                      layer.output.weight->columns, layer.gate_up.weight->rows,
                                      layer.down.weight->columns};
            for (int i = 0; i < 5; ++i) widths[i] = std::max(widths[i], sizes[i]);
        }
        int64_t offsets[5], total = 0;
        for (int i = 0; i < 5; ++i) {
            offsets[i] = total;
            total += (rows * widths[i] * number_bytes + 63) / 64 * 64;
        }
        char* memory = static_cast<char*>(scratch(Scratch::layer, total));
        void** rooms[5] = {&normed, &qkv, &mixed, &gate_up, &active};
        for (int i = 0; i < 5; ++i) *rooms[i] = memory + offsets[i];
    }

    void *normed, *qkv, *mixed, *gate_up, *active;
};

class Layers {
  public:
    explicit Layers(bool is_bf16) : type_(is_bf16 ? Number::bf16 : Number::f32) {}

    void add(const Array& before_attention, float attention_eps, nb::object attention,
             const Array& before_mlp, float mlp_eps, const std::vector<nb::object>& weights,
             const std::vector<Optional>& biases) {
        require(weights.size() == 4 && biases.size() == 4, "qkv, output, gate_up and down");
        Product products[4];
        for (int i = 0; i < 4; ++i) {
            products[i].weight = &nb::cast<const Matrix&>(weights[i]);
            products[i].bias = nullptr;
            if (!biases[i]) continue;
            products[i].bias = contiguous<const void>(*biases[i], type_, "bias");
            require(static_cast<int64_t>(biases[i]->size()) == products[i].weight->rows,
                    "bias: [N]");
        }
        Layer layer{{contiguous<const void>(before_attention, type_, "norm"), attention_eps},
                    {contiguous<const void>(before_mlp, type_, "norm"), mlp_eps},
                    attention_shape(attention),
                    products[0],
                    products[1],
                    products[2],
                    products[3]};
        check(layer, before_attention.size(), before_mlp.size());
        layers_.push_back(layer);
        kept_.push_back(attention);
        for (const auto& weight : weights) kept_.push_back(weight);
        arrays_.push_back(before_attention);
        arrays_.push_back(before_mlp);
        for (const auto& bias : biases)
            if (bias) arrays_.push_back(*bias);
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

    // x [T, H] becomes the addend of the last layer, and `stream` [T, H] the stream before it.
    // taken[i] [T, H] gets the stream that enters layer wanted[i].
    void run(nb::object pass, const Array& x, const Array& stream, const std::vector<int>& wanted,
             const std::vector<Array>& taken) const {
        const AttentionRows& rows = attention_rows(pass);
        require(!layers_.empty() && caches_.size() == layers_.size(), "layers without caches");
        const int64_t width = layers_[0].qkv.weight->columns;
        for (const Array* array : {&x, &stream})
            require(array->ndim() == 2 && static_cast<int64_t>(array->shape(0)) == rows.num_rows &&
                        static_cast<int64_t>(array->shape(1)) == width,
                    "x and stream: [T, H]");
        require(wanted.size() == taken.size(), "a tensor for each wanted stream");
        char* addend = contiguous<char>(x, type_, "x");
        char* residual = contiguous<char>(stream, type_, "stream");
        std::vector<char*> streams;
        for (const Array& array : taken) {
            require(array.size() == x.size(), "streams: [T, H]");
            streams.push_back(contiguous<char>(array, type_, "streams"));
        }
        nb::gil_scoped_release released;
        const int64_t bytes = rows.num_rows * width * number_bytes();
        const Rooms rooms(layers_, rows.num_rows, number_bytes());
        for (size_t index = 0; index < layers_.size(); ++index) {
            attention(layers_[index], caches_[index], rows, rooms, addend, residual, index == 0);
            for (size_t i = 0; i < wanted.size(); ++i)
                if (wanted[i] == static_cast<int>(index)) std::memcpy(streams[i], residual, bytes);
            feed_forward(layers_[index], rows.num_rows, rooms, addend, residual);
        }
    }

  private:
    int64_t number_bytes() const { return type_ == Number::bf16 ? 2 : 4; }

    static void check(const Layer& layer, size_t first_norm, size_t second_norm) {
        const AttentionShape& shape = layer.shape;
        const int64_t width = layer.qkv.weight->columns, head_dim = shape.head_dim;
        require(static_cast<int64_t>(first_norm) == width &&
                    static_cast<int64_t>(second_norm) == width &&
                    layer.qkv.weight->rows ==
                        (shape.num_heads + 2 * int64_t{shape.num_kv_heads}) * head_dim &&
                    layer.output.weight->columns == shape.num_heads * head_dim &&
                    layer.output.weight->rows == width && layer.gate_up.weight->columns == width &&
                    layer.gate_up.weight->rows == 2 * layer.down.weight->columns &&
                    layer.down.weight->rows == width,
                "the matrices of a layer do not fit each other");
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

    // residual += addend (or, in the first layer, = addend), and its norm to `out`.
    void norm(const NormWeight& weight, int64_t rows, int64_t width, char* addend, char* residual,
              bool is_first, void* out) const {
        if (is_first) std::memcpy(residual, addend, rows * width * number_bytes());
        NormCall call{};
        call.is_bf16 = type_ == Number::bf16;
        call.num_rows = rows;
        call.columns = width;
        call.x = is_first ? residual : addend;
        call.residual = is_first ? nullptr : residual;
        call.sum = is_first ? nullptr : residual;
        call.x_stride = call.residual_stride = call.out_stride = call.sum_stride = width;
        call.weight = weight.weight;
        call.eps = weight.eps;
        call.out = out;
        norm_rows(call);
    }

    void attention(const Layer& layer, const CacheView& cache, const AttentionRows& rows,
                   const Rooms& rooms, char* addend, char* residual, bool is_first) const {
        norm(layer.before_attention, rows.num_rows, layer.qkv.weight->columns, addend, residual,
             is_first, rooms.normed);
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
        multiply(layer.output, rooms.mixed, rows.num_rows, addend);
    }

    void feed_forward(const Layer& layer, int64_t rows, const Rooms& rooms, char* addend,
                      char* residual) const {
        norm(layer.before_mlp, rows, layer.gate_up.weight->columns, addend, residual, false,
             rooms.normed);
        multiply(layer.gate_up, rooms.normed, rows, rooms.gate_up);
        GatedCall gated{};
        gated.is_bf16 = type_ == Number::bf16;
        gated.num_rows = rows;
        gated.columns = gated.out_stride = layer.down.weight->columns;
        gated.gate_up = rooms.gate_up;
        gated.gate_up_stride = layer.gate_up.weight->rows;
        gated.out = rooms.active;
        gated_rows(gated);
        multiply(layer.down, rooms.active, rows, addend);
    }

    Number type_;
    std::vector<Layer> layers_;
    std::vector<CacheView> caches_;
    std::vector<nb::object> kept_;
    std::vector<Array> arrays_;
    std::vector<std::pair<Array, Array>> cache_arrays_;
};

}  // namespace

void bind_layers(nb::module_& module) {
    nb::class_<Layers>(module, "Layers")
        .def(nb::init<bool>(), nb::arg("is_bf16"))
        .def("add", &Layers::add, nb::arg("before_attention"), nb::arg("attention_eps"),
             nb::arg("attention"), nb::arg("before_mlp"), nb::arg("mlp_eps"), nb::arg("weights"),
             nb::arg("biases"))
        .def("set_caches", &Layers::set_caches, nb::arg("caches"))
        .def("run", &Layers::run, nb::arg("rows"), nb::arg("x"), nb::arg("stream"),
             nb::arg("wanted"), nb::arg("taken"));
}

}  // namespace slipstream
