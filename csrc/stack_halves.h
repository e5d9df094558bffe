// The kinds of halves that a stack of decoder layers runs: what each makes of normed rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_objects.h"
#include "experts.h"
#include "labels.h"
#include "matmul.h"
#include "rows.h"

namespace slipstream {

// Without a weight there is no norm.
struct NormWeight {
    const void* weight;
    int64_t columns;
    float eps;
};

// Numbers that a row has in each buffer while a half runs; `wide` and `narrow` are its own.
struct Widths {
    int64_t normed = 0, wide = 0, narrow = 0;

    void cover(const Widths& other) {
        normed = std::max(normed, other.normed);
        wide = std::max(wide, other.wide);
        narrow = std::max(narrow, other.narrow);
    }
};

// Buffers of one pass, each of so many rows; `addend` and `stream` are as wide as the stream.
struct Buffers {
    char *normed, *wide, *narrow, *addend, *stream;
};

// What halves need to know of a pass, and names of its parts for a profiler.
struct PassView {
    bool is_bf16;
    const AttentionRows& rows;
    const Buffers& buffers;
    const Labels& labels;

    int64_t num_rows() const { return rows.num_rows; }
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
}

// A half of a layer: `normed` rows to `addend` rows. Pointers lead to objects that Python keeps
// alive with the stack.
class Half {
  public:
    // `beside` is the norm of a second input, only where the stream begins.
    Half(const NormWeight& norm, const NormWeight& beside, bool keeps_normed)
        : norm(norm), beside(beside), keeps_normed(keeps_normed) {}
    virtual ~Half() = default;

    virtual Widths widths() const = 0;
    virtual int64_t stream_width() const = 0;
    // The sizes of its attention, whose cache it is given; null for a half without one.
    virtual const AttentionShape* cached() const { return nullptr; }
    virtual void run(const PassView& pass, const CacheView* cache) const = 0;

    const NormWeight norm, beside;
    const bool keeps_normed;
};

class AttentionHalf final : public Half {
  public:
    AttentionHalf(const NormWeight& norm, const NormWeight& beside, bool keeps_normed,
                  const AttentionShape& shape, const Product& qkv, const Product& output)
        : Half(norm, beside, keeps_normed), shape_(shape), qkv_(qkv), output_(output) {
        require(qkv.columns() == stream_width() + beside.columns &&
                    qkv.rows() ==
                        (shape.num_heads + 2 * int64_t{shape.num_kv_heads}) * shape.head_dim &&
                    output.columns() == int64_t{shape.num_heads} * shape.head_dim,
                "the matrices of an attention layer do not fit each other");
    }

    Widths widths() const override { return {qkv_.columns(), qkv_.rows(), output_.columns()}; }
    int64_t stream_width() const override { return output_.rows(); }
    const AttentionShape* cached() const override { return &shape_; }

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
            call.out = buffers.narrow;
            call.out_stride = output_.columns();
            attend(call);
        }
        multiply(output_, buffers.narrow, pass, buffers.addend);
    }

  private:
    const AttentionShape shape_;
    const Product qkv_, output_;
};

class GatedMlpHalf final : public Half {
  public:
    GatedMlpHalf(const NormWeight& norm, const Product& gate_up, const Product& down)
        : Half(norm, {}, false), gate_up_(gate_up), down_(down) {
        require(gate_up.columns() == down.rows() && gate_up.rows() == 2 * down.columns(),
                "the matrices of a feed-forward layer do not fit each other");
    }

    Widths widths() const override {
        return {gate_up_.columns(), gate_up_.rows(), down_.columns()};
    }
    int64_t stream_width() const override { return down_.rows(); }

    void run(const PassView& pass, const CacheView*) const override {
        const Buffers& buffers = pass.buffers;
        multiply(gate_up_, buffers.normed, pass, buffers.wide);
        {
            const Labels::Range range(pass.labels, "slipstream::silu");
            GatedCall gated{};
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
    const Product gate_up_, down_;
};

class ExpertsHalf final : public Half {
  public:
    ExpertsHalf(const NormWeight& norm, const Experts& experts)
        : Half(norm, {}, false), experts_(experts) {}

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
