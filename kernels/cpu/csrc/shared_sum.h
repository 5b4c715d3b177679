// What the ranks of one model exchange, in memory that their processes share.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace trident {

// The ranks make the same calls in the same order. Each writes its part into one of its two halves,
// by turns, posts the number of the exchange, and reads the parts of the others when they have. A
// half is written again only when all have posted the next exchange, so that all have read it.
class SharedSum : public torch::CustomClassHolder {
 public:
  using Tensor = at::Tensor;

  // `file` is a memfd of at least `bytes(size)`, zeros at first. A call that waits `patience_s` for
  // another rank throws.
  SharedSum(int64_t file, int64_t rank, int64_t size, double patience_s);
  ~SharedSum() override;

  static int64_t bytes(int64_t size);

  // The sum of all ranks' x, in their order in float32 and rounded once to its dtype: the same bits
  // at every rank and for every size.
  Tensor sum(const Tensor& x);

  // The same of float32 x into `out`, for `count` values.
  template <typename T>
  void add(const float* x, T* out, int64_t count);

  // At rank 0 all ranks' float32 [rows, widths[rank]] beside each other; elsewhere x.
  Tensor gather(const Tensor& x, std::vector<int64_t> widths);

  // The values of rank 0, int64.
  Tensor share(const Tensor& values);

  // All ranks' values, int64 [n], as [size, n]. However long the others take.
  Tensor all(const Tensor& values);

  // Ends all waiting, here and at the other ranks, which throw.
  void abort();

  // Seconds that all calls so far have waited for other ranks.
  double wait_seconds() const;

 private:
  struct Header;

  template <typename In, typename Out>
  void add_all(const In* x, Out* out, int64_t count);
  template <typename In, typename Out>
  void add_chunk(const In* x, Out* out, int64_t count);
  char* half(int64_t rank) const;
  void begin();
  void wait_for(int64_t rank, uint32_t value, bool is_done, double patience_s);

  int64_t rank_, size_;
  double patience_s_;
  std::atomic<double> waited_s_ = 0.0;  // written by the one thread that makes exchanges
  uint32_t number_ = 0;  // of the present exchange
  char* memory_;
  Header* header_;
};

}  // namespace trident
