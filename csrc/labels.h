// Names of what happens in C++ for torch's profiler, which sees nothing of it.
#pragma once

#include <nanobind/nanobind.h>

namespace slipstream {

namespace nb = nanobind;

// Opens ranges by a Python function, name -> function that ends the range; none: no profiler runs.
// Construct and destroy it with the GIL held; ranges take the GIL themselves.
class Labels {
  public:
    explicit Labels(nb::object open) : open_(std::move(open)), is_on_(!open_.is_none()) {}

    class Range {
      public:
        Range(const Labels& labels, const char* name) : is_on_(labels.is_on_) {
            if (!is_on_) return;
            nb::gil_scoped_acquire held;
            end_ = labels.open_(name);
        }
        ~Range() {
            if (!is_on_) return;
            nb::gil_scoped_acquire held;
            try {
                end_();
            } catch (nb::python_error& error) {
                error.discard_as_unraisable("the end of a profiler's range");
            }
            end_.reset();
        }
        Range(const Range&) = delete;
        Range& operator=(const Range&) = delete;

      private:
        const bool is_on_;
        nb::object end_;
    };

  private:
    nb::object open_;
    bool is_on_;
};

}  // namespace slipstream
