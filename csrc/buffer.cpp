#include "buffer.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace slipstream {
namespace {

constexpr size_t line = 64, huge_page = size_t{2} << 20;

// What Python tells of a lack of memory.
class NoMemory : public std::bad_alloc {
  public:
    explicit NoMemory(size_t bytes) {
        std::snprintf(words_, sizeof words_,
                      "the system has no room for %zu MB that the CPU kernels asked for", bytes >> 20);
    }
    const char* what() const noexcept override { return words_; }

  private:
    char words_[96];
};

// Tells AddressSanitizer that the memory after the requested bytes may not be used.
void end_at(char* data, size_t bytes, size_t size) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(data, bytes);
    ASAN_POISON_MEMORY_REGION(data + bytes, size - bytes);
#else
    (void)data, (void)bytes, (void)size;
#endif
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

Buffer::Buffer(size_t bytes) : size_(bytes) {
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
    if (bytes >= huge_page) {
        mapped_ = round_up(bytes, huge_page);
        void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                            -1, 0);
        if (memory == MAP_FAILED) throw NoMemory(bytes);
        madvise(memory, mapped_, MADV_HUGEPAGE);
        data_ = static_cast<char*>(memory);
        return;
    }
#endif
    const size_t padded = round_up(bytes ? bytes : 1, line);
    data_ = static_cast<char*>(std::aligned_alloc(line, padded));
    if (!data_) throw NoMemory(bytes);
    std::memset(data_, 0, padded);
    end_at(data_, bytes, padded);
}

Buffer::~Buffer() {
#if defined(__linux__)
    if (mapped_) {
        munmap(data_, mapped_);
        return;
    }
#endif
    std::free(data_);
}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(mapped_, other.mapped_);
    return *this;
}

void give_back_memory() {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}

void* scratch(Scratch use, size_t bytes) {
    thread_local Buffer kept[static_cast<int>(Scratch::count)];
    Buffer& buffer = kept[static_cast<int>(use)];
    if (buffer.size() < bytes) buffer = Buffer(bytes + bytes / 4);
    end_at(buffer.data(), bytes, buffer.size());
    return buffer.data();
}

}  // namespace slipstream
