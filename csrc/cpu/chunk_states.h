// The states of requests that the chunks of a step load and store.

#pragma once

#include <cstdint>

namespace moeserve {

// S chunks of T tokens in total. An index of -1 stands for no state. A row that one chunk stores or saves to must not
// be stored to, saved to or loaded by another chunk.
struct ChunkStates {
  const int32_t* row_starts;       // [S + 1]
  const int64_t* load;             // [S]: the state before the chunk; -1: zeros
  const int64_t* store;            // [S]: the state after it
  const int64_t* save;             // [S]: the state after its first `num_before_save` tokens
  const int64_t* num_before_save;  // [S], at least 1
  int64_t num_chunks;
};

}  // namespace moeserve
