// Memory that kernels own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slipstream {

// Zeroed memory at the start of a cache line, in huge pages where it is large: a pass over weights
// touches every page once, so small pages would cost a look-up each.
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(size_t bytes);
    ~Buffer();
    Buffer(Buffer&& other) noexcept;
    Buffer& operator=(Buffer&& other) noexcept;

    char* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    char* data_ = nullptr;
    size_t size_ = 0, mapped_ = 0;
};

// Gives freed memory back to the system. Weights that were loaded and packed leave holes between
// small things, which the allocator would keep.
void give_back_memory();

// At least `bytes` of this thread's own, at the start of a cache line; valid until the thread's next
// call with the same `use`. Grows and is kept, so that steady passes allocate nothing.
enum class Scratch {
    input, sums, values, weights, attention, sampling, layer, experts, recurrence, latent, low_rank,
    count
};
void* scratch(Scratch use, size_t bytes);

}  // namespace slipstream
