// The parts of the memory of a rank, and its doorbell bits, for the implementation of SharedMemory.
//
// Memory order between two ranks: a writer fills a slot, then stores the number of the message (release). A reader
// loads that number (acquire), uses the slot, then stores its acknowledgement (release). The writer loads the
// acknowledgement (acquire) before it reuses the slot.
//
// Sleeping: a rank stores the awaited ranks in its doorbell and then checks for data once more. A sender stores its
// data and then reads the doorbell. Both sides execute a full fence in between, so at least one of them sees the other.

#pragma once

#include <atomic>
#include <cstdint>

#include "shared_memory.h"

namespace moeserve {

constexpr int64_t kLine = 64;

// Doorbell bits: one per rank, modulo kRankBits, and one that requests a wake-up for any event.
constexpr int kRankBits = 63;
constexpr uint64_t kAnyEvent = uint64_t{1} << kRankBits;

inline uint64_t bit_of(int rank) { return uint64_t{1} << (rank % kRankBits); }

struct alignas(kLine) SharedMemory::Doorbell {
  std::atomic<uint32_t> num_rings;
  std::atomic<uint32_t> has_left;
  std::atomic<uint64_t> awaited;  // 0: the owner is awake. The rank that clears it rings.
};

struct alignas(kLine) SharedMemory::Acknowledgement {
  std::atomic<uint64_t> num_read;
};

struct alignas(kLine) SharedMemory::Message {
  std::atomic<uint64_t> number;  // counts the messages to this reader from 1; written last
  uint64_t operation;
  uint64_t adds;
  int64_t offset;  // relative to the first slot
  int64_t num_bytes;
};

struct SharedMemory::Memory {
  char* start;
  Doorbell* doorbell;
  Acknowledgement* acknowledgements;  // by rank
  Message* messages;                  // [rank][num_slots]
  char* slots;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "locks would not be shared between processes");

}  // namespace moeserve
