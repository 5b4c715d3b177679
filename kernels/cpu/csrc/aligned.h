// Uninitialised memory, aligned to cache lines.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace trident {

struct Free {
  void operator()(void* memory) const {
    std::free(memory);
  }
};
template <typename T>
using Aligned = std::unique_ptr<T[], Free>;

template <typename T>
Aligned<T> aligned(int64_t count) {
  const int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, bytes);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return Aligned<T>(static_cast<T*>(memory));
}

}  // namespace trident
