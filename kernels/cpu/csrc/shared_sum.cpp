#include "shared_sum.h"

#include <ATen/ops/empty.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <cstring>
#include <limits>

#include "kernels.h"
#include "projection.h"
#include "vector.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trident {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMostRanks = 16;
constexpr int64_t kHalfBytes = int64_t{4} << 20;
constexpr int64_t kHeaderBytes = 4096;
// From this size on each rank adds a slice and copies the others'.
constexpr int64_t kSlicedBytes = int64_t{64} << 10;
// A wait within a step is mostly shorter; longer ones leave the core to others.
constexpr std::chrono::microseconds kSpin{20};

struct alignas(64) Flag {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> num_waiting;
};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Whether `value` is at or after `wanted`, also when the numbers have wrapped around.
bool reached(uint32_t value, uint32_t wanted) {
  return static_cast<int32_t>(value - wanted) >= 0;
}

void futex_wake(Flag& flag) {
  syscall(SYS_futex, &flag.value, FUTEX_WAKE, kMostRanks, nullptr, nullptr, 0);
}

}  // namespace

struct SharedSum::Header {
  Flag arrived[kMostRanks];
  Flag done[kMostRanks];
  std::atomic<uint32_t> is_aborted;
};

int64_t SharedSum::bytes(int64_t size) {
  return kHeaderBytes + 2 * size * kHalfBytes;
}

SharedSum::SharedSum(int64_t file, int64_t rank, int64_t size, double patience_s)
    : rank_(rank), size_(size), patience_s_(patience_s) {
  static_assert(sizeof(Header) <= kHeaderBytes);
  TORCH_CHECK(size <= kMostRanks, "at most ", kMostRanks, " ranks (got ", size, ")");
  void* const memory = mmap(
      nullptr, bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, static_cast<int>(file), 0);
  TORCH_CHECK(memory != MAP_FAILED, "no memory to share with other ranks");
  memory_ = static_cast<char*>(memory);
  header_ = reinterpret_cast<Header*>(memory_);
}

SharedSum::~SharedSum() {
  munmap(memory_, bytes(size_));
}

char* SharedSum::half(int64_t rank) const {
  return memory_ + kHeaderBytes + (2 * rank + (number_ & 1)) * kHalfBytes;
}

void SharedSum::abort() {
  header_->is_aborted.store(1);
  for (int64_t rank = 0; rank < size_; ++rank) {
    futex_wake(header_->arrived[rank]);
    futex_wake(header_->done[rank]);
  }
}

double SharedSum::wait_seconds() const {
  return waited_s_.load();
}

namespace {

void post_to(Flag& flag, uint32_t value) {
  flag.value.store(value, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (flag.num_waiting.load(std::memory_order_relaxed) > 0) {
    futex_wake(flag);
  }
}

// Returns whether the flag came to `wanted` before the deadline; throws after `abort`.
bool wait_until(
    Flag& flag, uint32_t wanted, const std::atomic<uint32_t>& is_aborted, Clock::time_point begin,
    double patience_s) {
  do {
    for (int i = 0; i < 64; ++i) {
      if (reached(flag.value.load(std::memory_order_acquire), wanted)) {
        return true;
      }
      pause();
    }
  } while (Clock::now() - begin < kSpin);
  flag.num_waiting.fetch_add(1);
  bool has_come = false;
  while (true) {
    const uint32_t now = flag.value.load(std::memory_order_acquire);
    has_come = reached(now, wanted);
    const std::chrono::duration<double> waited = Clock::now() - begin;
    if (has_come || is_aborted.load() || waited.count() > patience_s) {
      break;
    }
    const timespec tick{0, 200'000'000};  // `abort` may come just before the wait
    syscall(SYS_futex, &flag.value, FUTEX_WAIT, now, &tick, nullptr, 0);
  }
  flag.num_waiting.fetch_sub(1);
  TORCH_CHECK(has_come || !is_aborted.load(), "another rank of the model has ended");
  return has_come;
}

}  // namespace

void SharedSum::wait_for(int64_t rank, uint32_t value, bool is_done, double patience_s) {
  Flag& flag = (is_done ? header_->done : header_->arrived)[rank];
  if (reached(flag.value.load(std::memory_order_acquire), value)) {
    return;
  }
  const auto begin = Clock::now();
  const bool has_come = wait_until(flag, value, header_->is_aborted, begin, patience_s);
  const std::chrono::duration<double> waited = Clock::now() - begin;
  waited_s_.store(waited_s_.load() + waited.count());
  TORCH_CHECK(
      has_come, "rank ", rank, " did not come to exchange ", value, " of the model's ranks within ",
      patience_s, " s");
}

void SharedSum::begin() {
  ++number_;
  for (int64_t rank = 0; rank < size_; ++rank) {
    wait_for(rank, number_ - 1, false, patience_s_);
  }
}

template <typename In, typename Out>
void SharedSum::add_chunk(const In* x, Out* out, int64_t count) {
  begin();
  float* const own = reinterpret_cast<float*>(half(rank_));
  for (int64_t i = 0; i < count; i += W) {
    const int64_t n = std::min(W, count - i);
    widen(x + i, n).store(own + i, static_cast<int>(n));
  }
  post_to(header_->arrived[rank_], number_);
  const float* parts[kMostRanks];
  for (int64_t rank = 0; rank < size_; ++rank) {
    wait_for(rank, number_, false, patience_s_);
    parts[rank] = reinterpret_cast<const float*>(half(rank));
  }
  const auto total = [&](int64_t i, int64_t n) {
    Vec sum = widen(parts[0] + i, n);
    for (int64_t rank = 1; rank < size_; ++rank) {
      sum = sum + widen(parts[rank] + i, n);
    }
    return sum;
  };
  if (count * static_cast<int64_t>(sizeof(float)) < kSlicedBytes) {
    for (int64_t i = 0; i < count; i += W) {
      const int64_t n = std::min(W, count - i);
      store(out + i, total(i, n), n);
    }
    return;
  }
  // Others read their own slices of this part, and this rank's slice when it is done.
  const int64_t slice = (count / size_ + W) / W * W;
  const auto end_of = [&](int64_t rank) { return std::min(count, slice * (rank + 1)); };
  const int64_t begin_own = std::min(count, slice * rank_);
  for (int64_t i = begin_own; i < end_of(rank_); i += W) {
    const int64_t n = std::min(W, end_of(rank_) - i);
    total(i, n).store(own + i, static_cast<int>(n));
  }
  post_to(header_->done[rank_], number_);
  for (int64_t rank = 0; rank < size_; ++rank) {
    wait_for(rank, number_, true, patience_s_);
    for (int64_t i = std::min(count, slice * rank); i < end_of(rank); i += W) {
      const int64_t n = std::min(W, end_of(rank) - i);
      store(out + i, widen(parts[rank] + i, n), n);
    }
  }
}

template <typename In, typename Out>
void SharedSum::add_all(const In* x, Out* out, int64_t count) {
  constexpr int64_t kChunk = kHalfBytes / static_cast<int64_t>(sizeof(float));
  for (int64_t i = 0; i < count; i += kChunk) {
    add_chunk(x + i, out + i, std::min(kChunk, count - i));
  }
}

template <typename T>
void SharedSum::add(const float* x, T* out, int64_t count) {
  add_all(x, out, count);
}

#define INSTANTIATE(T) template void SharedSum::add(const float*, T*, int64_t);
TRIDENT_FOR_EACH_DTYPE(INSTANTIATE)

SharedSum::Tensor SharedSum::sum(const Tensor& x) {
  const Tensor flat = x.contiguous();
  Tensor out = at::empty(flat.sizes(), flat.options());
  for_dtype(flat, [&](auto zero) {
    using T = decltype(zero);
    add_all(flat.const_data_ptr<T>(), out.mutable_data_ptr<T>(), flat.numel());
  });
  return out;
}

SharedSum::Tensor SharedSum::gather(const Tensor& x, std::vector<int64_t> widths) {
  const Tensor own = x.contiguous();
  const int64_t rows = own.size(0), widest = *std::max_element(widths.begin(), widths.end());
  int64_t total = 0;
  for (const int64_t width : widths) {
    total += width;
  }
  constexpr int64_t kFloat = sizeof(float);
  const int64_t most_rows = kHalfBytes / kFloat / widest;
  TORCH_CHECK(most_rows > 0, "a rank has too many tokens of the vocabulary: ", widest);
  Tensor out = rank_ == 0 ? at::empty({rows, total}, own.options()) : own;
  for (int64_t first = 0; first < rows; first += most_rows) {
    const int64_t count = std::min(most_rows, rows - first);
    begin();
    const float* const mine = own.const_data_ptr<float>() + first * own.size(1);
    if (rank_ != 0) {
      std::memcpy(half(rank_), mine, count * own.size(1) * kFloat);
      post_to(header_->arrived[rank_], number_);
      continue;
    }
    float* to = out.mutable_data_ptr<float>() + first * total;
    for (int64_t rank = 0; rank < size_; ++rank) {
      if (rank != 0) {
        wait_for(rank, number_, false, patience_s_);
      }
      const float* const from =
          rank == 0 ? mine : reinterpret_cast<const float*>(half(rank));
      for (int64_t row = 0; row < count; ++row) {
        std::memcpy(to + row * total, from + row * widths[rank], widths[rank] * kFloat);
      }
      to += widths[rank];
    }
    post_to(header_->arrived[0], number_);
  }
  return out;
}

SharedSum::Tensor SharedSum::share(const Tensor& values) {
  const int64_t bytes = values.numel() * static_cast<int64_t>(sizeof(int64_t));
  TORCH_CHECK(bytes <= kHalfBytes && values.is_contiguous(), "share: too many values");
  begin();
  if (rank_ == 0) {
    std::memcpy(half(0), values.const_data_ptr<int64_t>(), bytes);
    post_to(header_->arrived[0], number_);
    return values;
  }
  wait_for(0, number_, false, patience_s_);
  Tensor out = at::empty(values.sizes(), values.options());
  std::memcpy(out.mutable_data_ptr<int64_t>(), half(0), bytes);
  post_to(header_->arrived[rank_], number_);
  return out;
}

SharedSum::Tensor SharedSum::all(const Tensor& values) {
  const int64_t bytes = values.numel() * static_cast<int64_t>(sizeof(int64_t));
  TORCH_CHECK(bytes <= kHalfBytes && values.is_contiguous(), "all: too many values");
  constexpr double kForever = std::numeric_limits<double>::infinity();
  ++number_;
  for (int64_t rank = 0; rank < size_; ++rank) {
    wait_for(rank, number_ - 1, false, kForever);
  }
  std::memcpy(half(rank_), values.const_data_ptr<int64_t>(), bytes);
  post_to(header_->arrived[rank_], number_);
  Tensor out = at::empty({size_, values.numel()}, values.options());
  for (int64_t rank = 0; rank < size_; ++rank) {
    wait_for(rank, number_, false, kForever);
    std::memcpy(
        out.mutable_data_ptr<int64_t>() + rank * values.numel(), half(rank), bytes);
  }
  return out;
}

}  // namespace trident
