// The recurrence of gated delta nets. Compiled once for each level of instructions.
#include "buffer.h"
#include "delta_net.h"
#include "simd.h"
#include "threads.h"

namespace slipstream::SLIPSTREAM_LEVEL {
namespace {

// Known rows are processed in blocks of this size, whose intermediate results stay in the L2 cache.
constexpr int64_t rows_at_once = 32;
// Columns of a state are independent: up to this many times 16 of them are computed for all rows of a
// block while they are in the L1 cache.
constexpr int most_vectors = 4;
// Sums over the rows of a state are split into this many, so that additions do not wait for each other.
#if defined(__AVX512F__)
constexpr int64_t chains = 2;
#else
constexpr int64_t chains = 1;
#endif
constexpr float unit_eps = 1e-6f;

inline int64_t padded(int64_t count) { return (count + lanes - 1) / lanes * lanes; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline float widened(float x) { return x; }
inline float widened(bf16 x) { return widen(x); }

inline float softplus(float x) {
    return (x > 0.0f ? x : 0.0f) + __builtin_log1pf(__builtin_expf(-__builtin_fabsf(x)));
}
inline F16 silu(F16 x) { return x / (broadcast(1.0f) + exp(zero() - x)); }

// What a block of rows is made into, [rows, padded(D)] each; the states of the value heads stay for
// the next block, as tiles one after the other, each [padded rows, its columns].
struct Memory {
    int64_t rows;
    float *query, *key, *value, *kept, *strength, *read, *states;

    Memory(const DeltaShape& shape, int64_t rows) : rows(rows) {
        const int64_t keys = padded(shape.key_dim), values = padded(shape.value_dim);
        const int64_t heads = shape.repeats();
        const int64_t sizes[7] = {rows * keys,          rows * keys,          heads * rows * values,
                                  padded(heads * rows), padded(heads * rows), rows * values,
                                  heads * keys * values};
        int64_t total = 0;
        for (const int64_t size : sizes) total += size;
        float* next = static_cast<float*>(scratch(Scratch::recurrence, total * sizeof(float)));
        float** parts[7] = {&query, &key, &value, &kept, &strength, &read, &states};
        for (int i = 0; i < 7; ++i) {
            *parts[i] = next;
            next += sizes[i];
        }
    }
};

// One row of the recurrence in count * 16 columns of a state. The state decays as it is read, so
// that it is written once.
template <int count>
inline void advance(float* state, int64_t key_dim, const float* query, const float* key,
                    const float* value, float kept, float strength, float* read) {
    constexpr int64_t stride = count * lanes;
    F16 sums[chains][count];
    for (auto& chain : sums)
        for (F16& sum : chain) sum = zero();
    for (int64_t row = 0; row < key_dim; row += chains)
        for (int64_t chain = 0; chain < chains; ++chain) {
            const F16 k = broadcast(key[row + chain]);
            const float* from = state + (row + chain) * stride;
            for (int i = 0; i < count; ++i)
                sums[chain][i] = fma(load(from + i * lanes), k, sums[chain][i]);
        }
    F16 delta[count];
    const F16 stays = broadcast(kept), step = broadcast(strength);
    for (int i = 0; i < count; ++i) {
        F16 total = sums[0][i];
        for (int64_t chain = 1; chain < chains; ++chain) total = total + sums[chain][i];
        delta[i] = step * (load(value + i * lanes) - stays * total);
        for (int64_t chain = 0; chain < chains; ++chain) sums[chain][i] = zero();
    }
    for (int64_t row = 0; row < key_dim; row += chains)
        for (int64_t chain = 0; chain < chains; ++chain) {
            const F16 k = broadcast(key[row + chain]), q = broadcast(query[row + chain]);
            float* place = state + (row + chain) * stride;
            for (int i = 0; i < count; ++i) {
                const F16 next = fma(k, delta[i], load(place + i * lanes) * stays);
                store(place + i * lanes, next);
                sums[chain][i] = fma(next, q, sums[chain][i]);
            }
        }
    for (int i = 0; i < count; ++i) {
        F16 total = sums[0][i];
        for (int64_t chain = 1; chain < chains; ++chain) total = total + sums[chain][i];
        store(read + i * lanes, total);
    }
}

// The rows of one request, for one key head and the value heads that share it.
template <typename Number>
class Request {
  public:
    Request(const DeltaCall& call, int64_t request, int64_t key_head)
        : call_(call), shape_(*call.shape), cache_(*call.cache), key_head_(key_head) {
        const StateRows& states = *call.rows->states;
        first_ = call.rows->query_start[request];
        const int64_t given = call.rows->query_start[request + 1] - first_;
        slot_ = states.slots[request];
        saved_ = states.saved[request];
        pending_ = states.pending[request];
        num_rows_ = given ? pending_ + given : 0;
        taken_ = pending_ + states.num_known[request];
        if (!given) return;
        save_ = states.save_at[request] - (call.rows->places[first_] - pending_);
        if (save_ > taken_) save_ = 0;
    }

    void run() const {
        if (!num_rows_) return;
        // Draft rows stand in the block of the last row that is taken in: a state is kept there.
        const int64_t known = least(taken_, rows_at_once);
        const Memory memory(shape_, known + num_rows_ - taken_);
        for (int64_t row = 0; row < num_rows_;) {
            int64_t end = row + rows_at_once;
            if (end >= taken_) end = num_rows_;
            run_block(memory, row, end);
            row = end;
        }
        keep_rows();
    }

  private:
    // Rows before the convolution: of the window, then those to be replayed, then the given ones.
    const Number* mixed(int64_t row) const {
        if (row < 0)
            return static_cast<const Number*>(cache_.windows) + slot_ * cache_.window_stride +
                   (row + shape_.width - 1) * shape_.num_channels();
        if (row < pending_)
            return static_cast<const Number*>(cache_.drafted) + slot_ * cache_.drafted_stride +
                   row * shape_.num_channels();
        return static_cast<const Number*>(call_.mixed) +
               (first_ + row - pending_) * call_.mixed_stride;
    }
    const Number* gates(int64_t row) const {
        if (row < pending_)
            return static_cast<const Number*>(cache_.drafted_gates) + slot_ * cache_.gates_stride +
                   row * 2 * shape_.num_value_heads;
        return static_cast<const Number*>(call_.gates) +
               (first_ + row - pending_) * call_.gates_stride;
    }
    int64_t value_channel(int64_t head) const {
        return 2 * shape_.num_key_heads * shape_.key_dim + head * shape_.value_dim;
    }
    // Of value head 0 of this key head's.
    int64_t first_head() const { return key_head_ * shape_.repeats(); }

    void run_block(const Memory& memory, int64_t first, int64_t end) const {
        const int64_t keys = padded(shape_.key_dim), values = padded(shape_.value_dim);
        const int64_t query_channel = key_head_ * shape_.key_dim;
        const int64_t key_channel = query_channel + shape_.num_key_heads * shape_.key_dim;
        const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(shape_.key_dim));
        for (int64_t row = first; row < end; ++row) {
            const int64_t place = row - first;
            const Number* before[most_taps];
            for (int64_t tap = 0; tap < shape_.width; ++tap)
                before[tap] = mixed(row - shape_.width + 1 + tap);
            float *query = memory.query + place * keys, *key = memory.key + place * keys;
            convolve(before, query_channel, shape_.key_dim, query);
            convolve(before, key_channel, shape_.key_dim, key);
            to_unit(query, keys, scale);
            to_unit(key, keys, 1.0f);
            for (int64_t i = 0; i < shape_.repeats(); ++i) {
                const int64_t head = first_head() + i, at = i * memory.rows + place;
                convolve(before, value_channel(head), shape_.value_dim, memory.value + at * values);
                const Number* given = gates(row);
                const float step =
                    widened(given[shape_.num_value_heads + head]) + shape_.step_bias[head];
                memory.kept[at] = __builtin_expf(shape_.decay[head] * softplus(step));
                memory.strength[at] = 1.0f / (1.0f + __builtin_expf(-widened(given[head])));
            }
        }
        for (int64_t i = 0; i < shape_.repeats(); ++i) run_head(memory, i, first, end);
    }

    // Channels of the last of these rows, convolved and active, with zeros up to a whole vector.
    void convolve(const Number* const* rows, int64_t channel, int64_t count, float* out) const {
        for (int64_t at = 0; at < count; at += lanes) {
            const int64_t here = count - at;
            F16 total = zero();
            for (int64_t tap = 0; tap < shape_.width; ++tap) {
                const float* taps = shape_.taps + tap * shape_.num_channels() + channel + at;
                total = fma(load_some(rows[tap] + channel + at, here), load_some(taps, here), total);
            }
            store(out + at, rounded<Number>(silu(total)));
        }
    }

    static void to_unit(float* row, int64_t columns, float scale) {
        F16 squares = zero();
        for (int64_t at = 0; at < columns; at += lanes) {
            const F16 part = load(row + at);
            squares = fma(part, part, squares);
        }
        const F16 factor = broadcast(scale / __builtin_sqrtf(sum(squares) + unit_eps));
        for (int64_t at = 0; at < columns; at += lanes) store(row + at, load(row + at) * factor);
    }

    void run_head(const Memory& memory, int64_t i, int64_t first, int64_t end) const {
        const int64_t vectors = padded(shape_.value_dim) / lanes;
        for (int64_t vector = 0; vector < vectors; vector += most_vectors) {
            switch (least(vectors - vector, most_vectors)) {
                case 1: run_tile<1>(memory, i, vector * lanes, first, end); break;
                case 2: run_tile<2>(memory, i, vector * lanes, first, end); break;
                case 3: run_tile<3>(memory, i, vector * lanes, first, end); break;
                default: run_tile<most_vectors>(memory, i, vector * lanes, first, end);
            }
        }
        for (int64_t row = first > pending_ ? first : pending_; row < end; ++row)
            write_out(memory.read + (row - first) * padded(shape_.value_dim), first_head() + i,
                      row);
    }

    // All rows of a block in the columns from `column`.
    template <int count>
    void run_tile(const Memory& memory, int64_t i, int64_t column, int64_t first,
                  int64_t end) const {
        const int64_t keys = padded(shape_.key_dim), values = padded(shape_.value_dim);
        float* tile = memory.states + keys * (i * values + column);
        if (first == 0) load_tile<count>(i, column, tile);
        for (int64_t row = first; row < end; ++row) {
            const int64_t place = row - first, at = i * memory.rows + place;
            advance<count>(tile, keys, memory.query + place * keys, memory.key + place * keys,
                           memory.value + at * values + column, memory.kept[at],
                           memory.strength[at], memory.read + place * values + column);
            if (row + 1 == save_) store_tile<count>(saved_, i, column, tile);
            if (row + 1 == taken_) store_tile<count>(slot_, i, column, tile);
        }
    }

    float* state(int64_t place, int64_t i, int64_t column) const {
        return cache_.states + place * cache_.state_stride +
               (first_head() + i) * shape_.key_dim * shape_.value_dim + column;
    }
    template <int count>
    void load_tile(int64_t i, int64_t column, float* tile) const {
        const float* from = state(slot_, i, column);
        const int64_t columns = shape_.value_dim - column;
        for (int64_t row = 0; row < padded(shape_.key_dim); ++row)
            for (int v = 0; v < count; ++v, tile += lanes)
                store(tile, row >= shape_.key_dim
                                ? zero()
                                : load_some(from + row * shape_.value_dim + v * lanes,
                                      columns - v * lanes));
    }
    template <int count>
    void store_tile(int64_t place, int64_t i, int64_t column, const float* tile) const {
        float* to = state(place, i, column);
        const int64_t columns = shape_.value_dim - column;
        for (int64_t row = 0; row < shape_.key_dim; ++row)
            for (int v = 0; v < count; ++v, tile += lanes)
                store_some(to + row * shape_.value_dim + v * lanes, load(tile), columns - v * lanes);
    }

    // What a row reads, normed and gated.
    void write_out(const float* read, int64_t head, int64_t row) const {
        const int64_t given = first_ + row - pending_, column = head * shape_.value_dim;
        const Number* z = static_cast<const Number*>(call_.z) + given * call_.z_stride + column;
        Number* out = static_cast<Number*>(call_.out) + given * call_.out_stride + column;
        F16 squares = zero();
        for (int64_t at = 0; at < shape_.value_dim; at += lanes) {
            const F16 part = load(read + at);
            squares = fma(part, part, squares);
        }
        const float mean = sum(squares) / static_cast<float>(shape_.value_dim);
        const F16 factor = broadcast(1.0f / __builtin_sqrtf(mean + shape_.eps));
        for (int64_t at = 0; at < shape_.value_dim; at += lanes) {
            const int64_t here = shape_.value_dim - at;
            const F16 normed = load(read + at) * factor * load_some(shape_.norm_weight + at, here);
            store_some(out + at, normed * silu(load_some(z + at, here)), here);
        }
    }

    // Windows and draft rows of this task's channels, for the next pass. Where old and new rows lie
    // in one place, each is read before it is overwritten.
    void keep_rows() const {
        if (save_ > 0) keep_window(saved_, save_);
        if (taken_ > 0) keep_window(slot_, taken_);
        const int64_t heads = shape_.num_value_heads;
        const int64_t drafted = least(num_rows_ - taken_, cache_.most_drafted);
        for (int64_t i = 0; i < drafted; ++i) {
            copy_channels(mixed(taken_ + i), static_cast<Number*>(cache_.drafted) +
                                                 slot_ * cache_.drafted_stride +
                                                 i * shape_.num_channels());
            const Number* from = gates(taken_ + i) + first_head();
            Number* to = static_cast<Number*>(cache_.drafted_gates) + slot_ * cache_.gates_stride +
                         i * 2 * heads + first_head();
            std::memcpy(to, from, shape_.repeats() * sizeof(Number));
            std::memcpy(to + heads, from + heads, shape_.repeats() * sizeof(Number));
        }
    }
    // The last rows of the first `count`.
    void keep_window(int64_t place, int64_t count) const {
        const int64_t rows = shape_.width - 1;
        for (int64_t i = 0; i < rows; ++i)
            copy_channels(mixed(count - rows + i), static_cast<Number*>(cache_.windows) +
                                                       place * cache_.window_stride +
                                                       i * shape_.num_channels());
    }
    void copy_channels(const Number* from, Number* to) const {
        const int64_t query = key_head_ * shape_.key_dim;
        const int64_t key = query + shape_.num_key_heads * shape_.key_dim;
        const int64_t value = value_channel(first_head());
        std::memcpy(to + query, from + query, shape_.key_dim * sizeof(Number));
        std::memcpy(to + key, from + key, shape_.key_dim * sizeof(Number));
        std::memcpy(to + value, from + value,
                    shape_.repeats() * shape_.value_dim * sizeof(Number));
    }

    const DeltaCall& call_;
    const DeltaShape& shape_;
    const DeltaCacheView& cache_;
    int64_t key_head_, first_, slot_, saved_;
    // Of `num_rows_`, the first `pending_` are replayed and the first `taken_` stay; the state
    // after `save_` of them is saved, if that is not 0.
    int64_t num_rows_, pending_, taken_, save_ = 0;
};

// A key head's channels are those of its value heads' alone, so tasks share nothing.
void run(const DeltaCall& call) {
    const int64_t heads = call.shape->num_key_heads;
    parallel_for(call.rows->num_requests * heads, [&](int64_t task) {
        if (call.is_bf16) Request<bf16>(call, task / heads, task % heads).run();
        else Request<float>(call, task / heads, task % heads).run();
    });
}

const DeltaKernels delta_here = {run};
const bool delta_entered = delta_kernels.enter(this_level, &delta_here);

}  // namespace
}  // namespace slipstream::SLIPSTREAM_LEVEL
