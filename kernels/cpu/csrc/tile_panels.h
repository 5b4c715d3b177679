// The panels of a product on AMX: as they are stored, or integers in groups as bfloat16. For
// tile_block.h, linear_products.h and experts.cpp alone.
//
// Integers of a group of 32 inputs are half a tile deep: the unit does no more with an instruction
// than for bfloat16, and vectors must scale each sum (linear_products.h). Many rows are faster with
// weights widened once for all of them, in the L1 cache, and need not be quantised.
#pragma once

#include "scaled_groups.h"
#include "tile_steps.h"

#ifdef TRIDENT_TILES

namespace trident {
namespace {

// Steps of a slab of a panel, which rows pass. It has a third of the L1 cache beside rows that stay
// there, and more than half of it beside many packed ones, which are streamed through the rest.
constexpr int64_t kSlabSteps = 8, kLongSlabSteps = 14;

// Panels that the unit multiplies where they are.
class StoredPanels {
 public:
  static constexpr bool kAreInPlace = true;

  StoredPanels(const auto& a, const Tiled& rows)
      : weight_(static_cast<const char*>(a.weight)), bytes_(rows.units * kColumns * 4) {}

  // Returns a panel's steps from begin to end.
  const char* steps(int64_t panel, int64_t begin, int64_t) const {
    return weight_ + panel * bytes_ + begin * kStepBytes;
  }

 private:
  const char* const weight_;
  const int64_t bytes_;
};

constexpr int64_t kFewestWidenedRows = 40;  // for which widening pays

// Widens a step of integers, of a panel of which a group has the scales from `scales` on, to pairs
// of bfloat16.
template <typename Product, bool HAS_OFFSET>
class StepWidener {
 public:
  static void widen_step(
      const int32_t* from, const ScaledWeights& weights, int64_t scales, char* to) {
    for (int64_t v = 0; v < kVectors; ++v) {
      widen_columns(from + v * W, weights, scales + v * W, to + v * kTileRowBytes);
    }
  }

 private:
  static constexpr int64_t kUnits = kGroup / Product::kValues;  // of a step
  static constexpr int kBits = 32 / Product::kValues;
  // A float with the exponent of kMore and an integer from this bit on is their sum.
  static constexpr int kPlace = kBits == 4 ? 16 : 15;
  static constexpr int kMore = 1 << (23 - kPlace);

  // Writes W columns of a step.
  static void widen_columns(
      const int32_t* from, const ScaledWeights& weights, int64_t scales, char* to) {
    const FloatUnits scale = widen(weights.scale + scales);
    FloatUnits start = _mm512_mul_ps(scale, _mm512_set1_ps(-kMore - Product::kZero));
    if constexpr (HAS_OFFSET) {
      const FloatUnits offset = widen(weights.offset + scales);
      start = _mm512_fnmadd_ps(scale, _mm512_set1_ps(kMore), offset);
    }
    const auto put_pair = [&]<int FIRST, int SECOND>(Units unit) {
      const FloatUnits first = _mm512_fmadd_ps(scale, integers_at<FIRST>(unit), start);
      const FloatUnits second = _mm512_fmadd_ps(scale, integers_at<SECOND>(unit), start);
      _mm512_store_si512(to, rounded_pairs(first, second));
      to += 2 * kTileRowBytes;
    };
    for (int64_t i = 0; i < kUnits; ++i, from += kColumns) {
      const Units unit = load_units(from);
      put_pair.template operator()<0, 8>(unit);
      put_pair.template operator()<16, 24>(unit);
      if constexpr (kBits == 4) {
        put_pair.template operator()<4, 12>(unit);
        put_pair.template operator()<20, 28>(unit);
      }
    }
  }

  // Returns kMore plus the integers at a bit of each unit.
  template <int BIT>
  static FloatUnits integers_at(Units unit) {
    if constexpr (BIT < kPlace) {
      unit = shifted_left(unit, kPlace - BIT);
    } else if constexpr (BIT > kPlace) {
      unit = shifted_right(unit, BIT - kPlace);
    }
    constexpr int kFirstAndSecondOrThird = 0xea;
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        unit, broadcast(((1 << kBits) - 1) << kPlace), _mm512_castps_si512(_mm512_set1_ps(kMore)),
        kFirstAndSecondOrThird));
  }

  // Returns pairs of bfloat16; the instructions for that take longer.
  static Units rounded_pairs(FloatUnits first, FloatUnits second) {
    const Units half = broadcast(0x8000);
    const Units low = shifted_right(_mm512_add_epi32(_mm512_castps_si512(first), half), 16);
    const Units high = _mm512_add_epi32(_mm512_castps_si512(second), half);
    constexpr __mmask32 kHigh = 0xaaaaaaaa;
    return _mm512_mask_blend_epi16(kHigh, low, high);
  }
};

// Panels of integers in groups of a multiple of kGroup inputs, which are a step.
class WidenedPanels {
 public:
  static constexpr bool kAreInPlace = false;
  static_assert(kGroup == 2 * kTileUnits);

  WidenedPanels(const auto& a, const Tiled& rows)
      : integers_(static_cast<const int32_t*>(a.weight)),
        weights_{a.groups, a.group_scale, a.group_offset},
        num_steps_(rows.steps),
        step_integers_(kGroup * a.bits / 32 * kColumns),
        widen_step_(a.bits == 4 ? widener<Int4Product>() : widener<Int8Product>()),
        memory_(aligned<char>(kLongSlabSteps * kStepBytes)) {}

  // As that of `StoredPanels`, for a slab, until the next call. It prefetches as many steps more.
  const char* steps(int64_t panel, int64_t begin, int64_t end) const {
    const int64_t per_scale = num_steps_ / weights_.groups;
    char* to = memory_.get();
    for (int64_t i = begin; i < end; ++i, to += kStepBytes) {
      const int32_t* const from = integers_ + (panel * num_steps_ + i) * step_integers_;
      const char* next = reinterpret_cast<const char*>(from + (end - begin) * step_integers_);
      for (int64_t line = 0; line < step_integers_ * 4 / 64; ++line, next += 64) {
        _mm_prefetch(next, _MM_HINT_T0);
      }
      widen_step_(from, weights_, (panel * weights_.groups + i / per_scale) * kColumns, to);
    }
    return memory_.get();
  }

 private:
  using WidenStep = void(const int32_t*, const ScaledWeights&, int64_t, char*);

  // Found at run time, so that workers and epilogues are compiled once for all kinds of integers.
  template <typename Product>
  WidenStep* widener() const {
    return weights_.offset == nullptr ? StepWidener<Product, false>::widen_step
                                      : StepWidener<Product, true>::widen_step;
  }

  const int32_t* const integers_;
  const ScaledWeights weights_;
  const int64_t num_steps_;
  const int64_t step_integers_;
  WidenStep* const widen_step_;
  Aligned<char> memory_;  // of a slab
};

}  // namespace
}  // namespace trident
#endif
