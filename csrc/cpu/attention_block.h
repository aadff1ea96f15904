// Attention of some queries over one block of positions: packing, scores, softmax, weighted values. Rows of keys and
// values are given by their addresses, independently of any cache layout.
//
// Keys are packed with positions side by side in vectors, and values with the elements of a value side by side. Scores
// and weighted values are then sums of products as in products.h, or of AMX's tile registers. Packed operands serve
// many queries.
//
// The state of a query consists of its largest score so far, the sum of the weights, and the weighted values. Scores
// are exponents of 2: a weight is 2^(score - largest). The order of additions to a state is determined by the positions
// that its query attends to. Other positions of a block add zeros, which change no bit, and so does a block without
// visible positions. Neighbouring queries do not affect each other.

#pragma once

#include <cstdint>
#include <limits>

#include "element_type.h"
#include "isa.h"
#include "vectors.h"

namespace moeserve {

constexpr int kBlock = 128;  // positions per block
constexpr float kNoScore = std::numeric_limits<float>::lowest();
constexpr float kLog2E = 1.44269504f;

// Positions of a block, relative to its first.
struct Range {
  int begin;
  int end;

  bool empty() const { return begin >= end; }
};

// Rows to prefetch while other rows are processed.
struct PrefetchRows {
  const void* const* rows;
  Range range;
};

// Rows of 8-bit floats, and the memory `target` [kBlock, size] for the converted elements.
struct Float8Rows {
  const void* const* codes;  // [kBlock]
  const int64_t* indices;    // [kBlock]: indices of the rows' scales
  const BFloat16* scales;
  Range range;
  PrefetchRows ahead;
  void* target;
};

// The states of several queries, as parallel arrays.
struct States {
  float* largest;      // [queries]
  float* weight_sums;  // [queries]
  float* values;       // [queries, values_stride]
};

// Some queries that are processed together with one block. Keys and values are either packed or read in place.
struct Tile {
  int num_queries;
  const void* queries;      // [queries, key_steps] words
  const Range* visible;     // [queries]: positions that each query attends to
  Range seen;               // positions that at least one query attends to
  Range range;              // `seen`, extended to whole granules
  void* packed;             // keys or values
  const void* const* keys;  // rows of `range`
  const void* const* values;
  PrefetchRows keys_ahead;
  PrefetchRows values_ahead;
  float factor;   // positive factor on products of queries and keys, which makes scores exponents of 2
  float* scores;  // [max_queries, kBlock], scratch memory of the kernels
  States states;
  void* weights;   // [queries, kBlock] as words, filled in `range`
  float* factors;  // [queries]: factors on the old values before new ones are added
  // For each query, numbers [num_distances] that are added to its scores of positions at these distances before its own
  // position, and the latter relative to the block; null: there are none. They are not multiplied by `factor`.
  const void* const* biases = nullptr;
  const int64_t* own_positions = nullptr;
  int64_t num_distances = 0;
};

// The kernels for tiles with a certain number of queries.
struct TileKernels {
  int num_queries;
  // Compute the weights of a tile, and update its states except for the values.
  void (*weigh_packed)(const Tile& tile, int head_size);
  // Add the weighted values of one strip or of all elements to the states.
  void (*add_packed)(const Tile& tile, int strip, int value_size, int64_t values_stride);
  // The same two kernels with keys and values read in place. `add_in_place` is null if values are always packed.
  void (*weigh_in_place)(const Tile& tile, int head_size);
  void (*add_in_place)(const Tile& tile, int value_size, int64_t values_stride);
  // Add each query's positive scores, times the query's weight, to the sums of the positions. Keys are packed.
  void (*add_positive)(const Tile& tile, int head_size, const float* weights, float* sums);
  // Write the products of queries and packed keys to the tile's scores, without a factor.
  void (*score)(const Tile& tile, int head_size);
};

// The kernels of one instruction set for one element type, and the layout of their operands. A word has 32 bits.
struct BlockKernels {
  int num_lanes;    // float32 lanes of a vector
  int num_vectors;  // vectors of a strip; packed keys and values consist of strips
  int per_word;     // elements of keys, values or weights in a packed word
  int per_load;     // elements in a word of the cache
  int granule;      // positions that are packed together
  int step_group;   // queries and packed keys are padded with zeros to a multiple of this number of steps

  void (*decode_float8)(const Float8Rows& rows, int size);
  // Writes `key_steps` words.
  void (*copy_query)(const void* query, int head_size, void* words);
  // Pack a range of whole granules.
  void (*pack_keys)(const void* const* rows, const PrefetchRows& ahead, Range range, int head_size, void* packed);
  void (*pack_values)(const void* const* rows, const PrefetchRows& ahead, Range range, int value_size, void* packed);
  // Return true if all values in a range are finite, so that a weight of 0 turns each into a zero.
  bool (*all_finite)(const void* const* rows, Range range, int value_size);
  // Merge states into those of earlier positions. Overwrites both.
  void (*merge)(const States& merged, const States& next, int num_queries, int64_t values_stride);
  // Write the result of one query: its values divided by the sum of the weights, which includes the weight of a sink if
  // `sink` is not null.
  void (*finish)(const States& state, const float* sink, int value_size, void* out);
  // In descending order of the number of queries. The last kernels also process tiles with fewer queries.
  const TileKernels* tiles = nullptr;
  int num_tiles = 0;
  // Configure and release the tile registers of a thread; null without AMX.
  void (*configure)() = nullptr;
  void (*release)() = nullptr;

  int max_queries() const { return tiles[0].num_queries; }
  int key_loads(int head_size) const { return (head_size + per_load - 1) / per_load; }
  int key_steps(int head_size) const {
    const int num_steps = key_loads(head_size) * (per_load / per_word);
    return (num_steps + step_group - 1) / step_group * step_group;
  }
  int strip_lanes() const { return num_lanes * num_vectors; }
  int num_strips(int value_size) const { return (value_size + strip_lanes() - 1) / strip_lanes(); }
  // Packed keys are strips of [key_steps, strip_lanes] words. Packed values are strips of [kBlock / per_word,
  // strip_lanes] words.
  int64_t packed_keys_size(int head_size) const { return int64_t{kBlock} * key_steps(head_size); }
  int64_t packed_values_size(int value_size) const {
    return int64_t{num_strips(value_size)} * strip_lanes() * (kBlock / per_word);
  }
};

const BlockKernels& choose_block_kernels(Isa isa, ElementType type);

}  // namespace moeserve
