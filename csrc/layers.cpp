// Decoder layers in one call: what stands between their products is too short for Python.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "bindings.h"
#include "labels.h"
#include "low_rank_objects.h"
#include "stack_halves.h"
#include "tensor.h"

namespace slipstream {
namespace {

using Optional = std::optional<Array>;
using NormArray = std::optional<std::pair<Array, float>>;

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

// Layers in a row, each of any halves, in the order in which they are added.
class Stack {
  public:
    explicit Stack(bool is_bf16) : type_(is_bf16 ? Number::bf16 : Number::f32) {}

    void set_entry(const std::vector<NormArray>& norms, nb::object weight, const Optional& bias) {
        entry_ = std::make_unique<Entry>();
        for (const NormArray& norm : norms) entry_->norms.push_back(keep(norm));
        entry_->product = keep({weight, bias});
    }

    void set_last(const NormArray& norm) { last_ = keep(norm); }

    // What is added from now on belongs to another layer.
    void add_layer() { layer_starts_.push_back(halves_.size()); }

    void add_attention(const NormArray& norm, const NormArray& beside, bool keeps_normed,
                       nb::object attention, const ProductObjects& qkv,
                       const ProductObjects& output, bool norms_values, bool reads_only) {
        kept_.push_back(attention);
        AttentionShape shape = attention_shape(attention, type_);
        require(!(norms_values || reads_only) || (shape.query_norm && !shape.gated),
                "only attention with norms and without gates norms values or reads alone");
        shape.norms_values = norms_values;
        shape.reads_only = reads_only;
        add(std::make_unique<AttentionHalf>(keep(norm), keep(beside), keeps_normed, shape,
                                            keep(qkv), keep(output)));
    }

    void add_delta_net(const NormArray& norm, nb::object layer, const ProductObjects& inputs,
                       const std::optional<ProductObjects>& gates, const ProductObjects& output) {
        kept_.push_back(layer);
        add(std::make_unique<DeltaNetHalf>(keep(norm), delta_shape(layer), keep(inputs),
                                           gates ? keep(*gates) : Product{}, keep(output)));
    }

    void add_latent(const NormArray& norm, nb::object latent, const ProductObjects& first,
                    const NormArray& query_norm, const std::optional<ProductObjects>& queries,
                    const ProductObjects& output) {
        kept_.push_back(latent);
        const Latent& given = latent_of(latent);
        require(given.is_bf16() == (type_ == Number::bf16), "latent rows are in the norms' type");
        add(std::make_unique<LatentHalf>(keep(norm), given, keep(first), keep(query_norm),
                                         queries ? keep(*queries) : Product{}, keep(output)));
    }

    void add_gated_mlp(const NormArray& norm, const ProductObjects& gate_up,
                       const ProductObjects& down, const std::string& activation) {
        add(std::make_unique<GatedMlpHalf>(keep(norm), keep(gate_up), keep(down),
                                           activation_named(activation)));
    }

    // How the half that was added last joins the stream.
    void set_behind(const NormArray& norm, std::optional<float> factor) {
        require(!halves_.empty(), "a norm stands behind a half");
        Half& half = *halves_.back();
        half.behind = keep(norm);
        require(!half.behind.weight || half.behind.columns == width(), "norms: [H]");
        half.factor = factor.value_or(1.0f);
    }

    // Adapters of the first and the last product of the half that was added last.
    void set_adapters(nb::object first, nb::object last) {
        require(!halves_.empty(), "adapters belong to a half");
        kept_.push_back(first);
        kept_.push_back(last);
        halves_.back()->take_adapters(adapters_of(first), adapters_of(last));
    }

    void add_experts(const NormArray& norm, nb::object experts) {
        kept_.push_back(experts);
        const auto& given = nb::cast<const Experts&>(experts);
        require(given.is_bf16() == (type_ == Number::bf16), "experts are in the norms' type");
        add(std::make_unique<ExpertsHalf>(keep(norm), given));
    }

    // Keys and values of each layer with attention, the states of each with such: kept until
    // others come.
    void set_caches(const std::vector<nb::object>& caches) {
        require(caches.size() == num_caches_, "a cache for each layer with a mixer");
        std::vector<CacheView> views;
        size_t next = 0;
        for (const auto& half : halves_) {
            if (const AttentionShape* shape = half->cached()) {
                const auto [keys, values] = nb::cast<std::pair<Array, Array>>(caches[next++]);
                views.push_back(
                    view_cache(keys, values, shape->num_kv_heads, shape->head_dim, type_));
            } else if (const DeltaShape* shape = half->recurrent()) {
                const auto given = nb::cast<DeltaCacheArrays>(caches[next++]);
                half->take_states(view_delta_cache(given, *shape, type_));
            }
        }
        views_ = std::move(views);
        caches_ = caches;
    }

    // `out` [T, H] gets what leaves, taken[i] [T, H] the stream that enters layer wanted[i], or
    // leaves the last one. With `read` [n] int64, which ascends, the last half, a feed-forward part
    // behind a mixer, computes these rows only, and `out` [n, H] gets them. `open_label`: see
    // `Labels`.
    void run(nb::object pass, const std::vector<Array>& given, const Array& out,
             const std::vector<int>& wanted, const std::vector<Array>& taken,
             const Optional& read, nb::object open_label) const {
        const AttentionRows& rows = attention_rows(pass);
        require(!halves_.empty() && caches_.size() == num_caches_, "layers without caches");
        require(wanted.size() == taken.size(), "a tensor for each wanted stream");
        const int num_layers = static_cast<int>(layer_starts_.size());
        for (const int index : wanted)
            require(index >= 0 && index <= num_layers,
                    "a wanted stream enters no layer and leaves none");
        require(!read || std::count(wanted.begin(), wanted.end(), num_layers) == 0,
                "the stream that leaves has all rows");
        const std::vector<Source> sources = look_at(given, rows.num_rows);
        std::vector<int64_t> kept;
        if (read) kept = kept_rows(*read, rows.num_rows);
        char* hidden = rows_of(out, read ? static_cast<int64_t>(kept.size()) : rows.num_rows);
        std::vector<char*> streams;
        for (const Array& array : taken) streams.push_back(rows_of(array, rows.num_rows));
        const Labels labels(std::move(open_label));
        nb::gil_scoped_release released;
        const Buffers buffers = make_buffers(rows.num_rows);
        const PassView view{type_ == Number::bf16, rows, buffers, labels, rows.num_rows,
                            rows.adapters};
        const int64_t bytes = rows.num_rows * width() * number_bytes();
        const auto take = [&](int layer) {
            for (size_t i = 0; i < wanted.size(); ++i)
                if (wanted[i] == layer) std::memcpy(streams[i], buffers.stream, bytes);
        };
        enter(sources, view);
        size_t cache = 0;
        int layer = 0;
        const size_t num_whole = halves_.size() - (read ? 1 : 0);
        for (size_t index = 0; index < num_whole; ++index) {
            const Half& half = *halves_[index];
            if (index == 0) first_norm(half, sources, view);
            else add_and_norm(*halves_[index - 1], half.norm, view, buffers.normed);
            for (; layer < num_layers && layer_starts_[layer] == index; ++layer) take(layer);
            half.run(view, half.cached() ? &views_[cache++] : nullptr);
        }
        if (read) return run_last(kept, view, hidden);
        add_and_norm(*halves_.back(), last_, view, hidden);
        take(num_layers);
    }

  private:
    int64_t number_bytes() const { return type_ == Number::bf16 ? 2 : 4; }
    int64_t width() const { return halves_[0]->stream_width(); }

    NormWeight keep(const NormArray& norm) {
        if (!norm) return {};
        arrays_.push_back(norm->first);
        const void* weight = contiguous<const void>(norm->first, type_, "norm");
        return {weight, static_cast<int64_t>(norm->first.size()), norm->second};
    }

    Product keep(const ProductObjects& objects) {
        const auto& [weight, bias] = objects;
        kept_.push_back(weight);
        const Product product{&nb::cast<const Matrix&>(weight),
                              bias ? contiguous<const void>(*bias, type_, "bias") : nullptr};
        require(product.weight->takes(type_ == Number::bf16), "weights are in the norms' type");
        if (!bias) return product;
        arrays_.push_back(*bias);
        require(static_cast<int64_t>(bias->size()) == product.rows(), "bias: [N]");
        return product;
    }

    const LowRankFactors* adapters_of(nb::handle given) const {
        if (given.is_none()) return nullptr;
        const LowRankFactors& factors = low_rank_of(given);
        require(factors.is_bf16 == (type_ == Number::bf16), "adapters are in the norms' type");
        return &factors;
    }

    void add(std::unique_ptr<Half> half) {
        require(!layer_starts_.empty(), "a half belongs to a layer");
        const NormWeight& norm = half->norm;
        const int64_t width = halves_.empty() ? half->stream_width() : this->width();
        require(half->stream_width() == width && (!norm.weight || norm.columns == width) &&
                    half->widths().normed == width + half->beside.columns,
                "the matrices of a layer do not fit the stream");
        require(halves_.empty() || (!half->beside.weight && !half->keeps_normed),
                "only the first half may read more than the normed stream");
        widths_.cover(half->widths());
        num_caches_ += half->cached() || half->recurrent();
        halves_.push_back(std::move(half));
    }

    Buffers make_buffers(int64_t num_rows) const {
        const int64_t entered = entry_ ? entry_->product.columns() : 0;
        const int64_t widths[5] = {std::max(widths_.normed, entered), widths_.wide, widths_.narrow,
                                   width(), width()};
        int64_t offsets[5], total = 0;
        for (int i = 0; i < 5; ++i) {
            offsets[i] = total;
            total += (num_rows * widths[i] * number_bytes() + 63) / 64 * 64;
        }
        char* memory = static_cast<char*>(scratch(Scratch::layer, total));
        return {memory + offsets[0], memory + offsets[1], memory + offsets[2], memory + offsets[3],
                memory + offsets[4]};
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
        const NormWeight& beside = halves_[0]->beside;
        if (entry_) {
            bool fits = given.size() == entry_->norms.size();
            for (size_t i = 0; fits && i < given.size(); ++i)
                fits = !entry_->norms[i].weight || entry_->norms[i].columns == sources[i].columns;
            require(fits && columns == entry_->product.columns() &&
                        entry_->product.rows() == width() && !beside.weight,
                    "the sources do not fit the entry");
        } else {
            require(given.size() == (beside.weight ? 2 : 1) &&
                        sources.back().columns == width() &&
                        columns == width() + beside.columns,
                    "the sources do not fit the first layer");
        }
        return sources;
    }

    // Rows of the stream that the last half may compute alone.
    std::vector<int64_t> kept_rows(const Array& read, int64_t num_rows) const {
        const Half& last = *halves_.back();
        require(halves_.size() > 1 && layer_starts_.back() + 1 < halves_.size() &&
                    !last.cached() && !last.recurrent(),
                "only a feed-forward part behind a mixer leaves rows out");
        const auto* given = contiguous<const int64_t>(read, Number::i64, "read");
        std::vector<int64_t> kept(given, given + read.size());
        int64_t before = -1;
        for (const int64_t row : kept) {
            require(row > before && row < num_rows, "read rows ascend, and are rows of the pass");
            before = row;
        }
        return kept;
    }

    // The last half and the norm behind it, for these rows, which move to the front.
    void run_last(const std::vector<int64_t>& kept, const PassView& pass, char* out) const {
        const int64_t bytes = width() * number_bytes();
        std::vector<int64_t> adapters;
        for (size_t i = 0; i < kept.size(); ++i) {
            for (char* rows : {pass.buffers.addend, pass.buffers.stream})
                std::memmove(rows + i * bytes, rows + kept[i] * bytes, bytes);
            if (pass.adapters) adapters.push_back(pass.adapters[kept[i]]);
        }
        const PassView view{pass.is_bf16, pass.rows, pass.buffers, pass.labels,
                            static_cast<int64_t>(kept.size()),
                            pass.adapters ? adapters.data() : nullptr};
        const Half& last = *halves_.back();
        add_and_norm(*halves_[halves_.size() - 2], last.norm, view, view.buffers.normed);
        last.run(view, nullptr);
        add_and_norm(last, last_, view, out);
    }

    char* rows_of(const Array& array, int64_t num_rows) const {
        require(array.ndim() == 2 && static_cast<int64_t>(array.shape(0)) == num_rows &&
                    static_cast<int64_t>(array.shape(1)) == width(),
                "hidden states and streams: [T, H]");
        return contiguous<char>(array, type_, "hidden states and streams");
    }

    // A source, normed or as it is, to columns of rows that are `stride` long.
    void put(const NormWeight& norm, const Source& source, const PassView& pass, char* out,
             int64_t stride) const {
        if (norm.weight) {
            const Labels::Range range(pass.labels, "slipstream::norm");
            NormCall call{};
            call.is_bf16 = pass.is_bf16;
            call.num_rows = pass.num_rows();
            call.columns = source.columns;
            call.x = source.rows;
            call.x_stride = source.stride;
            call.norm = norm;
            call.out = out;
            call.out_stride = stride;
            norm_rows(call);
            return;
        }
        for (int64_t row = 0; row < pass.num_rows(); ++row)
            std::memcpy(out + row * stride * number_bytes(),
                        source.rows + row * source.stride * number_bytes(),
                        source.columns * number_bytes());
    }

    // The stream that enters the first layer.
    void enter(const std::vector<Source>& sources, const PassView& pass) const {
        const Buffers& buffers = pass.buffers;
        if (!entry_) return put({}, sources.back(), pass, buffers.stream, width());
        int64_t place = 0;
        for (size_t i = 0; i < sources.size(); ++i) {
            put(entry_->norms[i], sources[i], pass, buffers.normed + place * number_bytes(),
                entry_->product.columns());
            place += sources[i].columns;
        }
        multiply(entry_->product, buffers.normed, pass, buffers.stream);
    }

    // What the first half reads.
    void first_norm(const Half& half, const std::vector<Source>& sources,
                    const PassView& pass) const {
        const Buffers& buffers = pass.buffers;
        const int64_t columns = half.widths().normed;
        const Source stream{buffers.stream, width(), width()};
        if (half.beside.weight) put(half.beside, sources[0], pass, buffers.normed, columns);
        char* normed = buffers.normed + half.beside.columns * number_bytes();
        put(half.norm, stream, pass, normed, columns);
        if (half.keeps_normed) put({}, {normed, width(), columns}, pass, buffers.stream, width());
    }

    // What a half made joins the stream, whose norm goes to `out`; without a weight, the stream.
    void add_and_norm(const Half& made, const NormWeight& norm, const PassView& pass,
                      char* out) const {
        const Labels::Range range(pass.labels, "slipstream::norm");
        NormCall call{};
        call.is_bf16 = pass.is_bf16;
        call.num_rows = pass.num_rows();
        call.columns = width();
        call.x = pass.buffers.addend;
        call.residual = call.sum = pass.buffers.stream;
        call.x_stride = call.residual_stride = call.out_stride = call.sum_stride = width();
        call.behind = made.behind;
        call.factor = made.factor;
        call.norm = norm;
        call.out = out;
        norm_rows(call);
    }

    Number type_;
    std::unique_ptr<Entry> entry_;
    std::vector<std::unique_ptr<Half>> halves_;
    std::vector<size_t> layer_starts_;  // the first half of each layer
    NormWeight last_{};
    Widths widths_;
    size_t num_caches_ = 0;
    std::vector<CacheView> views_;  // of layers with attention
    std::vector<nb::object> kept_, caches_;
    std::vector<Array> arrays_;
};

}  // namespace

void bind_layers(nb::module_& module) {
    nb::class_<Stack>(module, "Stack")
        .def(nb::init<bool>(), nb::arg("is_bf16"))
        .def("set_entry", &Stack::set_entry, nb::arg("norms"), nb::arg("weight"),
             nb::arg("bias").none())
        .def("add_layer", &Stack::add_layer)
        .def("add_attention", &Stack::add_attention, nb::arg("norm").none(),
             nb::arg("beside").none(), nb::arg("keeps_normed"), nb::arg("attention"),
             nb::arg("qkv"), nb::arg("output"), nb::arg("norms_values"), nb::arg("reads_only"))
        .def("add_delta_net", &Stack::add_delta_net, nb::arg("norm"), nb::arg("layer"),
             nb::arg("inputs"), nb::arg("gates").none(), nb::arg("output"))
        .def("add_latent", &Stack::add_latent, nb::arg("norm"), nb::arg("latent"),
             nb::arg("first"), nb::arg("query_norm").none(), nb::arg("queries").none(),
             nb::arg("output"))
        .def("add_gated_mlp", &Stack::add_gated_mlp, nb::arg("norm"), nb::arg("gate_up"),
             nb::arg("down"), nb::arg("activation"))
        .def("set_behind", &Stack::set_behind, nb::arg("norm").none(), nb::arg("factor").none())
        .def("set_adapters", &Stack::set_adapters, nb::arg("first").none(), nb::arg("last").none())
        .def("add_experts", &Stack::add_experts, nb::arg("norm"), nb::arg("experts"))
        .def("set_last", &Stack::set_last, nb::arg("norm"))
        .def("set_caches", &Stack::set_caches, nb::arg("caches"))
        .def("run", &Stack::run, nb::arg("rows"), nb::arg("sources"), nb::arg("out"),
             nb::arg("wanted"), nb::arg("taken"), nb::arg("read").none(),
             nb::arg("open_label").none());
}

}  // namespace slipstream
