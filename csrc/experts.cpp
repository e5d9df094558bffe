#include "experts.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "bindings.h"
#include "buffer.h"
#include "matmul_pack.h"
#include "rows.h"
#include "threads.h"

namespace slipstream {
namespace {

// What a pass of some rows takes in between; more rows go in several, which read all weights anew.
constexpr int64_t most_bytes = int64_t{64} << 20;

Scores scores_of(const std::string& name) {
    if (name == "softmax") return Scores::softmax;
    if (name == "chosen_softmax") return Scores::chosen_softmax;
    require(name == "sigmoid", "no such scores of a router");
    return Scores::sigmoid;
}

}  // namespace

// Memory of a pass. Pairs of a row and an expert that it chose are sorted by the expert, then by
// the row: pair p is of row rows[p], and those of expert e are starts[e] .. starts[e + 1].
struct Experts::Space {
    float *logits, *choosing, *weights, *gate_up, *outputs, *shared;
    int32_t *chosen, *places, *rows, *starts;
    char *active, *end;

    // Space for `num_rows` rows, from `memory` on; if that is null, `end` is the size.
    Space(const Experts& of, char* memory, int64_t num_rows) : end(memory) {
        const Routing& routing = of.routing_;
        const int64_t pairs = num_rows * routing.num_chosen;
        const int64_t inner = of.down_.experts[0].columns;
        const int64_t shared_inner = of.shared_down_.weight ? of.shared_down_.columns() : 0;
        logits = take<float>(num_rows * of.router_.rows());
        choosing = take<float>(num_rows * 3 * routing.num_experts);
        weights = take<float>(pairs);
        chosen = take<int32_t>(pairs);
        places = take<int32_t>(pairs);
        rows = take<int32_t>(pairs);
        starts = take<int32_t>(routing.num_experts + 1);
        gate_up = take<float>(std::max(pairs * inner, num_rows * shared_inner) * 2);
        active = take<char>(std::max(pairs * inner, num_rows * shared_inner) * of.number_bytes());
        outputs = take<float>(pairs * of.width());
        shared = take<float>(shared_inner ? num_rows * of.width() : 0);
    }

  private:
    template <typename T>
    T* take(int64_t count) {
        T* begin = reinterpret_cast<T*>(end);
        end += (count * int64_t{sizeof(T)} + 63) / 64 * 64;
        return begin;
    }
};

Experts::Experts(bool is_bf16, const Routing& routing, const ProductObjects& router,
                 const std::optional<Array>& correction, const std::optional<Array>& gains,
                 const ProductObjects& gate_up, const ProductObjects& down,
                 const std::optional<std::pair<float, float>>& clamp,
                 const std::optional<std::pair<ProductObjects, ProductObjects>>& shared,
                 const std::string& activation)
    : type_(is_bf16 ? Number::bf16 : Number::f32), routing_(routing), router_(keep(router)),
      gate_up_(take_apart(gate_up)), down_(take_apart(down)), clamps_(clamp.has_value()),
      activation_(activation_named(activation)) {
    if (clamp) std::tie(limit_, alpha_) = *clamp;
    correction_ = keep_numbers(correction, "correction");
    gains_ = keep_numbers(gains, "gains");
    const Matrix &first = gate_up_.experts[0], &second = down_.experts[0];
    require(first.columns == width() && second.rows == width() && first.rows == 2 * second.columns &&
                router_.rows() >= routing.num_experts,
            "the matrices of experts do not fit each other");
    require(routing.num_chosen > 0 && routing.num_groups > 0 &&
                routing.num_experts % routing.num_groups == 0 &&
                routing.num_chosen <=
                    routing.num_experts / routing.num_groups * routing.kept_groups &&
                routing.kept_groups <= routing.num_groups,
            "rows choose more experts than there are");
    if (!shared) return;
    shared_gate_up_ = keep(shared->first);
    shared_down_ = keep(shared->second);
    require(shared_gate_up_.columns() == width() && shared_down_.rows() == width() &&
                shared_gate_up_.rows() == 2 * shared_down_.columns(),
            "the matrices of a shared expert do not fit");
}

const float* Experts::keep_numbers(const std::optional<Array>& numbers, const char* what) {
    if (!numbers) return nullptr;
    arrays_.push_back(*numbers);
    return dense<const float>(*numbers, {routing_.num_experts}, what);
}

Product Experts::keep(const ProductObjects& objects) {
    const auto& [weight, bias] = objects;
    kept_.push_back(weight);
    const Product product{&nb::cast<const Matrix&>(weight),
                          bias ? contiguous<const void>(*bias, type_, "bias") : nullptr};
    require(product.weight->takes(is_bf16()), "weights are in the type of the rows");
    if (!bias) return product;
    arrays_.push_back(*bias);
    require(static_cast<int64_t>(bias->size()) == product.rows(), "bias: [N]");
    return product;
}

Experts::Stack Experts::take_apart(const ProductObjects& objects) {
    const Product all = keep(objects);
    require(all.rows() % routing_.num_experts == 0, "experts have as many rows each");
    const int64_t rows = all.rows() / routing_.num_experts;
    Stack stack{{}, static_cast<const char*>(all.bias)};
    for (int64_t expert = 0; expert < routing_.num_experts; ++expert)
        // Blocks begin every 64 rows of the whole: experts of another size are copied.
        if (rows % block_rows == 0) {
            stack.experts.push_back(part_of(*all.weight, expert * rows, (expert + 1) * rows));
        } else {
            std::vector<int64_t> ids(rows);
            for (int64_t row = 0; row < rows; ++row) ids[row] = expert * rows + row;
            stack.experts.push_back(*select_rows(*all.weight, ids.data(), rows));
        }
    return stack;
}

void Experts::run(const char* x, int64_t num_rows, char* out) const {
    const int64_t row_bytes = reinterpret_cast<int64_t>(Space(*this, nullptr, 64).end) / 64;
    const int64_t most = std::max<int64_t>(1, most_bytes / row_bytes);
    for (int64_t row = 0; row < num_rows; row += most) {
        const int64_t place = row * width() * number_bytes();
        run_some(x + place, std::min(most, num_rows - row), out + place);
    }
}

void Experts::run_some(const char* x, int64_t num_rows, char* out) const {
    const int64_t bytes = reinterpret_cast<int64_t>(Space(*this, nullptr, num_rows).end);
    const Space space(*this, static_cast<char*>(scratch(Scratch::experts, bytes)), num_rows);
    const int64_t num_pairs = num_rows * routing_.num_chosen, inner = down_.experts[0].columns;
    route(space, x, num_rows);
    if (shared_down_.weight) {
        multiply(shared_gate_up_, x, num_rows, space.gate_up);
        gate(space.gate_up, num_rows, shared_down_.columns(), true, space.active);
        multiply(shared_down_, space.active, num_rows, space.shared);
    }
    multiply(gate_up_, space, x, true, space.gate_up);
    gate(space.gate_up, num_pairs, inner, false, space.active);
    multiply(down_, space, space.active, false, space.outputs);
    ExpertSumCall sum{};
    sum.is_bf16 = is_bf16();
    sum.num_rows = num_rows;
    sum.columns = width();
    sum.num_chosen = routing_.num_chosen;
    sum.outputs = space.outputs;
    sum.places = space.places;
    sum.weights = space.weights;
    sum.last = shared_down_.weight ? space.shared : nullptr;
    if (router_.rows() > routing_.num_experts) sum.last_gate = space.logits + routing_.num_experts;
    sum.last_gate_stride = router_.rows();
    sum.out = out;
    row_kernels.active().sum_experts(sum);
}

// Fills all but the products of `space`.
void Experts::route(const Space& space, const char* x, int64_t num_rows) const {
    multiply(router_, x, num_rows, space.logits);
    const int64_t num_experts = routing_.num_experts, num_chosen = routing_.num_chosen;
    const auto choose = [&](int64_t row) {
        int32_t* chosen = space.chosen + row * num_chosen;
        float* weights = space.weights + row * num_chosen;
        choose_experts(routing_, space.logits + row * router_.rows(), correction_,
                       space.choosing + row * 3 * num_experts, chosen, weights);
        if (!gains_) return;
        for (int64_t place = 0; place < num_chosen; ++place)
            weights[place] *= gains_[chosen[place]];
    };
    if (num_rows == 1) choose(0);
    else parallel_for(num_rows, choose);
    std::fill(space.starts, space.starts + num_experts + 1, 0);
    const int64_t pairs = num_rows * num_chosen;
    for (int64_t pair = 0; pair < pairs; ++pair) ++space.starts[space.chosen[pair]];
    int32_t before = 0;
    for (int64_t expert = 0; expert <= num_experts; ++expert)
        before += std::exchange(space.starts[expert], before);
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const int32_t place = space.starts[space.chosen[pair]]++;
        space.places[pair] = place;
        space.rows[place] = static_cast<int32_t>(pair / num_chosen);
    }
    // Each has gone on to where the next one began.
    for (int64_t expert = num_experts; expert > 0; --expert)
        space.starts[expert] = space.starts[expert - 1];
    space.starts[0] = 0;
}

// Of each expert its pairs' rows times its matrix. `gathers`: x has rows of the pass, not of pairs.
void Experts::multiply(const Stack& stack, const Space& space, const void* x, bool gathers,
                       float* out) const {
    const int64_t columns = stack.experts[0].columns, rows = stack.experts[0].rows;
    std::vector<MatmulCall> calls;
    for (int64_t expert = 0; expert < routing_.num_experts; ++expert) {
        const int64_t first = space.starts[expert], last = space.starts[expert + 1];
        if (first == last) continue;
        MatmulCall call{};
        call.weight = &stack.experts[expert];
        call.x = static_cast<const char*>(x) + (gathers ? 0 : first * columns * number_bytes());
        call.x_is_bf16 = is_bf16();
        call.num_rows = last - first;
        call.x_stride = columns;
        call.row_ids = gathers ? space.rows + first : nullptr;
        if (stack.biases) call.bias = stack.biases + expert * rows * number_bytes();
        call.out = out + first * rows;
        call.out_stride = rows;
        calls.push_back(call);
    }
    matmul(calls.data(), static_cast<int64_t>(calls.size()));
}

void Experts::multiply(const Product& product, const void* x, int64_t num_rows, float* out) const {
    MatmulCall call{};
    call.weight = product.weight;
    call.bias = product.bias;
    call.x = x;
    call.x_is_bf16 = is_bf16();
    call.num_rows = num_rows;
    call.x_stride = product.columns();
    call.out = out;
    call.out_stride = product.rows();
    matmul(call);
}

void Experts::gate(const float* gate_up, int64_t num_rows, int64_t columns, bool is_shared,
                   char* out) const {
    row_kernels.active().gate_experts(
        {is_bf16(), clamps_ && !is_shared, is_shared ? Activation::silu : activation_, limit_,
         alpha_, num_rows, columns, gate_up, out});
}

namespace {

void run_experts(const Experts& experts, const Array& x, const Array& out) {
    const Number type = experts.is_bf16() ? Number::bf16 : Number::f32;
    for (const Array* rows : {&x, &out})
        require(rows->ndim() == 2 && rows->shape(0) == x.shape(0) &&
                    static_cast<int64_t>(rows->shape(1)) == experts.width(),
                "x and out: [T, H]");
    const auto* from = contiguous<const char>(x, type, "x");
    auto* to = contiguous<char>(out, type, "out");
    nb::gil_scoped_release released;
    experts.run(from, static_cast<int64_t>(x.shape(0)), to);
}

}  // namespace

void bind_experts(nb::module_& module) {
    nb::class_<Routing>(module, "Routing")
        .def("__init__",
             [](Routing* routing, int num_experts, int num_chosen, const std::string& scores,
                bool normalised, float scale, int num_groups, int kept_groups) {
                 new (routing) Routing{num_experts, num_chosen, scores_of(scores), normalised,
                                       scale, num_groups, kept_groups};
             });
    nb::class_<Experts>(module, "Experts")
        .def(nb::init<bool, const Routing&, const ProductObjects&, const std::optional<Array>&,
                      const std::optional<Array>&, const ProductObjects&, const ProductObjects&,
                      const std::optional<std::pair<float, float>>&,
                      const std::optional<std::pair<ProductObjects, ProductObjects>>&,
                      const std::string&>(),
             nb::arg("is_bf16"), nb::arg("routing"), nb::arg("router"),
             nb::arg("correction").none(), nb::arg("gains").none(), nb::arg("gate_up"),
             nb::arg("down"), nb::arg("clamp").none(), nb::arg("shared").none(),
             nb::arg("activation"))
        .def("run", run_experts, nb::arg("x"), nb::arg("out"));
}

}  // namespace slipstream
