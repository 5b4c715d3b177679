// Forbids the tokens of each row that top-n-sigma drops, then those that typical-p drops of the
// rest: it keeps the tokens nearest to the expected logit.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "operators.h"
#include "shares.h"
#include "vector.h"

namespace trident::operators {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kNegligible = 0x1p-40f;  // a weight that counts for nothing

// Truncates one row at a time; its buffers are reused.
class Truncator {
 public:
  void truncate(float* x, int64_t size, float temperature, float sigmas, float typical_p) {
    if (!(temperature > 0.0f) || !(sigmas > 0.0f || typical_p < 1.0f)) {
      return;
    }
    clean(x, size);
    if (peak_ == kForbidden) {
      return;
    }
    const float floor = sigmas > 0.0f ? floor_of(x, size, sigmas) : kForbidden;
    float centre = peak_, radius = std::numeric_limits<float>::infinity();
    if (typical_p < 1.0f) {
      weigh(x, size, floor, 1.0f / std::clamp(temperature, 1e-37f, 1e37f));
      centre = expected(x, size);
      radius = radius_of(x, size, centre, typical_p);
    }
    for (int64_t i = 0; i < size; ++i) {
      if (!(x[i] >= floor && std::abs(x[i] - centre) <= radius)) {
        x[i] = kForbidden;
      }
    }
  }

 private:
  // NaN becomes -inf and infinity the largest float. Finds the peak.
  void clean(float* x, int64_t size) {
    peak_ = kForbidden;
    for (int64_t i = 0; i < size; ++i) {
      x[i] = std::isnan(x[i]) ? kForbidden : std::min(x[i], kLargest);
      peak_ = std::max(peak_, x[i]);
    }
  }

  // The lowest logit within `sigmas` standard deviations of the peak.
  float floor_of(const float* x, int64_t size, double sigmas) const {
    double sum = 0.0, squares = 0.0;
    int64_t count = 0;
    for (int64_t i = 0; i < size; ++i) {
      const bool possible = x[i] > kForbidden;
      const double value = possible ? x[i] : 0.0;
      count += possible;
      sum += value;
      squares += value * value;
    }
    const double mean = sum / count;
    return static_cast<float>(
        peak_ - sigmas * std::sqrt(std::max(0.0, squares / count - mean * mean)));
  }

  // Weights relative to the most likely token; 0 below `floor`.
  void weigh(const float* x, int64_t size, float floor, float per_temperature) {
    weights_.resize(size);
    for (int64_t i = 0; i < size; i += W) {
      const int64_t n = std::min(W, size - i);
      const Vec logits = widen(x + i, n);
      const Vec some = ((logits - Vec(peak_)) * Vec(per_temperature)).exp();
      store<float>(&weights_[i], Vec::blendv(Vec(0.0f), some, logits >= Vec(floor)), n);
    }
  }

  float expected(const float* x, int64_t size) {
    double moment = 0.0;
    total_ = 0.0;
    for (int64_t i = 0; i < size; ++i) {
      const double weight = weights_[i];
      total_ += weight;
      moment += weight > 0.0 ? weight * (static_cast<double>(x[i]) - peak_) : 0.0;
    }
    return static_cast<float>(peak_ + moment / total_);
  }

  // The smallest distance from `centre` within which tokens have the share `typical_p`.
  float radius_of(const float* x, int64_t size, float centre, double typical_p) {
    candidates_.clear();
    for (int64_t i = 0; i < size; ++i) {
      if (weights_[i] >= kNegligible) {
        candidates_.push_back({std::abs(x[i] - centre), weights_[i]});
      }
    }
    double target = typical_p * total_;
    auto first = candidates_.begin(), end = candidates_.end();
    while (end - first > 1) {
      const auto middle = first + (end - first) / 2;
      std::nth_element(first, middle, end, [](const auto& a, const auto& b) {
        return a.distance < b.distance;
      });
      double nearer = 0.0;
      for (auto it = first; it != middle; ++it) {
        nearer += it->weight;
      }
      if (nearer >= target) {
        end = middle;
      } else {
        target -= nearer;
        first = middle;
      }
    }
    return first->distance;
  }

  struct Candidate {
    float distance, weight;
  };

  float peak_;
  double total_;
  std::vector<float> weights_;
  std::vector<Candidate> candidates_;
};

}  // namespace

void truncate(
    Tensor logits, const Tensor& temperature, const Tensor& top_n_sigma, const Tensor& typical_p) {
  const int64_t size = logits.size(1);
  float* x = logits.mutable_data_ptr<float>();
  share_out(logits.size(0), [&] {
    return [&, truncator = Truncator()](int64_t row) mutable {
      truncator.truncate(
          x + row * size, size, temperature.const_data_ptr<float>()[row],
          top_n_sigma.const_data_ptr<float>()[row], typical_p.const_data_ptr<float>()[row]);
    };
  });
}

}  // namespace trident::operators
