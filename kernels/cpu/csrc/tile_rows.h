// The rows of a product on AMX, packed in tiles: as they are, or quantised to 8-bit integers. For
// tile_block.h alone.
#pragma once

#include "amx.h"

#ifdef TRIDENT_TILES
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "aligned.h"
#include "linear_rows.h"
#include "quantize.h"

namespace trident {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kMinPacked = 2048;  // output channels for which packing the rows pays

// Rows in groups of at most `height`, each a run of tiles of that height along the depth. What a
// group has less than that is not written: its sums are not used.
class Tiled {
 public:
  Tiled(int64_t units, const auto& groups)
      : units(units),
        steps((units + kTileUnits - 1) / kTileUnits),
        height(groups.height()),
        row_stride(kTileRowBytes),
        tile_bytes(height * kTileRowBytes),
        groups_(std::max<int64_t>(groups.count, 1)) {}

  const char* group(const auto& groups, int64_t i) const {
    return in_place_ == nullptr ? memory_.get() + i * steps * tile_bytes
                                : in_place_ + groups.begin(i) * row_stride;
  }

  bool is_in_place() const {
    return in_place_ != nullptr;
  }

  const int64_t units, steps, height;
  int64_t row_stride, tile_bytes;  // bytes from a row of a tile to the next, and from tile to tile

 protected:
  // Calls pack(row, place) for each row; place(b) is where byte b of the row goes. The last tile's
  // bytes that no row has are zero.
  void pack_rows(const auto& groups, const auto& pack) {
    memory_ = aligned<char>(groups_ * steps * tile_bytes);
    const int64_t grain = std::max<int64_t>(1, kPackGrain / (steps * tile_bytes));
    at::parallel_for(0, groups.count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        char* const to = memory_.get() + group * steps * tile_bytes;
        if (units % kTileUnits != 0) {
          std::memset(to + (steps - 1) * tile_bytes, 0, tile_bytes);
        }
        for (int64_t r = 0; r < groups.size(group); ++r) {
          pack(groups.begin(group) + r, [&](int64_t byte) {
            return to + (byte / kTileRowBytes * height + r) * kTileRowBytes + byte % kTileRowBytes;
          });
        }
      }
    });
  }

  // Takes the rows from where they are, `stride` bytes apart. They must be whole tiles, and the last
  // group must have `height`: of one that has less, tiles have rows of the next too.
  void take_rows(const void* rows, int64_t stride) {
    in_place_ = static_cast<const char*>(rows);
    row_stride = stride;
    tile_bytes = kTileRowBytes;
  }

 private:
  const int64_t groups_;
  const char* in_place_ = nullptr;
  Aligned<char> memory_;
};

class BFloat16TileRows : public Tiled {
 public:
  using Tiles = BFloat16Tiles;

  template <typename A>
  BFloat16TileRows(const A& a, const auto& groups) : Tiled(a.in_features / 2, groups) {
    const int64_t bytes = a.in_features * 2;
    // Packed rows are read faster. Rows a multiple of a page apart would be in the same places of
    // the L1 cache.
    if (const auto* rows = a.rows_in_place(); rows != nullptr && bytes % kTileRowBytes == 0 &&
                                              a.x_stride * 2 % kPageBytes != 0 &&
                                              (groups.count <= 2 || a.out_features < kMinPacked)) {
      take_rows(rows, a.x_stride * 2);
      return;
    }
    pack_rows(groups, [&](int64_t row, const auto& place) {
      const char* from = reinterpret_cast<const char*>(a.row(row));
      int64_t byte = 0;
      for (; byte + kTileRowBytes <= bytes; byte += kTileRowBytes) {
        std::memcpy(place(byte), from + byte, kTileRowBytes);
      }
      std::memcpy(place(byte), from + byte, bytes - byte);
    });
  }

  Vec value(int64_t, int64_t, Vec sums) const {
    return sums;
  }
};

class Int8TileRows : public Tiled {
 public:
  using Tiles = Int8Tiles;

  template <typename A>
  Int8TileRows(const A& a, const auto& groups)
      : Tiled(a.in_features / 4, groups),
        weight_scales_(a.scale),
        rows_(std::make_unique_for_overwrite<Quantized[]>(a.rows)) {
    pack_rows(groups, [&](int64_t row, const auto& place) {
      rows_[row] = quantize(a.row(row), a.in_features, [&](int64_t i) {
        return reinterpret_cast<int8_t*>(place(i));
      });
    });
  }

  Vec value(int64_t row, int64_t column, Ints sums) const {
    const Ints centred = sums - Ints(128 * rows_[row].sum);  // 128 stands for 0 in the weights
    return at::vec::convert_to_fp_of_same_size<float>(centred) *
           (Vec(rows_[row].scale) * widen(weight_scales_ + column));
  }

 private:
  const float* weight_scales_;
  std::unique_ptr<Quantized[]> rows_;
};

}  // namespace
}  // namespace trident
#endif
