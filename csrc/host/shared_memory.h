// Exchanges between processes of one host through memory that all of them map. Knows bytes, and how to add floats; no
// tensors, no names of groups.
//
// Each rank of a group owns one memory, which the others map too. It holds
//
// - a bell: what the owner sleeps on, and for whom it waits;
// - marks: of each other rank, how many of its notes to the owner have been read;
// - notes: for each reader a short queue. A note says in which bytes of a slot something lies for this reader;
// - slots: where the owner puts what it sends. A slot is free again when all who got a note about it have read it.
//
// What is longer than a slot goes in several. Notes, marks and bells are on cache lines of their own. Nothing in the
// memory is trusted to be a pointer or an offset outside of it.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

namespace moeserve {

enum class Element : int { kFloat32 = 0, kBFloat16 = 1 };

// out = ((parts[0] + parts[1]) + parts[2]) + ..., added in float32 and rounded once. `out` may be one of the parts.
void add_in_order(Element element, const std::vector<const char*>& parts, char* out, int64_t num_bytes);

// How the memory of each rank is divided: the same on all ranks of a group.
struct Slots {
  int64_t num_slots;
  int64_t slot_bytes;  // a multiple of 64
};

enum class Outcome : int {
  kDone = 0,
  kInterrupted = 1,  // nothing is wrong: a signal came, or some time has passed; wait again
  kTimeout = 2,      // see `absent`
  kLost = 3,         // those in `absent` have died, or have left
  kDisagree = 4,     // those in `absent` sent what does not belong to this collective
  kClosed = 5,       // this rank has left
};

// One rank's membership. All ranks begin the same operations in the same order.
//
// An operation is done when something has come from every rank, be it nothing at all: so a rank that is missing is
// missed by all others at the same operation.
//
// `begin_*` copies what there is room for and returns. The rest moves whenever this rank begins or waits for an
// operation of the same group, and at no other time. Memory that was given to an operation is read and written until
// `wait` for it, or for a later one, has returned kDone. Calls from several threads take turns; `close` does not wait
// for its turn to tell the others.
class SharedMemory {
 public:
  // Bytes of each rank's memory.
  static int64_t num_bytes(int num_ranks, Slots slots);

  // memory_fds: of each rank, mapped here and not needed afterwards. A new memory is zero.
  // sockets: to each other rank, to be kept open while this lives; one that is hung up means that the rank is gone.
  // spin_s: how long to look for news before sleeping.
  // Throws std::runtime_error where a memory cannot be mapped.
  SharedMemory(int rank, const std::vector<int>& memory_fds, const std::vector<int>& sockets, Slots slots,
               double spin_s);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // The bytes for and from each rank lie one after the other, in rank order. Each returns the operation's number.
  uint64_t begin_exchange(const char* sent, const std::vector<int64_t>& send_bytes, char* received,
                          const std::vector<int64_t>& receive_bytes);
  uint64_t begin_gather(const char* sent, char* received, const std::vector<int64_t>& bytes_of_rank);
  // The sum of this rank's part of what all ranks send.
  uint64_t begin_sum_of_parts(Element element, const char* sent, char* out, const std::vector<int64_t>& bytes_of_rank);
  // The sum of all that all ranks send. `out` is not `sent`.
  uint64_t begin_sum(Element element, const char* sent, char* out, int64_t num_bytes);

  // Moves data until the operation is done. Returns kInterrupted at least every 50 ms.
  // After kTimeout, kLost and kDisagree this rank has left: the others fail as well.
  // is_measured: whether the time counts in `seconds_waited`.
  Outcome wait(uint64_t number, double timeout_s, bool is_measured);

  // Operations begun from now on are the first, the second and so on of a step.
  void begin_step();

  // By index of the operation in its step, all steps together: seconds of measured waits for data not there yet.
  std::vector<double> seconds_waited();

  // Whom the last failed `wait` was about.
  std::vector<int> absent() const { return absent_; }

  // Leaves: others that wait for this rank fail at once.
  void close();

 private:
  struct Bell;
  struct Mark;
  struct Note;
  struct Memory;  // where the parts of one rank's memory are

  // What goes to another rank, and comes from it.
  struct Part {
    const char* source;
    int64_t to_send;
    char* target;
    int64_t to_receive;
    int64_t received;
    bool is_open;  // more must come from it: at least one note comes from each rank, even of nothing
  };

  struct Operation {
    uint64_t number = 0;
    bool sends_same = false;  // all ranks get the same bytes, written once
    bool adds = false;        // what comes is added up; else each part goes to its target
    Element element = Element::kFloat32;
    std::vector<Part> parts;  // by rank
    char* out = nullptr;      // of a sum
    const char* own = nullptr;
    int64_t num_added = 0;
    int64_t share = 0;     // of a slot, for each reader
    int64_t num_sent = 0;  // of each part
    int64_t longest = 1;   // of the parts to send, and at least 1
    int num_missing = 0;   // ranks of which not all has come
  };

  Operation& new_operation();
  uint64_t start(Operation& operation, const char* own_source, char* own_target, int64_t own_bytes);
  uint64_t first_number() const { return next_number_ - operations_.size(); }
  bool is_sent(uint64_t number) const { return sending_ > number; }
  bool is_done(uint64_t number) const;
  Operation* expected_from(int rank);
  bool has_note(int rank) const;
  const Note& note_from(int rank) const;

  bool progress();
  bool send_some();
  void send_chunk(Operation& operation);
  bool receive_some();
  bool receive_note(int rank, Operation& operation);
  void take(Operation& operation, Part& part, int64_t num_bytes);
  bool add_chunk(Operation& operation);
  void check_note(int rank, const Note& note, const Operation& operation, int64_t left);
  bool is_free(int64_t slot);
  bool can_still_read(int rank) const;

  bool spin();
  bool sleep(uint64_t number, double left_s);  // false: a signal came
  void look_for_the_gone();
  std::vector<int> lost(uint64_t number);
  std::vector<int> missing(uint64_t number);
  void wake(int rank, uint64_t what);
  void ring(int rank);
  void leave();
  Outcome fail(Outcome outcome, std::vector<int> absent);

  const int rank_;
  const int num_ranks_;
  const Slots slots_;
  const double spin_s_;
  const std::vector<int> sockets_;
  std::vector<Memory> memories_;
  std::vector<char> is_gone_;  // its socket was hung up

  std::mutex mutex_;
  std::atomic<bool> is_closing_{false};
  Outcome failure_ = Outcome::kDone;
  std::vector<int> absent_;
  std::vector<double> seconds_waited_;
  uint64_t first_of_step_ = 1;

  std::deque<Operation> operations_;  // begun and not done, and those between them
  std::vector<Operation> spare_;
  uint64_t next_number_ = 1;
  uint64_t sending_ = 1;             // the operation of which something is still to be sent, or the next
  std::vector<uint64_t> receiving_;  // by rank: the operation of which its next note is
  std::vector<uint64_t> num_notes_;  // by rank: written for it
  std::vector<uint64_t> num_read_;   // by rank: notes of it read here
  uint64_t num_chunks_ = 0;          // sent so far
  std::vector<uint64_t> uses_;       // [slot][rank]: the note about what is in the slot, or 0
  std::vector<uint64_t> nudged_at_;  // by rank: the chunk before which it was woken to make room
  double next_look_ = 0;             // when to look at the sockets again
  double look_interval_ = 0;
  uint64_t waited_for_ = 0;
  uint64_t num_vain_spins_ = 0;  // since one helped
  std::vector<const char*> addends_;
};

}  // namespace moeserve
