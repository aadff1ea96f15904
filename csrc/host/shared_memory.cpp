// Memory order between two ranks: a writer fills a slot, then stores the number of the message (release). A reader
// loads that number (acquire), uses the slot, then stores its acknowledgement (release). The writer loads the
// acknowledgement (acquire) before it reuses the slot.
//
// Sleeping: a rank stores the awaited ranks in its doorbell and then checks for data once more. A sender stores its
// data and then reads the doorbell. Both sides execute a full fence in between, so at least one of them sees the other.

#include "shared_memory.h"

#if defined(__linux__)

#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpu/isa.h"
#include "cpu/rows.h"
#include "pause.h"

namespace moeserve {

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kPage = 4096;

// Interval of the checks for dead ranks while sleeping: at first, and after a long wait.
constexpr double kFirstCheck_s = 0.01;
constexpr double kLastCheck_s = 0.05;

// Spinning before sleeping pays only if the other ranks run on free cores of their own. After kMaxFailedSpins failures
// it is tried once per kWaitsPerTrial waits, until it succeeds again.
constexpr int kSpinsPerClockRead = 32;
constexpr uint64_t kMaxFailedSpins = 4;
constexpr uint64_t kWaitsPerTrial = 16;

// Waits are measured for operations with a smaller index in their step.
constexpr uint64_t kMaxIndex = 4096;

// Doorbell bits: one per rank, modulo kRankBits, and one that requests a wake-up for any event.
constexpr int kRankBits = 63;
constexpr uint64_t kAnyEvent = uint64_t{1} << kRankBits;

uint64_t bit_of(int rank) { return uint64_t{1} << (rank % kRankBits); }

int64_t rounded_up(int64_t num_bytes, int64_t unit) { return (num_bytes + unit - 1) / unit * unit; }

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Measures a wait: adds the time since `begin`, if it was called, to totals[number], if it exists.
class Stopwatch {
 public:
  Stopwatch(std::vector<double>& totals, uint64_t number) : totals_(totals), number_(number) {}
  Stopwatch(const Stopwatch&) = delete;
  ~Stopwatch() {
    if (began_ != 0 && number_ < totals_.size()) totals_[number_] += now() - began_;
  }
  void begin() { began_ = now(); }

 private:
  std::vector<double>& totals_;
  const uint64_t number_;
  double began_ = 0;
};

// Sleep until the word is woken, unless it differs from `seen`. Returns false after a signal.
bool futex_wait(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
  timespec time;
  time.tv_sec = static_cast<time_t>(seconds);
  time.tv_nsec = static_cast<long>((seconds - static_cast<double>(time.tv_sec)) * 1e9);
  return syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0) == 0 || errno != EINTR;
}

void futex_wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0); }

// --- addition

// The additions per element do not depend on W.
template <int W, typename T>
MOESERVE_INLINE void add_all(const char* const* parts, int num_parts, char* out, int64_t num_elements) {
  T* const result = reinterpret_cast<T*>(out);
  int64_t i = 0;
  for (; i + 2 * W <= num_elements; i += 2 * W) {
    Pair<W> sum = load_pair<W>(reinterpret_cast<const T*>(parts[0]) + i);
    for (int p = 1; p < num_parts; ++p) {
      const Pair<W> addend = load_pair<W>(reinterpret_cast<const T*>(parts[p]) + i);
      sum.first += addend.first;
      sum.second += addend.second;
    }
    store_pair<W>(result + i, round_to<W>(result, sum));
  }
  for (; i < num_elements; ++i) {
    float sum = widen(reinterpret_cast<const T*>(parts[0])[i]);
    for (int p = 1; p < num_parts; ++p) sum += widen(reinterpret_cast<const T*>(parts[p])[i]);
    assign(result + i, sum);
  }
}

template <int W>
MOESERVE_INLINE void add_elements(Element element, const char* const* parts, int num_parts, char* out, int64_t bytes) {
  if (element == Element::kBFloat16) {
    add_all<W, BFloat16>(parts, num_parts, out, bytes / 2);
  } else {
    add_all<W, float>(parts, num_parts, out, bytes / 4);
  }
}

MOESERVE_DEFINE_VARIANTS(add_elements,
                         (Element element, const char* const* parts, int num_parts, char* out, int64_t bytes),
                         (element, parts, num_parts, out, bytes))

}  // namespace

void add_in_order(Element element, const std::vector<const char*>& parts, char* out, int64_t num_bytes) {
  const int num_parts = static_cast<int>(parts.size());
  const auto add = choose_add_elements(current_isa());
  add(element, parts.data(), num_parts, out, num_bytes);
}

// --- layout of the memory

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

int64_t SharedMemory::num_bytes(int num_ranks, Slots slots) {
  const int64_t lines = 1 + num_ranks + num_ranks * slots.num_slots;
  return rounded_up(lines * kLine, kPage) + slots.num_slots * slots.slot_bytes;
}

SharedMemory::SharedMemory(int rank, const std::vector<int>& memory_fds, const std::vector<int>& sockets, Slots slots,
                           double spin_s)
    : rank_(rank),
      num_ranks_(static_cast<int>(memory_fds.size())),
      slots_(slots),
      spin_s_(spin_s),
      sockets_(sockets),
      is_dead_(memory_fds.size(), 0),
      receiving_(memory_fds.size(), 1),
      num_messages_(memory_fds.size(), 0),
      num_read_(memory_fds.size(), 0),
      uses_(slots.num_slots * memory_fds.size(), 0),
      woken_at_(memory_fds.size(), 0) {
  const int64_t size = num_bytes(num_ranks_, slots_);
  const auto clean_up_and_throw = [&](const std::string& why) {
    for (const Memory& memory : memories_) munmap(memory.start, size);
    throw std::runtime_error(why);
  };
  if (slots_.num_slots < 1 || slots_.slot_bytes % kLine != 0 || slots_.slot_bytes < kLine * num_ranks_) {
    clean_up_and_throw("a slot must hold a cache line for each rank");
  }
  for (int fd : memory_fds) {
    struct stat found;
    if (fstat(fd, &found) != 0 || found.st_size < size)
      clean_up_and_throw("a rank's memory is smaller than it must be");
    void* const start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (start == MAP_FAILED)
      clean_up_and_throw(std::string("a rank's memory cannot be mapped: ") + std::strerror(errno));
    Memory memory;
    memory.start = static_cast<char*>(start);
    memory.doorbell = reinterpret_cast<Doorbell*>(memory.start);
    memory.acknowledgements = reinterpret_cast<Acknowledgement*>(memory.start + kLine);
    memory.messages = reinterpret_cast<Message*>(memory.start + kLine * (1 + num_ranks_));
    memory.slots = memory.start + size - slots_.num_slots * slots_.slot_bytes;
    memories_.push_back(memory);
  }
}

SharedMemory::~SharedMemory() { close(); }

void SharedMemory::close() {
  if (is_closing_.exchange(true)) return;
  leave();
  ring(rank_);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Memory& memory : memories_) munmap(memory.start, num_bytes(num_ranks_, slots_));
}

void SharedMemory::leave() {
  memories_[rank_].doorbell->has_left.store(1, std::memory_order_release);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank != rank_) ring(rank);
  }
}

Outcome SharedMemory::fail(Outcome outcome, std::vector<int> absent) {
  failure_ = outcome;
  absent_ = std::move(absent);
  leave();
  return outcome;
}

// --- operations

SharedMemory::Operation& SharedMemory::new_operation() {
  if (is_closing_) throw std::runtime_error("this rank has left the group");
  if (spare_.empty()) {
    operations_.emplace_back();
  } else {
    operations_.push_back(std::move(spare_.back()));
    spare_.pop_back();
  }
  Operation& operation = operations_.back();
  std::vector<Part> parts = std::move(operation.parts);
  parts.assign(num_ranks_, Part{});
  operation = Operation{};
  operation.parts = std::move(parts);
  operation.number = next_number_++;
  return operation;
}

// The data of this rank for itself is copied from source to target directly.
uint64_t SharedMemory::start(Operation& operation, const char* own_source, char* own_target, int64_t own_bytes) {
  operation.parts[rank_] = Part{};
  int num_readers = 0;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    Part& part = operation.parts[rank];
    part.is_open = rank != rank_;
    operation.longest = std::max(operation.longest, part.to_send);
    num_readers += part.to_send > 0;
  }
  operation.num_missing = num_ranks_ - 1;
  // All ranks of a sum must cut the data at the same places.
  const int num_shares = operation.sends_same ? 1 : operation.adds ? num_ranks_ - 1 : std::max(1, num_readers);
  operation.share = std::max<int64_t>(kLine, slots_.slot_bytes / num_shares / kLine * kLine);
  const uint64_t number = operation.number;
  if (failure_ == Outcome::kDone) send_some();  // the other ranks can already read this part
  if (own_bytes > 0 && own_source != own_target) std::memcpy(own_target, own_source, own_bytes);
  return number;
}

uint64_t SharedMemory::begin_exchange(const char* sent, const std::vector<int64_t>& send_bytes, char* received,
                                      const std::vector<int64_t>& receive_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Operation& operation = new_operation();
  const char* own_source = nullptr;
  char* own_target = nullptr;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    operation.parts[rank] = {sent, send_bytes[rank], received, receive_bytes[rank], 0, true};
    if (rank == rank_) {
      own_source = sent;
      own_target = received;
    }
    sent += send_bytes[rank];
    received += receive_bytes[rank];
  }
  return start(operation, own_source, own_target, send_bytes[rank_]);
}

uint64_t SharedMemory::begin_gather(const char* sent, char* received, const std::vector<int64_t>& bytes_of_rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Operation& operation = new_operation();
  operation.sends_same = true;
  char* own_target = nullptr;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    operation.parts[rank] = {sent, bytes_of_rank[rank_], received, bytes_of_rank[rank], 0, true};
    if (rank == rank_) own_target = received;
    received += bytes_of_rank[rank];
  }
  return start(operation, sent, own_target, bytes_of_rank[rank_]);
}

uint64_t SharedMemory::begin_sum_of_parts(Element element, const char* sent, char* out,
                                          const std::vector<int64_t>& bytes_of_rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Operation& operation = new_operation();
  operation.adds = true;
  operation.element = element;
  operation.out = out;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    operation.parts[rank] = {sent, bytes_of_rank[rank], nullptr, bytes_of_rank[rank_], 0, true};
    if (rank == rank_) operation.own = sent;
    sent += bytes_of_rank[rank];
  }
  return start(operation, nullptr, nullptr, 0);
}

uint64_t SharedMemory::begin_sum(Element element, const char* sent, char* out, int64_t num_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Operation& operation = new_operation();
  operation.sends_same = true;
  operation.adds = true;
  operation.element = element;
  operation.out = out;
  operation.own = sent;
  operation.parts.assign(num_ranks_, {sent, num_bytes, nullptr, num_bytes, 0, true});
  return start(operation, nullptr, nullptr, 0);
}

bool SharedMemory::is_done(uint64_t number) const {
  if (!is_sent(number)) return false;
  return number < first_number() || operations_[number - first_number()].num_missing == 0;
}

bool SharedMemory::progress() {
  bool has_moved = false;
  while (send_some() | receive_some()) has_moved = true;
  while (!operations_.empty() && is_done(operations_.front().number)) {
    spare_.push_back(std::move(operations_.front()));
    operations_.pop_front();
  }
  return has_moved;
}

// --- sending

bool SharedMemory::can_still_read(int rank) const {
  return !is_dead_[rank] && !memories_[rank].doorbell->has_left.load(std::memory_order_acquire);
}

bool SharedMemory::is_free(int64_t slot) {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    uint64_t& use = uses_[slot * num_ranks_ + rank];
    if (use == 0) continue;
    const uint64_t num_read = memories_[rank].acknowledgements[rank_].num_read.load(std::memory_order_acquire);
    if (num_read < use && can_still_read(rank)) return false;
    use = 0;
  }
  return true;
}

bool SharedMemory::send_some() {
  bool has_moved = false;
  while (sending_ < next_number_) {
    Operation& operation = operations_[sending_ - first_number()];
    while (operation.num_sent < operation.longest) {
      if (!is_free(static_cast<int64_t>(num_chunks_ % slots_.num_slots))) return has_moved;
      send_chunk(operation);
      has_moved = true;
    }
    ++sending_;
    has_moved = true;
  }
  return has_moved;
}

void SharedMemory::send_chunk(Operation& operation) {
  const int64_t slot = static_cast<int64_t>(num_chunks_ % slots_.num_slots);
  const Memory& mine = memories_[rank_];
  const bool is_first = operation.num_sent == 0;
  int64_t offset = slot * slots_.slot_bytes;
  for (int step = 1; step < num_ranks_; ++step) {  // each rank starts with a different reader
    const int reader = (rank_ + step) % num_ranks_;
    const Part& part = operation.parts[reader];
    const int64_t num_bytes = std::max<int64_t>(0, std::min(operation.share, part.to_send - operation.num_sent));
    if (num_bytes == 0 && !is_first) continue;
    if (num_bytes > 0 && (!operation.sends_same || step == 1)) {
      std::memcpy(mine.slots + offset, part.source + operation.num_sent, num_bytes);
    }
    const uint64_t number = ++num_messages_[reader];
    Message& message = mine.messages[reader * slots_.num_slots + (number - 1) % slots_.num_slots];
    message.operation = operation.number;
    message.adds = operation.adds;
    message.offset = offset;
    message.num_bytes = num_bytes;
    message.number.store(number, std::memory_order_release);
    uses_[slot * num_ranks_ + reader] = number;
    if (!operation.sends_same) offset += rounded_up(num_bytes, kLine);
  }
  operation.num_sent += operation.share;
  ++num_chunks_;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int reader = 0; reader < num_ranks_; ++reader) {
    if (uses_[slot * num_ranks_ + reader] != 0) wake(reader, kAnyEvent | bit_of(rank_));
  }
}

// --- receiving

const SharedMemory::Message& SharedMemory::message_from(int rank) const {
  return memories_[rank].messages[rank_ * slots_.num_slots + num_read_[rank] % slots_.num_slots];
}

bool SharedMemory::has_message(int rank) const {
  return message_from(rank).number.load(std::memory_order_acquire) == num_read_[rank] + 1;
}

// Return the operation of the next message of `rank`, or null if it has not begun here.
SharedMemory::Operation* SharedMemory::expected_from(int rank) {
  uint64_t& number = receiving_[rank];
  number = std::max(number, first_number());
  for (; number < next_number_; ++number) {
    Operation& operation = operations_[number - first_number()];
    if (operation.parts[rank].is_open) return &operation;
  }
  return nullptr;
}

void SharedMemory::check_message(int rank, const Message& message, const Operation& operation, int64_t left) {
  const bool fits = message.operation == operation.number && (message.adds != 0) == operation.adds &&
                    (left == 0 ? message.num_bytes == 0 : message.num_bytes > 0) && message.num_bytes <= left &&
                    message.offset >= 0 && message.offset <= slots_.num_slots * slots_.slot_bytes - message.num_bytes;
  if (!fits && failure_ == Outcome::kDone) fail(Outcome::kMismatch, {rank});
}

bool SharedMemory::receive_some() {
  bool has_moved = false;
  for (int step = 1; step < num_ranks_; ++step) {
    const int rank = (rank_ + num_ranks_ - step) % num_ranks_;  // ranks that sent to this rank first
    while (failure_ == Outcome::kDone && has_message(rank)) {
      Operation* const operation = expected_from(rank);
      if (operation == nullptr || !receive_message(rank, *operation)) break;
      has_moved = true;
    }
  }
  if (!has_moved) return false;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank != rank_) wake(rank, kAnyEvent);  // it may be waiting for a free slot
  }
  return true;
}

// Returns false if the message cannot be used yet.
bool SharedMemory::receive_message(int rank, Operation& operation) {
  Part& part = operation.parts[rank];
  const Message& message = message_from(rank);
  const int64_t num_bytes = message.num_bytes;
  check_message(rank, message, operation, part.to_receive - part.received);
  if (failure_ != Outcome::kDone) return false;
  if (operation.adds) return add_chunk(operation);
  if (num_bytes > 0) std::memcpy(part.target + part.received, memories_[rank].slots + message.offset, num_bytes);
  record_received(operation, part, num_bytes);
  memories_[rank_].acknowledgements[rank].num_read.store(++num_read_[rank], std::memory_order_release);
  return true;
}

void SharedMemory::record_received(Operation& operation, Part& part, int64_t num_bytes) {
  part.received += num_bytes;
  part.is_open = part.received < part.to_receive;
  operation.num_missing -= !part.is_open;
}

bool SharedMemory::add_chunk(Operation& operation) {
  addends_.assign(num_ranks_, operation.own + operation.num_added);
  int64_t num_bytes = -1;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank == rank_) continue;
    if (!has_message(rank) || expected_from(rank) != &operation) return false;
    const Part& part = operation.parts[rank];
    const Message& message = message_from(rank);
    check_message(rank, message, operation, part.to_receive - part.received);
    if (num_bytes < 0) num_bytes = message.num_bytes;
    if (message.num_bytes != num_bytes && failure_ == Outcome::kDone) fail(Outcome::kMismatch, {rank});
    if (failure_ != Outcome::kDone) return false;
    addends_[rank] = memories_[rank].slots + message.offset;
  }
  add_in_order(operation.element, addends_, operation.out + operation.num_added, num_bytes);
  operation.num_added += num_bytes;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank == rank_) continue;
    Part& part = operation.parts[rank];
    record_received(operation, part, num_bytes);
    memories_[rank_].acknowledgements[rank].num_read.store(++num_read_[rank], std::memory_order_release);
  }
  return true;
}

// --- waiting

void SharedMemory::begin_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  first_of_step_ = next_number_;
}

std::vector<double> SharedMemory::seconds_waited() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return seconds_waited_;
}

Outcome SharedMemory::wait(uint64_t number, double timeout_s, bool is_measured) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Operations from before the step have a huge index and are not measured.
  const uint64_t index = is_measured ? number - first_of_step_ : kMaxIndex;
  if (index >= seconds_waited_.size() && index < kMaxIndex) seconds_waited_.resize(index + 1);
  Stopwatch stopwatch(seconds_waited_, index);
  double deadline = 0;
  while (true) {
    if (is_closing_) return Outcome::kClosed;
    if (failure_ != Outcome::kDone) return failure_;
    progress();
    if (failure_ != Outcome::kDone) return failure_;
    if (is_done(number)) return is_closing_ ? Outcome::kClosed : Outcome::kDone;
    if (deadline == 0) {
      stopwatch.begin();
      deadline = now() + timeout_s;
      if (last_waited_ != number) check_interval_ = kFirstCheck_s;
      last_waited_ = number;
      next_check_ = now() + check_interval_;
    }
    if (spin()) continue;
    if (failure_ != Outcome::kDone) return failure_;
    if (!lost_ranks(number).empty()) {
      progress();  // read what they sent before they left
      const std::vector<int> still_lost = lost_ranks(number);
      if (!still_lost.empty()) return fail(Outcome::kLost, still_lost);
      continue;
    }
    const double remaining_s = deadline - now();
    if (remaining_s <= 0) return fail(Outcome::kTimeout, missing_ranks(number));
    if (!sleep(number, remaining_s)) return Outcome::kInterrupted;
    if (now() >= next_check_) {
      find_dead_ranks();
      check_interval_ = std::min(2 * check_interval_, kLastCheck_s);
      return Outcome::kInterrupted;
    }
  }
}

bool SharedMemory::spin() {
  const bool is_trial = num_failed_spins_ < kMaxFailedSpins || num_failed_spins_ % kWaitsPerTrial == 0;
  const double deadline = is_trial ? now() + spin_s_ : 0;
  do {
    for (int i = 0; i < kSpinsPerClockRead; ++i) {
      if (progress()) {
        num_failed_spins_ = 0;
        return true;
      }
      pause_briefly();
    }
  } while (is_trial && now() < deadline && failure_ == Outcome::kDone);
  ++num_failed_spins_;
  return false;
}

// Sleep until all ranks with missing data have sent some. A rank that still has data to send but no free slot wakes on
// any event instead, because others may be waiting for its data.
bool SharedMemory::sleep(uint64_t number, double remaining_s) {
  Doorbell& doorbell = *memories_[rank_].doorbell;
  const uint32_t seen = doorbell.num_rings.load(std::memory_order_acquire);
  const bool has_unsent = sending_ < next_number_;
  uint64_t awaited = 0;
  if (!has_unsent) {
    for (int rank : missing_ranks(number)) awaited |= bit_of(rank);
  }
  doorbell.awaited.store(awaited == 0 ? kAnyEvent : awaited, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool has_moved = progress();
  bool is_uninterrupted = true;
  if (!has_moved && failure_ == Outcome::kDone && !is_closing_ && lost_ranks(number).empty()) {
    if (has_unsent) {
      // A sleeping reader must free a slot first: it may be waiting for data that this rank cannot send yet.
      const int64_t slot = static_cast<int64_t>(num_chunks_ % slots_.num_slots);
      for (int rank = 0; rank < num_ranks_; ++rank) {
        if (uses_[slot * num_ranks_ + rank] == 0 || woken_at_[rank] == num_chunks_ + 1) continue;
        woken_at_[rank] = num_chunks_ + 1;
        if (memories_[rank].doorbell->awaited.load(std::memory_order_relaxed) != 0) ring(rank);
      }
    }
    is_uninterrupted = futex_wait(doorbell.num_rings, seen, std::min(remaining_s, check_interval_));
  }
  doorbell.awaited.store(0, std::memory_order_relaxed);
  return is_uninterrupted;
}

// Clear this rank in the set for which another rank waits, and wake it if the set is now empty.
void SharedMemory::wake(int rank, uint64_t what) {
  Doorbell& doorbell = *memories_[rank].doorbell;
  const uint64_t awaited = doorbell.awaited.load(std::memory_order_relaxed);
  if ((awaited & what) == 0) return;
  // The owner may have gone to sleep again in between. It is then woken too early, which is harmless, but never too
  // late: the rank that clears the last bit rings.
  if (awaited & kAnyEvent) {
    if (doorbell.awaited.exchange(0, std::memory_order_acq_rel) != 0) ring(rank);
  } else if (doorbell.awaited.fetch_and(~bit_of(rank_), std::memory_order_acq_rel) == bit_of(rank_)) {
    ring(rank);
  }
}

void SharedMemory::ring(int rank) {
  std::atomic<uint32_t>& num_rings = memories_[rank].doorbell->num_rings;
  num_rings.fetch_add(1, std::memory_order_acq_rel);
  futex_wake(num_rings);
}

void SharedMemory::find_dead_ranks() {
  std::vector<pollfd> polled;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    polled.push_back({rank == rank_ ? -1 : sockets_[rank], POLLRDHUP, 0});
  }
  if (poll(polled.data(), polled.size(), 0) <= 0) return;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (polled[rank].revents != 0) is_dead_[rank] = 1;
  }
}

// Return the ranks whose data or acknowledgement is missing.
std::vector<int> SharedMemory::missing_ranks(uint64_t number) {
  std::vector<int> ranks;
  if (is_done(number)) return ranks;
  const uint64_t first = first_number();
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank == rank_) continue;
    bool is_missing = false;
    if (number >= first) {
      is_missing = operations_[number - first].parts[rank].is_open && !has_message(rank);
    }
    if (!is_sent(number)) {
      const uint64_t use = uses_[num_chunks_ % slots_.num_slots * num_ranks_ + rank];
      is_missing |= memories_[rank].acknowledgements[rank_].num_read.load(std::memory_order_acquire) < use;
    }
    if (is_missing) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<int> SharedMemory::lost_ranks(uint64_t number) {
  std::vector<int> ranks;
  if (number < first_number()) return ranks;
  const Operation& operation = operations_[number - first_number()];
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (operation.parts[rank].is_open && !can_still_read(rank) && !has_message(rank)) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace moeserve

#endif  // __linux__
