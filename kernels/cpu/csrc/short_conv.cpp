// LFM2's short convolution: C * conv(B * x).
#include <ATen/Parallel.h>

#include <algorithm>

#include "aligned.h"
#include "kernels.h"
#include "states.h"
#include "vector.h"

namespace trident {
namespace {

constexpr int64_t kChannels = 128;  // of a task
constexpr int64_t kTokens = 32;     // whose inputs are computed before they are convolved

// The convolution's input at a token of the step, rounded as the ring has it.
template <typename T>
Vec gated_input(const ShortConv<T>& a, int64_t token, int64_t channel, int64_t n) {
  const T* const inner = a.projected + token * a.projected_stride + channel;
  return rounded<T>(widen(inner, n) * widen(inner + 2 * a.rings.channels, n));
}

// `inputs` has room for kTokens + kernel_size - 1 tokens of kChannels.
template <typename T>
void convolve_row(
    const ShortConv<T>& a, const StateRow& row, int64_t first, int64_t count, float* inputs) {
  const int64_t before = a.kernel_size - 1, channels = a.rings.channels;
  const auto for_vectors = [&](auto run) {
    for (int64_t i = 0; i < count; i += W) {
      run(i, std::min(W, count - i));
    }
  };
  for (int64_t j = 0; j < before; ++j) {
    const T* const from = a.rings.before(row, row.start - before + j) + first;
    float* const to = inputs + j * kChannels;
    for_vectors([&](int64_t i, int64_t n) { widen(from + i, n).store(to + i); });
  }
  for (int64_t done = 0; done < row.size; done += kTokens) {
    const int64_t tokens = std::min(kTokens, row.size - done), token = row.begin + done;
    for (int64_t t = 0; t < tokens; ++t) {
      for_vectors([&](int64_t i, int64_t n) {
        const Vec input = gated_input(a, token + t, first + i, n);
        input.store(inputs + (before + t) * kChannels + i);
      });
    }
    for_vectors([&](int64_t i, int64_t n) {
      const Vec bias = a.bias == nullptr ? Vec(0.0f) : widen(a.bias + first + i, n);
      for (int64_t t = 0; t < tokens; ++t) {
        Vec sum(0.0f);
        for (int64_t j = 0; j < a.kernel_size; ++j) {
          const Vec tap = widen(a.weight + j * channels + first + i, n);
          sum = at::vec::fmadd(tap, Vec::loadu(inputs + (t + j) * kChannels + i), sum);
        }
        const T* const gate = a.projected + (token + t) * a.projected_stride + channels + first + i;
        T* const out = a.out + (token + t) * channels + first + i;
        store(out, widen(gate, n) * rounded<T>(sum + bias), n);
      }
    });
    std::memmove(inputs, inputs + tokens * kChannels, before * kChannels * sizeof(float));
  }
}

}  // namespace

template <typename T>
void short_conv(const ShortConv<T>& a) {
  const std::vector<StateRow> rows = active_rows(a.step);
  const int64_t count = rows.size(), channels = a.rings.channels;
  zero_idle(rows, a.out, a.tokens, channels);
  if (count == 0) {
    return;
  }
  // Rows of any lengths are shared out evenly, since each thread has some channels of most rows.
  const int64_t blocks = (channels + kChannels - 1) / kChannels;
  const int64_t per_task = (a.tokens + count - 1) / count * kChannels;
  at::parallel_for(0, blocks * count, grain(per_task), [&](int64_t begin, int64_t end) {
    const auto inputs = aligned<float>((kTokens + a.kernel_size - 1) * kChannels);
    for (int64_t i = begin; i < end; ++i) {
      const StateRow& row = rows[i % count];
      const int64_t first = i / count * kChannels;
      const int64_t size = std::min(kChannels, channels - first);
      convolve_row(a, row, first, size, inputs.get());
      a.rings.store(a.step, row, first, size, [&](int64_t token, T* to) {
        for (int64_t c = 0; c < size; c += W) {
          const int64_t n = std::min(W, size - c);
          store(to + c, gated_input(a, row.begin + token, first + c, n), n);
        }
      });
    }
  });
}

#define INSTANTIATE(T) template void short_conv(const ShortConv<T>&);
TRIDENT_FOR_EACH_DTYPE(INSTANTIATE)

}  // namespace trident
