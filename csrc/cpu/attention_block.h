// Attention of some queries over one block of positions: packing, scores, softmax, weighted values. Knows rows of keys
// and values by their addresses, and no cache.
//
// Keys are packed so that positions lie beside each other in vectors, values so that the elements of a value do; then
// scores and weighted values are sums of products as in products.h. What is packed serves many queries.
//
// A query's state is the largest score so far, the sum of the weights, and the weighted values. A weight is
// 2^(score - largest), as scores count in powers of two. The order in which a state's numbers are added follows from
// the positions that its query attends to. Other positions of a block add zeros, which changes no bit, and so does a
// block of which a query sees nothing; queries beside it change nothing either.

#pragma once

#include <cstdint>
#include <limits>

#include "element_type.h"
#include "isa.h"

namespace moeserve {

constexpr int kBlock = 128;  // positions
constexpr float kNoScore = std::numeric_limits<float>::lowest();

// Queries that go through the registers together.
constexpr int kMaxTile = 6;
constexpr int kTiles[] = {6, 4, 2, 1};
constexpr int kNumTiles = 4;

// Positions of a block, counted from its first.
struct Range {
  int begin;
  int end;

  bool empty() const { return begin >= end; }
};

// Rows of some positions that will be read next, while others are worked on; they are prefetched.
struct Ahead {
  const void* const* rows;
  Range range;
};

// States of several queries.
struct States {
  float* largest;      // [queries]
  float* weight_sums;  // [queries]
  float* values;       // [queries, values_stride]
};

// Some queries, as many as one of kTiles, and a block. Keys and values are either packed, or read where they lie.
struct Tile {
  const void* queries;   // [queries, key_steps] words
  const Range* visible;  // [queries]: positions that each attends to
  Range seen;            // positions that any of them attends to
  Range range;           // whole granules with all of these
  const void* packed_keys;
  const void* packed_values;
  const void* const* keys;  // rows of `range`
  const void* const* values;
  Ahead keys_ahead;
  Ahead values_ahead;
  float factor;   // of scores
  float* scores;  // [kMaxTile, kBlock], for the kernels' use
  States states;
  void* weights;   // [queries, kBlock] as words, of which those in `range` are filled
  float* factors;  // [queries]: what the states' values are multiplied with before any are added
};

// Kernels of one instruction set for one element type, and how they want their operands. A word has 32 bits.
struct BlockKernels {
  int num_lanes;    // of a vector
  int num_vectors;  // of a strip, at most; packed keys and values come in strips
  int per_word;     // elements of keys, values or weights in a packed word
  int per_load;     // elements in a word of the cache
  int granule;      // positions that are packed together

  // Writes `key_steps` words.
  void (*copy_query)(const void* query, int head_size, void* words);
  // Pack a range of whole granules.
  void (*pack_keys)(const void* const* rows, const Ahead& ahead, Range range, int head_size, void* packed);
  void (*pack_values)(const void* const* rows, const Ahead& ahead, Range range, int value_size, void* packed);
  // Whether all values in a range are numbers, so that a weight of 0 makes a zero of each.
  bool (*all_finite)(const void* const* rows, Range range, int value_size);
  // Fill a tile's weights, and bring its states up to date but for the values.
  void (*weigh_packed[kNumTiles])(const Tile& tile, int head_size);
  // Add the weighted values to the states: of one strip, or all.
  void (*add_packed[kNumTiles])(const Tile& tile, int strip, int value_size, int64_t values_stride);
  void (*weigh_in_place[kNumTiles])(const Tile& tile, int head_size);
  void (*add_in_place[kNumTiles])(const Tile& tile, int value_size, int64_t values_stride);
  // Adds states to those of earlier positions. Overwrites both.
  void (*merge)(const States& merged, const States& next, int num_queries, int64_t values_stride);
  // One query's result: its values divided by the sum of weights, to which a sink, if not null, adds its own.
  void (*finish)(const States& state, const float* sink, int value_size, void* out);

  int key_loads(int head_size) const { return (head_size + per_load - 1) / per_load; }
  int key_steps(int head_size) const { return key_loads(head_size) * (per_load / per_word); }
  int strip_lanes() const { return num_lanes * num_vectors; }
  int num_strips(int value_size) const { return (value_size + strip_lanes() - 1) / strip_lanes(); }
  // Words of packed keys: strips of [key_steps, strip_lanes]. Of packed values: strips of [kBlock / per_word,
  // strip_lanes].
  int64_t packed_keys_size(int head_size) const { return int64_t{kBlock} * key_steps(head_size); }
  int64_t packed_values_size(int value_size) const {
    return int64_t{num_strips(value_size)} * strip_lanes() * (kBlock / per_word);
  }
};

const BlockKernels& choose_block_kernels(Isa isa, ElementType type);

}  // namespace moeserve
