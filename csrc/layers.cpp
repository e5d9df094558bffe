// Runs decoder layers in one call, since Python takes too long between their products.
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
#include "stack_sublayers.h"
#include "tensor.h"

namespace slipstream {
namespace {

using Optional = std::optional<Array>;
using NormArray = std::optional<std::pair<Array, float>>;

// Projects several sources, concatenated, to the stream.
struct Entry {
    std::vector<NormWeight> norms;
    Product product;
};

// Rows of an input tensor.
struct Source {
    const char* rows;
    int64_t columns, stride;
};

// Consecutive layers, whose sublayers run in the order in which they are added.
class Stack {
  public:
    explicit Stack(bool is_bf16) : type_(is_bf16 ? Number::bf16 : Number::f32) {}

    void set_entry(const std::vector<NormArray>& norms, nb::object weight, const Optional& bias) {
        entry_ = std::make_unique<Entry>();
        for (const NormArray& norm : norms) entry_->norms.push_back(keep(norm));
        entry_->product = keep({weight, bias});
    }

    void set_last(const NormArray& norm) { last_ = keep(norm); }

    // Begins a new layer, to which the sublayers that are added next belong.
    void add_layer() { layer_starts_.push_back(sublayers_.size()); }

    void add_attention(const NormArray& norm, const NormArray& second_norm, bool keeps_normed,
                       nb::object attention, const ProductObjects& qkv,
                       const ProductObjects& output, bool norms_values, bool reads_only) {
        kept_.push_back(attention);
        AttentionShape shape = attention_shape(attention, type_);
        require(!(norms_values || reads_only) || (shape.query_norm && !shape.gated),
                "only attention with norms and without gates norms values or reads alone");
        shape.norms_values = norms_values;
        shape.reads_only = reads_only;
        add(std::make_unique<AttentionSublayer>(keep(norm), keep(second_norm), keeps_normed, shape,
                                                keep(qkv), keep(output)));
    }

    void add_delta_net(const NormArray& norm, nb::object layer, const ProductObjects& inputs,
                       const std::optional<ProductObjects>& gates, const ProductObjects& output) {
        kept_.push_back(layer);
        add(std::make_unique<DeltaNetSublayer>(keep(norm), delta_shape(layer), keep(inputs),
                                               gates ? keep(*gates) : Product{}, keep(output)));
    }

    void add_latent(const NormArray& norm, nb::object latent, const ProductObjects& first,
                    const NormArray& query_norm, const std::optional<ProductObjects>& queries,
                    const ProductObjects& output) {
        kept_.push_back(latent);
        const Latent& given = latent_of(latent);
        require(given.is_bf16() == (type_ == Number::bf16), "latent rows are in the norms' type");
        add(std::make_unique<LatentSublayer>(keep(norm), given, keep(first), keep(query_norm),
                                             queries ? keep(*queries) : Product{}, keep(output)));
    }

    void add_gated_mlp(const NormArray& norm, const ProductObjects& gate_up,
                       const ProductObjects& down, const std::string& activation) {
        add(std::make_unique<GatedMlpSublayer>(keep(norm), keep(gate_up), keep(down),
                                               activation_named(activation)));
    }

    // How the output of the sublayer that was added last is added to the stream.
    void set_post_norm(const NormArray& norm, std::optional<float> factor) {
        require(!sublayers_.empty(), "a post-norm belongs to a sublayer");
        Sublayer& sublayer = *sublayers_.back();
        sublayer.post_norm = keep(norm);
        require(!sublayer.post_norm.weight || sublayer.post_norm.columns == width(), "norms: [H]");
        sublayer.factor = factor.value_or(1.0f);
    }

    // Adapters of the first and the last product of the sublayer that was added last.
    void set_adapters(nb::object first, nb::object last) {
        require(!sublayers_.empty(), "adapters belong to a sublayer");
        kept_.push_back(first);
        kept_.push_back(last);
        sublayers_.back()->take_adapters(adapters_of(first), adapters_of(last));
    }

    void add_experts(const NormArray& norm, nb::object experts) {
        kept_.push_back(experts);
        const auto& given = nb::cast<const Experts&>(experts);
        require(given.is_bf16() == (type_ == Number::bf16), "experts are in the norms' type");
        add(std::make_unique<ExpertsSublayer>(keep(norm), given));
    }

    // Keys and values of each layer with attention, states of each gated delta net; used until the
    // next call.
    void set_caches(const std::vector<nb::object>& caches) {
        require(caches.size() == num_caches_, "a cache for each layer with a mixer");
        std::vector<CacheView> views;
        size_t next = 0;
        for (const auto& sublayer : sublayers_) {
            if (const AttentionShape* shape = sublayer->cached()) {
                const auto [keys, values] = nb::cast<std::pair<Array, Array>>(caches[next++]);
                views.push_back(
                    view_cache(keys, values, shape->num_kv_heads, shape->head_dim, type_));
            } else if (const DeltaShape* shape = sublayer->recurrent()) {
                const auto given = nb::cast<DeltaCacheArrays>(caches[next++]);
                sublayer->take_states(view_delta_cache(given, *shape, type_));
            }
        }
        views_ = std::move(views);
        caches_ = caches;
    }

    // Writes the stream after the last layer and its norm to `out` [T, H], and the stream that
    // enters layer wanted[i], or leaves the last one, to taken[i] [T, H]. With `read` [n] int64,
    // ascending, the last sublayer, which must be a feed-forward part after a mixer, computes only
    // these rows, and `out` is [n, H]. `open_label`: see `Labels`.
    void run(nb::object pass, const std::vector<Array>& given, const Array& out,
             const std::vector<int>& wanted, const std::vector<Array>& taken,
             const Optional& read, nb::object open_label) const {
        const AttentionRows& rows = attention_rows(pass);
        require(!sublayers_.empty() && caches_.size() == num_caches_, "layers without caches");
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
        const size_t num_whole = sublayers_.size() - (read ? 1 : 0);
        for (size_t index = 0; index < num_whole; ++index) {
            const Sublayer& sublayer = *sublayers_[index];
            if (index == 0) first_norm(sublayer, sources, view);
            else add_and_norm(*sublayers_[index - 1], sublayer.norm, view, buffers.normed);
            for (; layer < num_layers && layer_starts_[layer] == index; ++layer) take(layer);
            sublayer.run(view, sublayer.cached() ? &views_[cache++] : nullptr);
        }
        if (read) return run_last(kept, view, hidden);
        add_and_norm(*sublayers_.back(), last_, view, hidden);
        take(num_layers);
    }

  private:
    int64_t number_bytes() const { return type_ == Number::bf16 ? 2 : 4; }
    int64_t width() const { return sublayers_[0]->stream_width(); }

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

    void add(std::unique_ptr<Sublayer> sublayer) {
        require(!layer_starts_.empty(), "a sublayer belongs to a layer");
        const NormWeight& norm = sublayer->norm;
        const int64_t width = sublayers_.empty() ? sublayer->stream_width() : this->width();
        require(sublayer->stream_width() == width && (!norm.weight || norm.columns == width) &&
                    sublayer->widths().normed == width + sublayer->second_norm.columns,
                "the matrices of a layer do not fit the stream");
        require(sublayers_.empty() || (!sublayer->second_norm.weight && !sublayer->keeps_normed),
                "only the first sublayer may read more than the normed stream");
        widths_.cover(sublayer->widths());
        num_caches_ += sublayer->cached() || sublayer->recurrent();
        sublayers_.push_back(std::move(sublayer));
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
        const NormWeight& second_norm = sublayers_[0]->second_norm;
        if (entry_) {
            bool fits = given.size() == entry_->norms.size();
            for (size_t i = 0; fits && i < given.size(); ++i)
                fits = !entry_->norms[i].weight || entry_->norms[i].columns == sources[i].columns;
            require(fits && columns == entry_->product.columns() &&
                        entry_->product.rows() == width() && !second_norm.weight,
                    "the sources do not fit the entry");
        } else {
            require(given.size() == (second_norm.weight ? 2 : 1) &&
                        sources.back().columns == width() &&
                        columns == width() + second_norm.columns,
                    "the sources do not fit the first layer");
        }
        return sources;
    }

    // Rows of the stream that the last sublayer may compute alone.
    std::vector<int64_t> kept_rows(const Array& read, int64_t num_rows) const {
        const Sublayer& last = *sublayers_.back();
        require(sublayers_.size() > 1 && layer_starts_.back() + 1 < sublayers_.size() &&
                    !last.cached() && !last.recurrent(),
                "only a feed-forward part after a mixer leaves rows out");
        const auto* given = contiguous<const int64_t>(read, Number::i64, "read");
        std::vector<int64_t> kept(given, given + read.size());
        int64_t before = -1;
        for (const int64_t row : kept) {
            require(row > before && row < num_rows, "read rows ascend, and are rows of the pass");
            before = row;
        }
        return kept;
    }

    // Runs the last sublayer and the final norm for these rows, which are moved to the front.
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
        const Sublayer& last = *sublayers_.back();
        add_and_norm(*sublayers_[sublayers_.size() - 2], last.norm, view, view.buffers.normed);
        last.run(view, nullptr);
        add_and_norm(last, last_, view, out);
    }

    char* rows_of(const Array& array, int64_t num_rows) const {
        require(array.ndim() == 2 && static_cast<int64_t>(array.shape(0)) == num_rows &&
                    static_cast<int64_t>(array.shape(1)) == width(),
                "hidden states and streams: [T, H]");
        return contiguous<char>(array, type_, "hidden states and streams");
    }

    // Writes a source, normed if `norm` has a weight, to columns of rows that are `stride` long.
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

    // Computes the input of the first sublayer.
    void first_norm(const Sublayer& sublayer, const std::vector<Source>& sources,
                    const PassView& pass) const {
        const Buffers& buffers = pass.buffers;
        const int64_t columns = sublayer.widths().normed;
        const Source stream{buffers.stream, width(), width()};
        const NormWeight& second_norm = sublayer.second_norm;
        if (second_norm.weight) put(second_norm, sources[0], pass, buffers.normed, columns);
        char* normed = buffers.normed + second_norm.columns * number_bytes();
        put(sublayer.norm, stream, pass, normed, columns);
        if (sublayer.keeps_normed)
            put({}, {normed, width(), columns}, pass, buffers.stream, width());
    }

    // Adds the output of `sublayer` to the stream, and writes the stream's norm to `out`; if `norm`
    // has no weight, the stream itself.
    void add_and_norm(const Sublayer& sublayer, const NormWeight& norm, const PassView& pass,
                      char* out) const {
        const Labels::Range range(pass.labels, "slipstream::norm");
        NormCall call{};
        call.is_bf16 = pass.is_bf16;
        call.num_rows = pass.num_rows();
        call.columns = width();
        call.x = pass.buffers.addend;
        call.residual = call.sum = pass.buffers.stream;
        call.x_stride = call.residual_stride = call.out_stride = call.sum_stride = width();
        call.post_norm = sublayer.post_norm;
        call.factor = sublayer.factor;
        call.norm = norm;
        call.out = out;
        norm_rows(call);
    }

    Number type_;
    std::unique_ptr<Entry> entry_;
    std::vector<std::unique_ptr<Sublayer>> sublayers_;
    std::vector<size_t> layer_starts_;  // the first sublayer of each layer
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
             nb::arg("second_norm").none(), nb::arg("keeps_normed"), nb::arg("attention"),
             nb::arg("qkv"), nb::arg("output"), nb::arg("norms_values"), nb::arg("reads_only"))
        .def("add_delta_net", &Stack::add_delta_net, nb::arg("norm"), nb::arg("layer"),
             nb::arg("inputs"), nb::arg("gates").none(), nb::arg("output"))
        .def("add_latent", &Stack::add_latent, nb::arg("norm"), nb::arg("latent"),
             nb::arg("first"), nb::arg("query_norm").none(), nb::arg("queries").none(),
             nb::arg("output"))
        .def("add_gated_mlp", &Stack::add_gated_mlp, nb::arg("norm"), nb::arg("gate_up"),
             nb::arg("down"), nb::arg("activation"))
        .def("set_post_norm", &Stack::set_post_norm, nb::arg("norm").none(),
             nb::arg("factor").none())
        .def("set_adapters", &Stack::set_adapters, nb::arg("first").none(), nb::arg("last").none())
        .def("add_experts", &Stack::add_experts, nb::arg("norm"), nb::arg("experts"))
        .def("set_last", &Stack::set_last, nb::arg("norm"))
        .def("set_caches", &Stack::set_caches, nb::arg("caches"))
        .def("run", &Stack::run, nb::arg("rows"), nb::arg("sources"), nb::arg("out"),
             nb::arg("wanted"), nb::arg("taken"), nb::arg("read").none(),
             nb::arg("open_label").none());
}

}  // namespace slipstream
