// The panels of a product on AMX: as they are stored, or integers in groups as bfloat16. For
// tile_block.h, linear_products.h and experts.cpp alone.
//
// Integers of a group of 32 inputs are half a tile deep: the unit does no more with an instruction
// than for bfloat16, and vectors must scale each sum (scaled_tiles.h). Many rows are faster with
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

// Panels of integers in groups of a multiple of kGroup inputs, which are a step.
template <typename Product, bool HAS_OFFSET>
class WidenedPanels {
 public:
  static constexpr bool kAreInPlace = false;
  static_assert(kGroup == 2 * kTileUnits);

  WidenedPanels(const auto& a, const Tiled& rows)
      : integers_(static_cast<const int32_t*>(a.weight)),
        weights_{a.groups, a.group_scale, a.group_offset},
        num_steps_(rows.steps),
        memory_(aligned<char>(kLongSlabSteps * kStepBytes)) {}

  // As that of `StoredPanels`, for a slab, until the next call. It prefetches as many steps more.
  const char* steps(int64_t panel, int64_t begin, int64_t end) const {
    const int64_t per_scale = num_steps_ / weights_.groups;
    char* to = memory_.get();
    for (int64_t i = begin; i < end; ++i, to += kStepBytes) {
      const int32_t* const from = integers_ + (panel * num_steps_ + i) * kStepIntegers;
      const char* next = reinterpret_cast<const char*>(from + (end - begin) * kStepIntegers);
      for (int64_t line = 0; line < kStepIntegers * 4 / 64; ++line, next += 64) {
        _mm_prefetch(next, _MM_HINT_T0);
      }
      const int64_t scales = (panel * weights_.groups + i / per_scale) * kColumns;
      for (int64_t v = 0; v < kVectors; ++v) {
        widen_columns(from + v * W, scales + v * W, to + v * kTileRowBytes);
      }
    }
    return memory_.get();
  }

 private:
  static constexpr int64_t kUnits = kGroup / Product::kValues;  // of a step
  static constexpr int64_t kStepIntegers = kUnits * kColumns;
  static constexpr int kBits = 32 / Product::kValues;
  // A float with the exponent of kMore and an integer from this bit on is their sum.
  static constexpr int kPlace = kBits == 4 ? 16 : 15;
  static constexpr int kMore = 1 << (23 - kPlace);

  // Writes W columns of a step.
  void widen_columns(const int32_t* from, int64_t scales, char* to) const {
    const FloatUnits scale = widen(weights_.scale + scales);
    FloatUnits start = _mm512_mul_ps(scale, _mm512_set1_ps(-kMore - Product::kZero));
    if constexpr (HAS_OFFSET) {
      const FloatUnits offset = widen(weights_.offset + scales);
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

  const int32_t* const integers_;
  const ScaledWeights weights_;
  const int64_t num_steps_;
  Aligned<char> memory_;  // of a slab
};

}  // namespace
}  // namespace trident
#endif
