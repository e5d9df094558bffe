// Several products as one stream of weights. Compiled for each level, after the header that defines
// `ProductUnit`.
#pragma once

#include "matmul_rows.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// Calls and their rows, in the form that the kernels take.
template <typename Rows>
class Calls {
  public:
    Calls(const MatmulCall* calls, int64_t count) : calls_(calls), count_(count) {
        const int64_t header = (count * int64_t{sizeof(Rows) + 8} + 63) / 64 * 64;
        int64_t total = header;
        for (int64_t i = 0; i < count; ++i) total += repeats(i) ? 0 : Rows::bytes(calls[i]);
        char* memory = static_cast<char*>(scratch(Scratch::input, total));
        rows_ = reinterpret_cast<Rows*>(memory);
        ends_ = reinterpret_cast<int64_t*>(rows_ + count);
        memory += header;
        int64_t num_rows = 0;
        for (int64_t i = 0; i < count; ++i) {
            if (repeats(i)) {
                rows_[i] = rows_[i - 1];
            } else {
                rows_[i] = Rows::lay_out(calls[i], memory);
                memory += Rows::bytes(calls[i]);
                num_rows += calls[i].num_rows;
            }
            ends_[i] = num_rows;
        }
        for_rows(num_rows, calls[0].weight->columns, [&](int64_t row) {
            const int64_t i = holder(row);
            rows_[i].fill(calls_[i], row - start(i));
        });
    }

    const Rows& rows(int64_t index) const { return rows_[index]; }

    // Lines first .. first + count of a call's rows times a block of its weight.
    struct Part {
        const MatmulCall& call;
        const Rows& rows;
        int64_t block, first, count;
    };

    // Calls work(part, unit) for all parts of all products.
    template <typename Work>
    void for_parts(Work&& work) const {
        int64_t tasks = 0;
        for (int64_t i = 0; i < count_; ++i) {
            const int64_t count = rows_[i].num_lines(), most = lines_per_task(i);
            ends_[i] = tasks += calls_[i].weight->num_blocks() * ((count + most - 1) / most);
        }
        parallel_for(tasks, [&](int64_t task) {
            const int64_t i = holder(task), blocks = calls_[i].weight->num_blocks();
            const int64_t most = lines_per_task(i);
            task -= start(i);
            const int64_t first = task / blocks * most, left = rows_[i].num_lines() - first;
            ProductUnit unit;
            work(Part{calls_[i], rows_[i], task % blocks, first, left < most ? left : most}, unit);
        });
    }

  private:
    // Whether a call is made of the rows of the call before it.
    bool repeats(int64_t index) const {
        if (!index) return false;
        const MatmulCall &one = calls_[index - 1], &other = calls_[index];
        if (one.x != other.x || one.num_rows != other.num_rows || !one.row_ids || !other.row_ids)
            return false;
        return !std::memcmp(one.row_ids, other.row_ids, one.num_rows * sizeof(int32_t));
    }

    // Lines that a task multiplies by a block: all when they are few; whole rows and whole tiles.
    int64_t lines_per_task(int64_t index) const {
        constexpr int64_t resident_bytes = 768 << 10;  // stay in the second cache as blocks pass
        constexpr int64_t unit = 96;  // of 32 lines, and of rows of 1, 2 or 3 lines
        const int64_t most = resident_bytes / rows_[index].line_bytes() / unit * unit;
        return most < unit ? unit : most;
    }

    // The call to which a row or a task belongs: the first that ends after it.
    int64_t holder(int64_t index) const {
        int64_t low = 0, high = count_ - 1;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (ends_[middle] > index) high = middle;
            else low = middle + 1;
        }
        return low;
    }
    int64_t start(int64_t index) const { return index ? ends_[index - 1] : 0; }

    const MatmulCall* calls_;
    const int64_t count_;
    Rows* rows_;
    int64_t* ends_;  // of each call's rows, then of its tasks, among those of all
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
