// The kinds of sublayers in a stack of decoder layers. A sublayer is a mixer (attention, delta net)
// or a feed-forward part, with its norm.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_objects.h"
#include "delta_net_objects.h"
#include "experts.h"
#include "labels.h"
#include "latent_objects.h"
#include "matmul.h"
#include "rows.h"

namespace slipstream {

// Numbers per row in each buffer while a sublayer runs; what `wide` and `narrow` hold is up to it.
struct Widths {
    int64_t normed = 0, wide = 0, narrow = 0;

    void cover(const Widths& other) {
        normed = std::max(normed, other.normed);
        wide = std::max(wide, other.wide);
        narrow = std::max(narrow, other.narrow);
    }
};

// Buffers of one pass, with one row per token; `addend` and `stream` are as wide as the stream.
struct Buffers {
    char *normed, *wide, *narrow, *addend, *stream;
};

// What sublayers need to know of a pass, and labels for a profiler. The last sublayer may compute
// only `count` of the rows; `adapters` are those of these rows.
struct PassView {
    bool is_bf16;
    const AttentionRows& rows;
    const Buffers& buffers;
    const Labels& labels;
    int64_t count;
    const int64_t* adapters;

    int64_t num_rows() const { return count; }
};

inline void multiply(const Product& product, const void* x, const PassView& pass, void* out) {
    const Labels::Range range(pass.labels, "slipstream::matmul");
    MatmulCall call{};
    call.weight = product.weight;
    call.bias = product.bias;
    call.x = x;
    call.x_is_bf16 = call.out_is_bf16 = pass.is_bf16;
    call.num_rows = pass.num_rows();
    call.x_stride = product.columns();
    call.out = out;
    call.out_stride = product.rows();
    matmul(call);
    if (!product.adapters || !pass.adapters) return;
    const Labels::Range adapting(pass.labels, "slipstream::adapters");
    add_low_rank({product.adapters, call.num_rows, pass.adapters, x, call.x_stride, out,
                  call.out_stride});
}

inline void take(Product& product, const LowRankFactors* adapters) {
    require(!adapters ||
                (adapters->rows == product.rows() && adapters->columns == product.columns()),
            "the adapters do not fit their matrix");
    product.adapters = adapters;
}

// Computes `addend` rows from `normed` rows. Pointers lead to objects that Python keeps alive with
// the stack.
class Sublayer {
  public:
    // `second_norm`: of a second input, which only the first sublayer of a stack may have.
    Sublayer(const NormWeight& norm, const NormWeight& second_norm, bool keeps_normed)
        : norm(norm), second_norm(second_norm), keeps_normed(keeps_normed) {}
    virtual ~Sublayer() = default;

    virtual Widths widths() const = 0;
    virtual int64_t stream_width() const = 0;
    // The sizes of its attention, which reads a KV cache; null for a sublayer without attention.
    virtual const AttentionShape* cached() const { return nullptr; }
    // The sizes of its gated delta net; null for a sublayer without one.
    virtual const DeltaShape* recurrent() const { return nullptr; }
    // Sets the states of a gated delta net, which are used until the next call.
    virtual void take_states(const DeltaCacheView&) {}
    // Sets the adapters of its first and its last product; null: none. Called once, before `run`.
    virtual void take_adapters(const LowRankFactors* first, const LowRankFactors* last) {
        require(!first && !last, "this kind of sublayer has no adapters");
    }
    virtual void run(const PassView& pass, const CacheView* cache) const = 0;

    const NormWeight norm, second_norm;
    const bool keeps_normed;
    // stream = (stream + post_norm(addend)) * factor
    NormWeight post_norm{};
    float factor = 1.0f;
};

class AttentionSublayer final : public Sublayer {
  public:
    AttentionSublayer(const NormWeight& norm, const NormWeight& second_norm, bool keeps_normed,
                      const AttentionShape& shape, const Product& qkv, const Product& output)
        : Sublayer(norm, second_norm, keeps_normed), shape_(shape), qkv_(qkv), output_(output) {
        require(qkv.columns() == stream_width() + second_norm.columns &&
                    qkv.rows() == shape.columns() && output.columns() == shape.query_columns(),
                "the matrices of an attention layer do not fit each other");
    }

    Widths widths() const override { return {qkv_.columns(), qkv_.rows(), output_.columns()}; }
    int64_t stream_width() const override { return output_.rows(); }
    const AttentionShape* cached() const override { return &shape_; }
    void take_adapters(const LowRankFactors* first, const LowRankFactors* last) override {
        take(qkv_, first);
        take(output_, last);
    }

    void run(const PassView& pass, const CacheView* cache) const override {
        const Buffers& buffers = pass.buffers;
        multiply(qkv_, buffers.normed, pass, buffers.wide);
        {
            const Labels::Range range(pass.labels, "slipstream::attend");
            AttentionCall call{};
            call.shape = &shape_;
            const AttentionRows* windowed = shape_.window > 0 ? pass.rows.windowed : nullptr;
            call.rows = windowed ? windowed : &pass.rows;
            call.cache = cache;
            call.x = buffers.wide;
            call.x_is_bf16 = pass.is_bf16;
            call.x_stride = qkv_.rows();
            call.is_stored = shape_.reads_only;
            call.out = buffers.narrow;
            call.out_stride = output_.columns();
            attend(call);
        }
        multiply(output_, buffers.narrow, pass, buffers.addend);
    }

  private:
    const AttentionShape shape_;
    Product qkv_, output_;
};

class DeltaNetSublayer final : public Sublayer {
  public:
    // Without `gates`, the rows of `inputs` include those of the gates.
    DeltaNetSublayer(const NormWeight& norm, const DeltaShape& shape, const Product& inputs,
                     const Product& gates, const Product& output)
        : Sublayer(norm, {}, false), shape_(shape), inputs_(inputs), gates_(gates),
          output_(output) {
        const int64_t values = shape.num_value_heads * shape.value_dim;
        const int64_t rows = inputs.rows() + (gates.weight ? gates.rows() : 0);
        require(inputs.columns() == stream_width() && output.columns() == values &&
                    rows == shape.num_channels() + values + 2 * shape.num_value_heads &&
                    (!gates.weight || (gates.rows() == 2 * shape.num_value_heads &&
                                       gates.columns() == stream_width())),
                "the matrices of a gated delta net do not fit each other");
    }

    Widths widths() const override {
        return {inputs_.columns(), inputs_.rows() + 2 * shape_.num_value_heads, output_.columns()};
    }
    int64_t stream_width() const override { return output_.rows(); }
    const DeltaShape* recurrent() const override { return &shape_; }
    void take_states(const DeltaCacheView& cache) override { cache_ = cache; }

    void run(const PassView& pass, const CacheView*) const override {
        const Buffers& buffers = pass.buffers;
        const int64_t bytes = pass.is_bf16 ? 2 : 4;
        multiply(inputs_, buffers.normed, pass, buffers.wide);
        DeltaCall call{};
        call.mixed_stride = call.z_stride = call.gates_stride = inputs_.rows();
        call.mixed = buffers.wide;
        call.z = buffers.wide + shape_.num_channels() * bytes;
        call.gates = static_cast<const char*>(call.z) + output_.columns() * bytes;
        if (gates_.weight) {
            char* gates = buffers.wide + pass.num_rows() * inputs_.rows() * bytes;
            multiply(gates_, buffers.normed, pass, gates);
            call.gates = gates;
            call.gates_stride = gates_.rows();
        }
        {
            const Labels::Range range(pass.labels, "slipstream::delta net");
            call.shape = &shape_;
            call.rows = &pass.rows;
            call.cache = &cache_;
            call.is_bf16 = pass.is_bf16;
            call.out = buffers.narrow;
            call.out_stride = output_.columns();
            run_delta_net(call);
        }
        multiply(output_, buffers.narrow, pass, buffers.addend);
    }

  private:
    const DeltaShape shape_;
    const Product inputs_, gates_, output_;
    DeltaCacheView cache_{};
};

class LatentSublayer final : public Sublayer {
  public:
    // Without `queries`, `first` computes the queries as well.
    LatentSublayer(const NormWeight& norm, const Latent& layer, const Product& first,
                   const NormWeight& query_norm, const Product& queries, const Product& output)
        : Sublayer(norm, {}, false), layer_(layer), first_(first), query_norm_(query_norm),
          queries_(queries), output_(output) {
        const LatentShape& shape = layer.shape();
        const int64_t rows = int64_t{shape.num_heads} * shape.query_dim();
        require(first.columns() == stream_width() &&
                    first.rows() == (queries.weight ? queries.columns() : rows) + shape.stored_dim() &&
                    (!queries.weight || (queries.rows() == rows &&
                                         query_norm.columns == queries.columns())) &&
                    output.columns() == int64_t{shape.num_heads} * shape.value_dim,
                "the matrices of latent attention do not fit each other");
    }

    Widths widths() const override {
        const int64_t of_queries = queries_.weight ? queries_.columns() + queries_.rows() : 0;
        return {first_.columns(), first_.rows() + of_queries, output_.columns()};
    }
    int64_t stream_width() const override { return output_.rows(); }
    const AttentionShape* cached() const override { return &layer_.attention(); }

    void run(const PassView& pass, const CacheView* cache) const override {
        const Buffers& buffers = pass.buffers;
        const int64_t bytes = pass.is_bf16 ? 2 : 4, stored = layer_.shape().stored_dim();
        multiply(first_, buffers.normed, pass, buffers.wide);
        LatentCall call{};
        call.rows = &pass.rows;
        call.cache = cache;
        call.is_bf16 = pass.is_bf16;
        call.queries = buffers.wide;
        call.latents = buffers.wide + (first_.rows() - stored) * bytes;
        call.query_stride = call.latent_stride = first_.rows();
        if (queries_.weight) {
            char* normed = buffers.wide + pass.num_rows() * first_.rows() * bytes;
            char* queries = normed + pass.num_rows() * queries_.columns() * bytes;
            norm_queries(pass, normed);
            multiply(queries_, normed, pass, queries);
            call.queries = queries;
            call.query_stride = queries_.rows();
        }
        {
            const Labels::Range range(pass.labels, "slipstream::attend");
            layer_.run(call, buffers.narrow, output_.columns());
        }
        multiply(output_, buffers.narrow, pass, buffers.addend);
    }

  private:
    void norm_queries(const PassView& pass, char* out) const {
        const Labels::Range range(pass.labels, "slipstream::norm");
        NormCall call{};
        call.is_bf16 = pass.is_bf16;
        call.num_rows = pass.num_rows();
        call.columns = call.out_stride = queries_.columns();
        call.x = pass.buffers.wide;
        call.x_stride = first_.rows();
        call.norm = query_norm_;
        call.out = out;
        norm_rows(call);
    }

    const Latent& layer_;
    const Product first_;
    const NormWeight query_norm_;
    const Product queries_, output_;
};

class GatedMlpSublayer final : public Sublayer {
  public:
    GatedMlpSublayer(const NormWeight& norm, const Product& gate_up, const Product& down,
                     Activation activation)
        : Sublayer(norm, {}, false), gate_up_(gate_up), down_(down), activation_(activation) {
        require(gate_up.columns() == down.rows() && gate_up.rows() == 2 * down.columns(),
                "the matrices of a feed-forward layer do not fit each other");
    }

    Widths widths() const override {
        return {gate_up_.columns(), gate_up_.rows(), down_.columns()};
    }
    int64_t stream_width() const override { return down_.rows(); }
    void take_adapters(const LowRankFactors* first, const LowRankFactors* last) override {
        take(gate_up_, first);
        take(down_, last);
    }

    void run(const PassView& pass, const CacheView*) const override {
        const Buffers& buffers = pass.buffers;
        multiply(gate_up_, buffers.normed, pass, buffers.wide);
        {
            const Labels::Range range(pass.labels, "slipstream::gated");
            GatedCall gated{};
            gated.activation = activation_;
            gated.is_bf16 = pass.is_bf16;
            gated.num_rows = pass.num_rows();
            gated.columns = gated.out_stride = down_.columns();
            gated.gate_up = buffers.wide;
            gated.gate_up_stride = gate_up_.rows();
            gated.out = buffers.narrow;
            gated_rows(gated);
        }
        multiply(down_, buffers.narrow, pass, buffers.addend);
    }

  private:
    Product gate_up_, down_;
    const Activation activation_;
};

class ExpertsSublayer final : public Sublayer {
  public:
    ExpertsSublayer(const NormWeight& norm, const Experts& experts)
        : Sublayer(norm, {}, false), experts_(experts) {}

    Widths widths() const override { return {experts_.width(), 0, 0}; }
    int64_t stream_width() const override { return experts_.width(); }

    void run(const PassView& pass, const CacheView*) const override {
        const Labels::Range range(pass.labels, "slipstream::experts");
        experts_.run(pass.buffers.normed, pass.num_rows(), pass.buffers.addend);
    }

  private:
    const Experts& experts_;
};

}  // namespace slipstream
