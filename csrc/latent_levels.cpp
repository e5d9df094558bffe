// What happens to rows before latent attention. Compiled once for each level of instructions.
#include "latent.h"

#include "attention_rotate.h"
#include "threads.h"

namespace slipstream::SLIPSTREAM_LEVEL {
namespace {

constexpr int64_t few_rows = 4;  // done sooner than other threads are told of them

// Neighbours turned as pairs.
template <typename Number>
void rotate_pairs(const Number* x, const float* cos_sin, int rotary_dim, float* out) {
    norm_head<Number>(x, nullptr, rotary_dim, 0.0f, out);  // in float32, as it is
    const int half = rotary_dim / 2;
    for (int pair = 0; pair < half; ++pair) {
        const float even = out[2 * pair], odd = out[2 * pair + 1];
        out[2 * pair] = even * cos_sin[pair] - odd * cos_sin[half + pair];
        out[2 * pair + 1] = odd * cos_sin[pair] + even * cos_sin[half + pair];
    }
}

template <typename Number>
void put(const float* x, int count, Number* to) {
    for (int d = 0; d < count; d += lanes) store_some(to + d, load_some(x + d, count - d), count - d);
}

template <typename Number>
void prepare_row(const LatentCall& call, int64_t row) {
    const LatentShape& shape = *call.shape;
    const int64_t position = within_tables(shape.num_positions, call.rows->positions[row]);
    const float* cos_sin = shape.cos_sin + position * shape.rotary_dim;
    alignas(64) float numbers[most_head_dim + lanes];
    const Number* queries = static_cast<const Number*>(call.queries) + row * call.query_stride;
    Number* absorbed =
        static_cast<Number*>(call.absorbed) + row * shape.num_heads * shape.stored_dim();
    for (int head = 0; head < shape.num_heads; ++head) {
        const Number* own = queries + head * shape.query_dim() + shape.plain_dim;
        rotate_pairs(own, cos_sin, shape.rotary_dim, numbers);
        put(numbers, shape.rotary_dim, absorbed + head * shape.stored_dim() + shape.rank);
    }
    const int64_t offset = slot_offset(*call.cache, call.rows->slots[row]);
    if (offset < 0) return;
    const Number* latent = static_cast<const Number*>(call.latents) + row * call.latent_stride;
    norm_head(latent, static_cast<const Number*>(shape.norm), shape.rank, shape.norm_eps, numbers);
    auto* to = reinterpret_cast<Number*>(static_cast<char*>(call.cache->keys) + offset);
    put(numbers, shape.rank, to);
    rotate_pairs(latent + shape.rank, cos_sin, shape.rotary_dim, numbers);
    put(numbers, shape.rotary_dim, to + shape.rank);
}

template <typename Number>
void prepare_rows(const LatentCall& call) {
    const int64_t count = call.rows->num_rows;
    const auto prepare = [&](int64_t row) { prepare_row<Number>(call, row); };
    if (count > few_rows) return parallel_for(count, prepare);
    for (int64_t row = 0; row < count; ++row) prepare(row);
}

void run_prepare(const LatentCall& call) {
    if (call.is_bf16) prepare_rows<bf16>(call);
    else prepare_rows<float>(call);
}

const LatentKernels latent_here = {run_prepare};
const bool latent_entered = latent_kernels.enter(this_level, &latent_here);

}  // namespace
}  // namespace slipstream::SLIPSTREAM_LEVEL
