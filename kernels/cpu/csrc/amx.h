// Intel's matrix unit (AMX): tiles of 16 rows of 64 bytes. For tile_block.h and attention alone.
//
// The instructions are written out: GCC 12 takes the intrinsics for code that reads no memory, and
// drops the stores before them. So they need no compiler option either, and one library serves
// machines with tiles and without.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <c10/util/BFloat16.h>
#include <cpuid.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace trident {

constexpr int64_t kTileRows = 16, kTileRowBytes = 64, kTileBytes = kTileRows * kTileRowBytes;
constexpr int64_t kTileUnits = kTileRowBytes / 4;  // along the depth of a product, of 32 bits

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define TRIDENT_TILES

// Returns whether the processor has tiles of bfloat16 and int8, and the kernel lets this process
// use them; it is asked once.
inline bool has_tiles() {
  static const bool has = [] {
    unsigned a, b, c, d;
    constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
    constexpr unsigned kNeeded = kBFloat16 | kTile | kInt8;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) {
      return false;
    }
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
}

// While it exists, this thread's tiles 0 to 5 have `rows` rows, 6 and 7 one for each of `units`; so
// many has a row of tiles 4 and 5. oneDNN configures tiles in its own way between two products, and
// threads that have some are slower to switch: so each use is short.
class TilesInUse {
 public:
  explicit TilesInUse(int64_t rows, int64_t units = kTileUnits) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } use;
    std::fill_n(use.row_bytes, 8, kTileRowBytes);
    std::fill_n(use.rows, 6, static_cast<uint8_t>(rows));
    std::fill_n(use.row_bytes + 4, 2, 4 * units);
    std::fill_n(use.rows + 6, 2, static_cast<uint8_t>(units));
    asm volatile("ldtilecfg %0" : : "m"(use) : "memory");
  }
  ~TilesInUse() {
    asm volatile("tilerelease" : : : "memory");
  }
  TilesInUse(const TilesInUse&) = delete;
  TilesInUse& operator=(const TilesInUse&) = delete;
};

template <int TILE>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}

// `stride` bytes lie between two rows.
template <int TILE>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}

// As load_tile, for what is read once: it displaces less of the L1 cache.
template <int TILE>
inline void stream_tile(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}

// Adds the products of tile A's rows with tile B's columns to tile SUMS. A row of A has 16 units of
// 32 bits; B has a row for each unit, with that of 16 columns.
struct BFloat16Tiles {
  using Sum = float;

  template <int SUMS, int A, int B>
  static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B));
  }
};

// Of signed integers.
struct SignedTiles {
  using Sum = int32_t;

  template <int SUMS, int A, int B>
  static void multiply() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B));
  }
};

// Of signed with unsigned integers.
struct Int8Tiles {
  using Sum = int32_t;

  template <int SUMS, int A, int B>
  static void multiply() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B));
  }
};

#else

inline bool has_tiles() {
  return false;
}

#endif

// Returns whether tiles multiply activations of T with weights that have such a scale or none.
template <typename T>
bool uses_tiles(const float* scale) {
  return has_tiles() && (scale != nullptr || std::is_same_v<T, at::BFloat16>);
}

}  // namespace trident
