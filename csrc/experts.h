// Mixtures of experts: a router, the matrices of all experts, and a shared expert.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "low_rank.h"
#include "matmul.h"
#include "routing.h"
#include "rows.h"
#include "tensor.h"

namespace slipstream {

using ProductObjects = std::pair<nb::object, std::optional<Array>>;

// A product's weight and bias, and the adapters that rows of a pass may add to it; null without.
struct Product {
    const Matrix* weight;
    const void* bias;
    const LowRankFactors* adapters = nullptr;

    int64_t rows() const { return weight->rows; }
    int64_t columns() const { return weight->columns; }
};

// Of rows of one type. See `ExpertsParts` in `slipstream/kernels/table.py`; the products of a shared
// expert and of its gate, which is one more row of the router's matrix, may be absent.
class Experts {
  public:
    Experts(bool is_bf16, const Routing& routing, const ProductObjects& router,
            const std::optional<Array>& correction, const std::optional<Array>& gains,
            const ProductObjects& gate_up, const ProductObjects& down,
            const std::optional<std::pair<float, float>>& clamp,
            const std::optional<std::pair<ProductObjects, ProductObjects>>& shared,
            const std::string& activation);

    bool is_bf16() const { return type_ == Number::bf16; }
    int64_t width() const { return router_.columns(); }
    // Normed rows x [num_rows, width] -> out, alike.
    void run(const char* x, int64_t num_rows, char* out) const;

  private:
    // All experts' matrices of one kind, one below the other, and their biases.
    struct Stack {
        std::vector<Matrix> experts;
        const char* biases;  // [E, rows], or null
    };
    struct Space;

    Product keep(const ProductObjects& objects);
    Stack take_apart(const ProductObjects& objects);
    void route(const Space& space, const char* x, int64_t num_rows) const;
    void multiply(const Stack& stack, const Space& space, const void* x, bool gathers,
                  float* out) const;
    void multiply(const Product& product, const void* x, int64_t num_rows, float* out) const;
    const float* keep_numbers(const std::optional<Array>& numbers, const char* what);
    void gate(const float* gate_up, int64_t num_rows, int64_t columns, bool is_shared,
              char* out) const;
    void run_some(const char* x, int64_t num_rows, char* out) const;
    int64_t number_bytes() const { return is_bf16() ? 2 : 4; }

    // What `keep` is given, so before all that it makes.
    std::vector<nb::object> kept_;
    std::vector<Array> arrays_;
    Number type_;
    Routing routing_;
    Product router_{}, shared_gate_up_{}, shared_down_{};
    const float *correction_ = nullptr, *gains_ = nullptr;
    Stack gate_up_, down_;
    bool clamps_;
    Activation activation_;
    float limit_ = 0.0f, alpha_ = 0.0f;
};

}  // namespace slipstream
