// Samples one token per row of logits: greedy, or from the tokens that the filters keep.
//
// Only candidates are sorted. For n candidates a threshold is taken from the n blocks with the
// largest maxima; all tokens that reach it are candidates.
#include <ATen/ops/empty.h>
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "operators.h"
#include "shares.h"
#include "vector.h"

// The index of the largest value.
namespace trident {

// Returns the first index of the largest of `size` > 0 values; NaN is larger than any number.
inline int64_t argmax_of(const float* x, int64_t size) {
  Vec most(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    most = at::vec::maximum(most, widen(x + i));  // propagates NaN
  }
  float lanes[W];
  most.store(lanes);
  const auto is_less = [](float a, float b) { return a < b || (b != b && a == a); };
  float largest = *std::max_element(lanes, lanes + W, is_less);
  for (; i < size; ++i) {
    largest = std::max(largest, x[i], is_less);
  }
  const auto is_it = [&](float value) {
    return value == largest || (value != value && largest != largest);
  };
  return std::find_if(x, x + size, is_it) - x;
}

}  // namespace trident

namespace trident::operators {
namespace {

constexpr int64_t kBlock = 64;      // tokens per stored maximum
constexpr int64_t kSumBlock = 1024;  // tokens per stored sum
constexpr int64_t kFirstLook = 64;  // candidates to start with if top_k is not set
constexpr int64_t kNextLook = 8;    // growth of the number of candidates
constexpr double kAlmost = 1 - 1e-6;  // of a mass counts as all: weights come from float32 logits

struct Filters {
  int64_t top_k;  // 0: none
  double top_p, min_p;
};

// Draws from one row at a time; its buffers are reused.
class Drawer {
 public:
  int64_t draw(
      const float* x, int64_t size, double temperature, const Filters& filters, double uniform) {
    if (!(temperature > 0.0)) {
      return argmax_of(x, size);
    }
    x_ = x;
    size_ = size;
    find_maxima();
    if (!std::isfinite(maximum_)) {
      return size - 1;  // NaN, or all forbidden: still return a token
    }
    // Beyond these bounds float32 underflows to 0 or overflows to infinity.
    per_temperature_ = static_cast<float>(1.0 / std::clamp(temperature, 1e-37, 1e37));
    if (filters.top_k > 0) {
      return draw_from_few(filters, 0.0, uniform);
    }
    const double mass = find_sums(static_cast<float>(filters.min_p));
    if (filters.top_p < 1.0) {
      return draw_from_few(filters, mass, uniform);
    }
    return draw_from_all(static_cast<float>(filters.min_p), uniform * mass);
  }

 private:
  struct Candidate {
    float logit;
    int32_t token;
  };

  // Relative to the most likely token.
  double weight(float logit) const {
    return std::exp(static_cast<double>((logit - maximum_) * per_temperature_));
  }
  Vec weights(Vec logits) const {
    return ((logits - Vec(maximum_)) * Vec(per_temperature_)).exp();
  }

  void find_maxima() {
    maxima_.clear();
    Vec all(-std::numeric_limits<float>::infinity());
    for (int64_t begin = 0; begin < size_; begin += kBlock) {
      const int64_t end = std::min(size_, begin + kBlock);
      Vec most(-std::numeric_limits<float>::infinity());
      int64_t i = begin;
      for (; i + W <= end; i += W) {
        most = at::vec::maximum(most, widen(x_ + i));  // propagates NaN
      }
      for (; i < end; ++i) {
        most = at::vec::maximum(most, Vec(x_[i]));
      }
      all = at::vec::maximum(all, most);
      maxima_.push_back(most.reduce_max());
    }
    float lanes[W];
    all.store(lanes);
    maximum_ = lanes[argmax_of(lanes, W)];
  }

  // Sums the weights that are at least `least` by blocks, and returns the total.
  double find_sums(float least) {
    sums_.clear();
    double total = 0.0;
    for (int64_t begin = 0; begin < size_; begin += kSumBlock) {
      const int64_t end = std::min(size_, begin + kSumBlock);
      Vec sum(0.0f);
      for (int64_t i = begin; i < end; i += W) {
        const int64_t n = std::min(W, end - i);
        Vec some = weights(widen(x_ + i, n));
        if (n < W) {
          some = Vec::set(Vec(0.0f), some, n);
        }
        sum += Vec::blendv(Vec(0.0f), some, some >= Vec(least));
      }
      sums_.push_back(sum_of_lanes(sum));
      total += sums_.back();
    }
    return total;
  }

  int64_t draw_from_all(float least, double target) const {
    int64_t block = 0, last = static_cast<int64_t>(sums_.size()) - 1;
    while (block < last && target >= sums_[block]) {
      target -= sums_[block++];
    }
    int64_t found = -1;
    for (int64_t i = block * kSumBlock; i < std::min(size_, (block + 1) * kSumBlock); ++i) {
      const double some = weight(x_[i]);
      if (some > 0.0 && some >= least) {
        found = i;
        target -= some;
        if (target < 0.0) {
          break;
        }
      }
    }
    // The block sums are rounded differently: a block may have mass there and no candidate here.
    return found < 0 ? argmax_of(x_, size_) : found;
  }

  // `mass` is the sum over all tokens that min_p keeps; with top_k it is computed here.
  int64_t draw_from_few(const Filters& filters, double mass, double uniform) {
    int64_t count = filters.top_k > 0 ? filters.top_k : kFirstLook;
    int64_t kept = 0;
    double kept_mass = 0.0;
    for (bool ended = false; !ended; count *= kNextLook) {
      find_candidates(count);
      int64_t most = candidates_.size();
      ended = most == size_;  // otherwise more tokens may be kept
      if (filters.top_k > 0) {
        most = std::min(most, filters.top_k);
        ended = true;
        mass = 0.0;
        for (int64_t i = 0; i < most && weight(candidates_[i].logit) >= filters.min_p; ++i) {
          mass += weight(candidates_[i].logit);
        }
      }
      kept_mass = 0.0;
      for (kept = 0; kept < most; ++kept) {
        const double some = weight(candidates_[kept].logit);
        const bool has_mass = filters.top_p < 1.0 && kept_mass >= filters.top_p * mass * kAlmost;
        if (some < filters.min_p || has_mass) {
          ended = true;
          break;
        }
        kept_mass += some;
      }
    }
    // In vocabulary order, as for rows without filters.
    std::sort(candidates_.begin(), candidates_.begin() + kept, [](const auto& a, const auto& b) {
      return a.token < b.token;
    });
    double target = uniform * kept_mass;
    int64_t i = 0;
    for (; i + 1 < kept; ++i) {
      target -= weight(candidates_[i].logit);
      if (target < 0.0) {
        break;
      }
    }
    return candidates_[i].token;
  }

  // Finds at least the `count` most likely tokens, sorted; ties by ascending index.
  void find_candidates(int64_t count) {
    float least = -std::numeric_limits<float>::infinity();
    if (count < static_cast<int64_t>(maxima_.size())) {
      ranked_ = maxima_;
      const auto place = ranked_.begin() + (count - 1);
      std::nth_element(ranked_.begin(), place, ranked_.end(), std::greater<float>());
      least = *place;
    }
    candidates_.clear();
    for (size_t block = 0; block < maxima_.size(); ++block) {
      if (maxima_[block] < least) {
        continue;
      }
      const int64_t begin = block * kBlock;
      for (int64_t i = begin; i < std::min(size_, begin + kBlock); ++i) {
        if (x_[i] >= least) {
          candidates_.push_back({x_[i], static_cast<int32_t>(i)});
        }
      }
    }
    std::sort(candidates_.begin(), candidates_.end(), [](const auto& a, const auto& b) {
      return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
    });
  }

  const float* x_;
  int64_t size_;
  float maximum_, per_temperature_;
  std::vector<float> maxima_, ranked_;
  std::vector<double> sums_;
  std::vector<Candidate> candidates_;
};

}  // namespace

Tensor draw(
    const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
    const Tensor& min_p, const Tensor& uniform) {
  const int64_t rows = logits.size(0), size = logits.size(1), stride = logits.stride(0);
  Tensor out = at::empty({rows}, logits.options().dtype(at::kLong));
  share_out(rows, [&] {
    return [&, drawer = Drawer()](int64_t row) mutable {
      const Filters filters{
          top_k.const_data_ptr<int32_t>()[row], top_p.const_data_ptr<double>()[row],
          min_p.const_data_ptr<double>()[row]};
      out.mutable_data_ptr<int64_t>()[row] = drawer.draw(
          logits.const_data_ptr<float>() + row * stride, size,
          temperature.const_data_ptr<double>()[row], filters,
          uniform.const_data_ptr<double>()[row]);
    };
  });
  return out;
}

}  // namespace trident::operators
