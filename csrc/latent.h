// Latent attention: one cached row a token for all heads. See `slipstream/kernels/latent_attention.py`.
//
// In the absorbed form a layer is attention with one key head, the cached row, whose value is the
// same row, between a product of each head's queries and one of what each head reads.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "matmul.h"

namespace slipstream {

constexpr int most_latent_dim = 576;  // numbers of a token

// Pointers are borrowed.
struct LatentShape {
    int num_heads, rank, plain_dim, rotary_dim, value_dim;
    const void* norm;  // [rank] in the rows' type
    float norm_eps;
    const float* cos_sin;  // [num_positions, rotary_dim]: cosines of pairs, then sines
    int64_t num_positions;

    int stored_dim() const { return rank + rotary_dim; }
    int query_dim() const { return plain_dim + rotary_dim; }
};

struct LatentCall {
    const LatentShape* shape;
    const AttentionRows* rows;
    const CacheView* cache;  // keys and values are the latent rows
    bool is_bf16;
    const void *queries, *latents;  // [T, H query_dim], [T, stored_dim], rows so far apart:
    int64_t query_stride, latent_stride;
    // Rows that the first step makes and attention reads, [T, H, stored_dim]: of each head what the
    // keys' matrix makes of its queries, then the rotated ones.
    void* absorbed;
};

struct LatentKernels {
    // Norms and rotates latent rows, stores them, and puts rotated queries into `absorbed`.
    void (*prepare)(const LatentCall& call);
};

extern ByLevel<LatentKernels> latent_kernels;

// One layer with its packed matrices.
class Latent {
  public:
    // keys [H, rank, plain_dim] and values [H, value_dim, rank], row by row in the rows' type;
    // query_scales as of `AttentionShape`, or null.
    Latent(const LatentShape& shape, bool is_bf16, float scale, const float* query_scales,
           const char* keys, const char* values);

    const LatentShape& shape() const { return shape_; }
    // What its cache is to be like, seen as pages of keys.
    const AttentionShape& attention() const { return attention_; }
    bool is_bf16() const { return is_bf16_; }
    // `call.shape` and `call.absorbed` are set here; out [T, H value_dim], rows out_stride apart.
    void run(LatentCall call, void* out, int64_t out_stride) const;

  private:
    using Matrices = std::vector<std::unique_ptr<Matrix>>;

    Matrices pack(const char* values, int64_t rows, int64_t columns) const;
    // Each head's columns of x times its matrix, to its columns of out.
    void multiply(const Matrices& matrices, const char* x, int64_t x_stride, int64_t x_columns,
                  int64_t num_rows, char* out, int64_t out_stride, int64_t out_columns) const;
    int64_t number_bytes() const { return is_bf16_ ? 2 : 4; }

    const LatentShape shape_;
    const bool is_bf16_;
    AttentionShape attention_{};
    Matrices keys_, values_;
};

}  // namespace slipstream
