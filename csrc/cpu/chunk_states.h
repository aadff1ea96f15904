// The states of requests that a step's chunks begin with and leave behind.

#pragma once

#include <cstdint>

namespace moeserve {

// S chunks of T tokens in all. Rows of states are -1 for no state. No chunk may store or save to a row that another
// chunk stores to, saves to or loads.
struct ChunkStates {
  const int32_t* row_starts;       // [S + 1]
  const int64_t* load;             // [S]: the state before the chunk; -1: zeros
  const int64_t* store;            // [S]: the state after it
  const int64_t* save;             // [S]: the state after its first `num_before_save` tokens
  const int64_t* num_before_save;  // [S], at least 1
  int64_t num_chunks;
};

}  // namespace moeserve
