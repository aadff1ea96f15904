// Experts of a model that is larger than memory. They lie in a file, and each is read into a slot when rows need it.

#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace moeserve {

// Return a number that a change of a single bit always changes, and any other change almost always.
uint64_t checksum(const void* data, int64_t num_bytes);

// One weight of an expert in the file.
struct StoredPart {
  int64_t offset;
  int64_t num_bytes;
  uint64_t checksum;
};

constexpr int kExpertParts = 2;  // gate-up and down
using StoredExpert = std::array<StoredPart, kExpertParts>;

// Slots in memory for the experts of each layer, and threads that read experts into them.
//
// A layer's slots hold only its own experts, because layers take turns: with slots for all layers, the least recently
// used expert would be one of the layer that comes next. An expert that is read replaces the one with the lowest score
// of this layer: its visits, of which older ones count less.
//
// The page cache is avoided where the file system allows it, so that the slots are all the memory that experts take.
class ExpertStore {
 public:
  // An expert of `visit` that is in memory.
  struct Ready {
    int index;                                    // in the list of experts
    std::array<const char*, kExpertParts> parts;  // null if the expert could not be read: see `take_errors`
  };
  using Compute = std::function<void(const std::vector<Ready>&)>;

  struct Counters {
    int64_t num_hits = 0;  // experts of visits that were in memory
    int64_t num_misses = 0;
    int64_t num_bytes = 0;     // read
    int64_t wait_ns = 0;       // of visits
    int64_t num_released = 0;  // bytes of slots given back: see `shrink`
  };

  // Throws std::system_error if the file cannot be opened.
  ExpertStore(const std::string& path, int num_readers);
  ~ExpertStore();
  ExpertStore(const ExpertStore&) = delete;

  // Add the next layer, with `num_slots` >= 1. Its weights have equal sizes in all experts.
  void add_layer(std::vector<StoredExpert> experts, int num_slots);

  // Call `compute` until it has had each of the experts once: those in memory first, the others as they arrive. Their
  // memory is valid until `compute` returns. One visit runs at a time.
  void visit(int layer, const std::vector<int>& experts, const Compute& compute);

  // Record the experts of the following visits. Returns those recorded before: layer, number of experts, experts, ...
  std::vector<int> record(bool is_on);

  // Keep half of each layer's slots, but at least `least_slots`, and in them the experts with the highest scores. The
  // memory of the other slots is returned to the system. Waits until no visit and no read is in progress.
  void shrink(int least_slots);

  bool is_direct() const { return is_direct_; }  // False: reads go through the page cache
  std::vector<int> num_slots();                  // of each layer
  int64_t num_slot_bytes();
  std::vector<Counters> counters();
  std::vector<std::string> take_errors();  // since the last call: what could not be read, and why

 private:
  enum class State { kFree, kReading, kResident, kUnreadable };

  struct Slot {
    char* memory;
    int expert = -1;
    State state = State::kFree;
    int num_pieces = 0;      // not read yet
    int error = 0;           // errno of a piece; kEndOfFile
    bool is_needed = false;  // by the current visit, which has not computed it yet
    bool is_new = false;     // the same, and read for it
  };

  struct Expert {
    StoredExpert stored;
    int slot = -1;
    float score = 0;  // at the time of the last visit
    int64_t last_visit = 0;
  };

  struct Layer {
    std::vector<Expert> experts;
    std::vector<Slot> slots;
    char* memory;
    int64_t num_bytes;
    int64_t slot_bytes;
    std::array<int64_t, kExpertParts> first_byte;  // of each part in a slot
    int64_t num_visits = 0;
    Counters counters;
  };

  struct Piece {
    int layer;
    int slot;
    int64_t begin;  // in the file
    int64_t num_bytes;
    char* target;
  };

  void read_pieces();
  int read_piece(const Piece& piece) const;
  void finish(int layer_number, Slot& slot, std::unique_lock<std::mutex>& lock);
  bool is_intact(const Layer& layer, const Slot& slot) const;
  const char* part_of(const Layer& layer, const Slot& slot, int part) const;
  std::vector<Piece> pieces_of(int layer_number, int slot_number) const;
  static Slot* choose_slot(Layer& layer, float highest_score);
  static float score_now(const Layer& layer, const Expert& expert);
  bool is_reading() const;
  static void remove_last_slot(Layer& layer);
  void start_reading(int layer_number, int expert_number, Slot& slot);

  const std::string path_;
  int file_ = -1;
  bool is_direct_ = true;
  std::deque<Layer> layers_;
  std::mutex visit_;  // held by the current visit, and while slots are removed
  std::mutex mutex_;  // of everything below, and of slots and experts
  std::condition_variable has_pieces_, has_read_;
  std::deque<Piece> pieces_;
  bool is_closing_ = false;
  bool is_recording_ = false;
  std::vector<int> recorded_;
  std::vector<std::string> errors_;
  std::vector<std::thread> readers_;
};

}  // namespace moeserve
