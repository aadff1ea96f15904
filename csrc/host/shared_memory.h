// Collectives between the processes of one host, through memory that all of them map. It handles bytes and additions of
// floats, not tensors.
//
// Each rank of a group owns one memory, which the others map too. It holds
//
//  - a doorbell: the word on which the owner sleeps, and the set of ranks for which it waits;
//  - acknowledgements: for each other rank, the number of its messages that the owner has read;
//  - messages: a short queue for each reader. A message names the bytes of a slot that hold data for this reader;
//  - slots: the data that the owner sends. A slot is free again once all readers of its messages have read it.
//
// Data longer than a slot is sent in several. Messages, acknowledgements and doorbells have cache lines of their own.
// Offsets read from the memory of another rank are checked before use.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "cpu/element_type.h"

namespace moeserve {

// The layout of the memory of each rank, the same on all ranks of a group.
struct Slots {
  int64_t num_slots;
  int64_t slot_bytes;  // a multiple of 64
};

enum class Outcome : int {
  kDone = 0,
  kInterrupted = 1,  // no failure: a signal arrived or some time has passed; wait again
  kTimeout = 2,      // see `absent`
  kLost = 3,         // the ranks in `absent` have died or left
  kMismatch = 4,     // the ranks in `absent` sent data of another operation
  kClosed = 5,       // this rank has left
};

// The membership of one rank in a group. All ranks begin the same operations in the same order.
//
// An operation is done when a message has arrived from every rank, even if it carries no data. A missing rank is
// therefore detected by all others at the same operation.
//
// `begin_*` copies as much as fits into free slots and returns. The rest moves only while this rank begins or waits for
// an operation of the same group. Memory given to an operation is read and written until `wait` for it, or for a later
// one, has returned kDone. Calls from several threads are serialised, except that `close` notifies the others at once.
class SharedMemory {
 public:
  // Return the bytes of each rank's memory.
  static int64_t num_bytes(int num_ranks, Slots slots);

  // memory_fds: one per rank, mapped here and not needed afterwards. New memory is zero.
  // sockets: one per other rank, which must stay open while this object lives. A hang-up means that the rank is dead.
  // spin_s: how long to spin before sleeping.
  // naps: wait in short sleeps, as on systems without a futex between processes; for tests.
  // Throws std::runtime_error if a memory cannot be mapped.
  SharedMemory(int rank, const std::vector<int>& memory_fds, const std::vector<int>& sockets, Slots slots,
               double spin_s, bool naps);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // The bytes for and from each rank are contiguous and in rank order. Each function returns the number of its
  // operation.
  uint64_t begin_exchange(const char* sent, const std::vector<int64_t>& send_bytes, char* received,
                          const std::vector<int64_t>& receive_bytes);
  uint64_t begin_gather(const char* sent, char* received, const std::vector<int64_t>& bytes_of_rank);
  // Reduce-scatter: `out` becomes the sum of the parts for this rank. See `add_in_tree`.
  uint64_t begin_sum_of_parts(ElementType element, const char* sent, ElementType out_element, char* out,
                              const std::vector<int64_t>& bytes_of_rank);
  // Move data until the operation is done. Returns kInterrupted at least every 50 ms. After kTimeout, kLost and
  // kMismatch this rank has left the group, so that the others fail as well. `is_measured`: include the time in
  // `seconds_waited`.
  Outcome wait(uint64_t number, double timeout_s, bool is_measured);

  // Start a new step: the next operation has index 0 in it.
  void begin_step();

  // Return the seconds of measured waits for missing data by index of the operation in its step, summed over all steps.
  std::vector<double> seconds_waited();

  // Return the ranks that caused the last failure of `wait`.
  std::vector<int> absent() const { return absent_; }

  // Leave the group. Ranks that wait for this rank fail at once.
  void close();

 private:
  struct Doorbell;
  struct Acknowledgement;
  struct Message;
  struct Memory;  // pointers to the parts of one rank's memory

  // The data sent to and received from one other rank.
  struct Part {
    const char* source;
    int64_t to_send;
    char* target;
    int64_t to_receive;
    int64_t received;
    bool is_open;  // not everything has arrived: each rank sends at least one message, even without data
  };

  struct Operation {
    uint64_t number = 0;
    bool sends_same = false;  // all ranks receive the same bytes, written once
    bool adds = false;        // received data is summed instead of copied
    ElementType element = ElementType::kFloat32;
    ElementType out_element = ElementType::kFloat32;
    std::vector<Part> parts;  // by rank
    char* out = nullptr;      // result of a sum
    const char* own = nullptr;
    int64_t num_added = 0;
    int64_t share = 0;     // bytes of a slot for each reader
    int64_t num_sent = 0;  // bytes of each part
    int64_t longest = 1;   // longest part to send, at least 1
    int num_missing = 0;   // ranks whose data has not arrived completely
  };

  Operation& new_operation();
  uint64_t start(Operation& operation, const char* own_source, char* own_target, int64_t own_bytes);
  uint64_t first_number() const { return next_number_ - operations_.size(); }
  bool is_sent(uint64_t number) const { return sending_ > number; }
  bool is_done(uint64_t number) const;
  Operation* expected_from(int rank);
  bool has_message(int rank) const;
  const Message& message_from(int rank) const;

  bool progress();
  bool send_some();
  void send_chunk(Operation& operation);
  bool receive_some();
  bool receive_message(int rank, Operation& operation);
  void record_received(Operation& operation, Part& part, int64_t num_bytes);
  bool add_chunk(Operation& operation);
  void check_message(int rank, const Message& message, const Operation& operation, int64_t left);
  bool is_free(int64_t slot);
  bool can_still_read(int rank) const;

  bool spin();
  bool sleep(uint64_t number, double remaining_s);  // returns false after a signal
  void find_dead_ranks();
  std::vector<int> lost_ranks(uint64_t number);
  std::vector<int> missing_ranks(uint64_t number);
  void wake(int rank, uint64_t what);
  void ring(int rank);
  void leave();
  Outcome fail(Outcome outcome, std::vector<int> absent);

  const int rank_;
  const int num_ranks_;
  const Slots slots_;
  const double spin_s_;
  const bool naps_;
  const std::vector<int> sockets_;
  std::vector<Memory> memories_;
  std::vector<char> is_dead_;  // by rank: its socket was hung up

  std::mutex mutex_;
  std::atomic<bool> is_closing_{false};
  Outcome failure_ = Outcome::kDone;
  std::vector<int> absent_;
  std::vector<double> seconds_waited_;
  uint64_t first_of_step_ = 1;

  std::deque<Operation> operations_;  // from the oldest unfinished operation on
  std::vector<Operation> spare_;
  uint64_t next_number_ = 1;
  uint64_t sending_ = 1;                // first operation that is not completely sent
  std::vector<uint64_t> receiving_;     // by rank: the operation of its next message
  std::vector<uint64_t> num_messages_;  // by rank: messages written for it
  std::vector<uint64_t> num_read_;      // by rank: messages of it that were read here
  uint64_t num_chunks_ = 0;             // sent so far
  std::vector<uint64_t> uses_;          // [slot][rank]: number of the message about the contents of the slot, or 0
  std::vector<uint64_t> woken_at_;      // by rank: 1 + the chunk for which it was woken to free a slot
  double next_check_ = 0;               // time of the next check of the sockets
  double check_interval_ = 0;
  uint64_t last_waited_ = 0;
  uint64_t num_failed_spins_ = 0;  // since the last successful one
  std::vector<const char*> addends_;
};

}  // namespace moeserve
