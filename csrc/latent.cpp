// The door of latent attention.
#include "latent.h"

#include "attention_objects.h"
#include "bindings.h"
#include "latent_objects.h"
#include "matmul_pack.h"
#include "tensor.h"

namespace slipstream {

ByLevel<LatentKernels> latent_kernels;

namespace {

int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Latent::Latent(const LatentShape& shape, bool is_bf16, float scale, const float* query_scales,
               const char* keys, const char* values)
    : shape_(shape), is_bf16_(is_bf16), keys_(pack(keys, shape.rank, shape.plain_dim)),
      values_(pack(values, shape.value_dim, shape.rank)) {
    attention_.num_heads = shape.num_heads;
    attention_.num_kv_heads = 1;
    attention_.head_dim = shape.stored_dim();
    attention_.scale = scale;
    attention_.query_scales = query_scales;
    attention_.num_positions = shape.num_positions;
    attention_.cos_sin = shape.cos_sin;
}

Latent::Matrices Latent::pack(const char* values, int64_t rows, int64_t columns) const {
    Matrices packed;
    for (int head = 0; head < shape_.num_heads; ++head)
        packed.push_back(pack_floats(is_bf16_ ? Storage::bf16 : Storage::f32,
                                     values + head * rows * columns * number_bytes(), rows,
                                     columns));
    return packed;
}

void Latent::multiply(const Matrices& matrices, const char* x, int64_t x_stride, int64_t x_columns,
                      int64_t num_rows, char* out, int64_t out_stride, int64_t out_columns) const {
    std::vector<MatmulCall> calls;
    for (int64_t head = 0; head < shape_.num_heads; ++head) {
        MatmulCall call{};
        call.weight = matrices[head].get();
        call.x = x + head * x_columns * number_bytes();
        call.x_is_bf16 = call.out_is_bf16 = is_bf16_;
        call.num_rows = num_rows;
        call.x_stride = x_stride;
        call.out = out + head * out_columns * number_bytes();
        call.out_stride = out_stride;
        calls.push_back(call);
    }
    matmul(calls.data(), static_cast<int64_t>(calls.size()));
}

void Latent::run(LatentCall call, void* out, int64_t out_stride) const {
    const int64_t num_rows = call.rows->num_rows, stored = shape_.stored_dim();
    if (!num_rows) return;
    const int64_t width = shape_.num_heads * stored, bytes = num_rows * width * number_bytes();
    char* absorbed = static_cast<char*>(scratch(Scratch::latent, 2 * padded(bytes)));
    char* mixed = absorbed + padded(bytes);
    call.shape = &shape_;
    call.absorbed = absorbed;
    latent_kernels.active().prepare(call);
    multiply(keys_, static_cast<const char*>(call.queries), call.query_stride, shape_.query_dim(),
             num_rows, absorbed, width, stored);
    AttentionCall attention{};
    attention.shape = &attention_;
    attention.rows = call.rows;
    attention.cache = call.cache;
    attention.x = absorbed;
    attention.x_is_bf16 = is_bf16_;
    attention.x_stride = attention.out_stride = width;
    attention.is_stored = true;
    attention.out = mixed;
    attend(attention);
    multiply(values_, mixed, width, stored, num_rows, static_cast<char*>(out), out_stride,
             shape_.value_dim);
}

namespace {

using Optional = std::optional<Array>;

// One layer, kept by Python with the tensors that it reads.
class LatentLayer {
  public:
    LatentLayer(const Array& norm, float norm_eps, const Array& keys, const Array& values,
                const Array& cos_sin, float scale, const Optional& query_scales)
        : kept_{norm, cos_sin}, query_scales_(query_scales) {
        const Number type = number_of(norm);
        require(type == Number::f32 || type == Number::bf16, "norm: float32 or bfloat16");
        require(keys.ndim() == 3 && values.ndim() == 3 && cos_sin.ndim() == 2 &&
                    axis(keys, 0) == axis(values, 0) && axis(keys, 1) == axis(values, 2) &&
                    axis(keys, 1) == static_cast<int64_t>(norm.size()),
                "keys [H, R, N], values [H, V, R], norm [R]");
        LatentShape shape{};
        shape.num_heads = static_cast<int>(axis(keys, 0));
        shape.rank = static_cast<int>(axis(keys, 1));
        shape.plain_dim = static_cast<int>(axis(keys, 2));
        shape.value_dim = static_cast<int>(axis(values, 1));
        shape.rotary_dim = static_cast<int>(axis(cos_sin, 1));
        shape.num_positions = axis(cos_sin, 0);
        require(shape.rotary_dim % 2 == 0 && shape.rotary_dim > 0 && shape.num_positions > 0 &&
                    shape.stored_dim() <= most_latent_dim,
                "a latent row has up to 576 numbers, of which an even number is rotated");
        shape.norm = contiguous<const void>(norm, type, "norm");
        shape.norm_eps = norm_eps;
        shape.cos_sin = contiguous<const float>(cos_sin, Number::f32, "cos_sin");
        const float* scales = nullptr;
        if (query_scales) {
            require(static_cast<int64_t>(query_scales->size()) == shape.num_positions,
                    "query_scales: [positions]");
            scales = contiguous<const float>(*query_scales, Number::f32, "query_scales");
        }
        const auto* of_keys = contiguous<const char>(keys, type, "keys");
        const auto* of_values = contiguous<const char>(values, type, "values");
        nb::gil_scoped_release released;
        layer_ = std::make_unique<Latent>(shape, type == Number::bf16, scale, scales, of_keys,
                                          of_values);
    }

    const Latent& layer() const { return *layer_; }

  private:
    Array kept_[2];
    Optional query_scales_;
    std::unique_ptr<Latent> layer_;
};

void run_latent(const LatentLayer& kept, nb::handle pass, const Array& queries,
                const Array& latents, const Array& cache, const Array& out) {
    const Latent& layer = kept.layer();
    const LatentShape& shape = layer.shape();
    const AttentionRows& rows = attention_rows(pass);
    const Number type = layer.is_bf16() ? Number::bf16 : Number::f32;
    const CacheView view = view_cache(cache, cache, 1, shape.stored_dim(), type);
    require(view.type != CacheType::i8, "cache: in the rows' dtype");
    const auto rows_of = [&](const Array& array, int64_t columns, const char* what) {
        require(array.ndim() == 2 && axis(array, 0) == rows.num_rows && axis(array, 1) == columns,
                what);
        return numbers<void>(array, type, 1, what);
    };
    LatentCall call{};
    call.rows = &rows;
    call.cache = &view;
    call.is_bf16 = layer.is_bf16();
    call.queries = rows_of(queries, shape.num_heads * shape.query_dim(), "queries: [T, H (N + P)]");
    call.latents = rows_of(latents, shape.stored_dim(), "latents: [T, R + P]");
    call.query_stride = queries.stride(0);
    call.latent_stride = latents.stride(0);
    void* to = rows_of(out, shape.num_heads * shape.value_dim, "out: [T, H V]");
    nb::gil_scoped_release released;
    layer.run(call, to, out.stride(0));
}

}  // namespace

const Latent& latent_of(nb::handle layer) { return nb::cast<const LatentLayer&>(layer).layer(); }

void bind_latent(nb::module_& module) {
    nb::class_<LatentLayer>(module, "LatentLayer")
        .def(nb::init<const Array&, float, const Array&, const Array&, const Array&, float,
                      const Optional&>(),
             nb::arg("norm"), nb::arg("norm_eps"), nb::arg("keys"), nb::arg("values"),
             nb::arg("cos_sin"), nb::arg("scale"), nb::arg("query_scales").none());
    module.def("latent_attend", run_latent, nb::arg("layer"), nb::arg("rows"), nb::arg("queries"),
               nb::arg("latents"), nb::arg("cache"), nb::arg("out"));
}

}  // namespace slipstream
