// The online softmax down the lanes of registers. For attention_tiles.h and attention_groups.h alone.
#pragma once

#include "amx.h"

#ifdef TRIDENT_TILES
#include <algorithm>
#include <cstdint>

#include "attention_tasks.h"
#include "exponential.h"
#include "kernels.h"

namespace trident {
namespace {

// Two vectors of weights as pairs of bfloat16: lane i has those of lane i.
inline Vec interleaved(Vec first, Vec second) {
  const __m512i order = _mm512_set_epi16(
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
      3, 18, 2, 17, 1, 16, 0);
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both));
}

// Turns the scores of 16 queries for `count` keys, of which each has a row of STRIDE floats, into
// weights. `own` are the queries' positions, counted from the first key, and `maximum` the largest
// scores so far.
template <typename T, int64_t STRIDE>
class ColumnSoftmax {
 public:
  ColumnSoftmax(
      const PagedAttention<T>& a, float* scores, int64_t count, __m512i own, float* maximum)
      : scores_(scores), count_(count), scale_(limit(a, own) ? 1.0f : a.scale), sum_(0.0f) {
    before_ = Vec::loadu(maximum);
    Vec most[4] = {Vec(kNothing), Vec(kNothing), Vec(kNothing), Vec(kNothing)};
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; ++i) {
        most[i] = _mm512_max_ps(Vec::loadu(scores + (j + i) * STRIDE), most[i]);
      }
    }
    for (; j < count; ++j) {
      most[0] = _mm512_max_ps(Vec::loadu(scores + j * STRIDE), most[0]);
    }
    const Vec most_of_all =
        _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
    const Vec largest = _mm512_max_ps(most_of_all * scale_, before_);
    // What has seen no key yet has no maximum.
    const __mmask16 none = _mm512_cmp_ps_mask(largest, Vec(kNothing), _CMP_EQ_OQ);
    shift_ = _mm512_mask_mov_ps(largest, none, Vec(0.0f));
    power_scale_ = scale_ * Vec(kLog2OfE);
    power_shift_ = shift_ * Vec(kLog2OfE);
    largest.store(maximum);
  }

  // The weights of key j, which counts for the sums; 0 from `count` on. To be called once per key.
  Vec weight(int64_t j) {
    if (j >= count_) {
      return Vec(0.0f);
    }
    const Vec score = Vec::loadu(scores_ + j * STRIDE);
    const Vec weight = power_of_two(Vec(_mm512_fmsub_ps(score, power_scale_, power_shift_)));
    sum_ = sum_ + weight;
    return weight;
  }

  // Adds the weights to the sums so far, and returns the factors of what has been added before.
  Vec finish(float* sum) const {
    const Vec keep = (before_ - shift_).exp();
    (Vec::loadu(sum) * keep + sum_).store(sum);
    return keep;
  }

 private:
  // Gives keys that a query does not see the score -inf, and scales all where the weights' own scaling
  // would not do; returns whether it did. A score must not be rounded in one way where there are such
  // keys and in another where there are none: that depends on the other queries.
  bool limit(const PagedAttention<T>& a, __m512i own) {
    const int64_t window = a.window == 0 ? kNoWindow : a.window;
    const __m512i before = _mm512_sub_epi32(own, _mm512_set1_epi32(static_cast<int32_t>(window)));
    const auto seen = [&](int64_t j) {
      const __m512i key = _mm512_set1_epi32(static_cast<int32_t>(j));
      return _mm512_cmple_epi32_mask(key, own) & _mm512_cmpgt_epi32_mask(key, before);
    };
    const bool is_scaled = a.soft_cap > 0 || !(a.scale > 0);
    if (!is_scaled && (seen(0) & seen(count_ - 1)) == 0xffff) {
      return false;
    }
    for (int64_t j = 0; j < count_; ++j) {
      Vec score = Vec::loadu(scores_ + j * STRIDE);
      if (is_scaled) {
        score = score * Vec(a.scale);
      }
      if (a.soft_cap > 0) {
        const Vec cap(a.soft_cap);
        score = (score / cap).tanh() * cap;
      }
      Vec(_mm512_mask_mov_ps(Vec(kNothing), seen(j), score)).store(scores_ + j * STRIDE);
    }
    return is_scaled;
  }

  static constexpr int64_t kNoWindow = 1 << 30;

  float* scores_;
  int64_t count_;
  Vec scale_, before_, shift_, power_scale_, power_shift_, sum_;
};

}  // namespace
}  // namespace trident
#endif
