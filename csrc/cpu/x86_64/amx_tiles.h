// The tile registers of AMX, which sum products of bfloat16.
//
// TDPBF16PS multiplies up to 16 rows of 32 inputs with 32 rows of 16 columns, of which pairs of rows are interleaved in
// words. The products of even inputs and those of odd inputs are summed separately, and then added to the old sum.

#pragma once

#include <cstdint>

namespace moeserve {

constexpr int kAmxRows = 16;
constexpr int kAmxInputs = 32;  // inputs of a tile register

// The instructions are in assembly, because not every compiler knows all of them. Register numbers are literals.
#define MOESERVE_TILE_LOAD(REGISTER, BASE, STRIDE) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #REGISTER ::"r"(BASE), "r"(static_cast<int64_t>(STRIDE)) : "memory")
#define MOESERVE_TILE_STORE(REGISTER, BASE, STRIDE) \
  asm volatile("tilestored %%tmm" #REGISTER ", (%0,%1,1)" ::"r"(BASE), "r"(static_cast<int64_t>(STRIDE)) : "memory")
#define MOESERVE_TILE_ZERO(REGISTER) asm volatile("tilezero %%tmm" #REGISTER ::)
#define MOESERVE_TILE_DOT(SUMS, ROWS, WEIGHTS) \
  asm volatile("tdpbf16ps %%tmm" #WEIGHTS ", %%tmm" #ROWS ", %%tmm" #SUMS ::)

// The sizes of the tile registers, in the format of LDTILECFG.
struct alignas(64) TileSizes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};

  // For at most 16 rows and an even number of inputs, at most 32.
  TileSizes(int rows, int64_t num_inputs) {
    for (int sums = 0; sums < 4; ++sums) set(sums, rows, 64);
    set(4, rows, 2 * num_inputs);
    for (int others = 5; others < 8; ++others) set(others, num_inputs / 2, 64);
  }

  void set(int index, int64_t rows, int64_t bytes) {
    num_rows[index] = static_cast<uint8_t>(rows);
    row_bytes[index] = static_cast<uint16_t>(bytes);
  }
  void use() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
};

inline void release_tiles() { asm volatile("tilerelease" ::); }

}  // namespace moeserve
