// The order of things between two ranks: a writer fills a slot, then stores the note's number (release); a reader loads
// that number (acquire), uses the slot, then stores its mark (release); the writer loads the mark (acquire) before it
// uses the slot again.
//
// Sleeping: whoever goes to sleep stores in its bell whom it waits for, and only then looks a last time. Whoever has
// something new stores it, and only then looks into the bell. Between the two stands a full fence on both sides, so at
// least one of them sees the other.

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
#include "cpu/lanes.h"
#include "pause.h"

namespace moeserve {

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kPage = 4096;

// How often a sleeper looks whether others are still there: at first, and when it has waited for long.
constexpr double kFirstLook_s = 0.01;
constexpr double kLastLook_s = 0.05;

// Looking for news before sleeping pays where the others have cores of their own, free ones. After some times in vain
// it is tried seldom only, until it helps again.
constexpr int kSpinsPerClockRead = 32;
constexpr uint64_t kVainSpins = 4;
constexpr uint64_t kWaitsPerTrial = 16;

// Operations of a step whose waits are measured: those with a smaller index.
constexpr uint64_t kMaxIndex = 4096;

// Of a bell: wake at whatever happens. The other bits are ranks, modulo kAnything's place.
constexpr int kRankBits = 63;
constexpr uint64_t kAnything = uint64_t{1} << kRankBits;

uint64_t bit_of(int rank) { return uint64_t{1} << (rank % kRankBits); }

int64_t rounded_up(int64_t num_bytes, int64_t unit) { return (num_bytes + unit - 1) / unit * unit; }

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Adds the time since `begin`, if that was called, to one of the totals, if there is one of this number.
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

// Waits until the word is woken, unless it is no longer `seen`. False: a signal came.
bool futex_wait(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
  timespec time;
  time.tv_sec = static_cast<time_t>(seconds);
  time.tv_nsec = static_cast<long>((seconds - static_cast<double>(time.tv_sec)) * 1e9);
  return syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0) == 0 || errno != EINTR;
}

void futex_wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0); }

// --- adding

template <int W>
MOESERVE_INLINE void store_pair(float* out, Pair<W> sum) {
  store<W>(out, sum.first);
  store<W>(out + W, sum.second);
}

template <int W>
MOESERVE_INLINE typename Vector<W>::UInt rounded_bits(Float<W> value) {
  using UInt = typename Vector<W>::UInt;
  const UInt bits = reinterpret_cast<UInt>(value);
  const UInt rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  const UInt quiet_nan = bits | 0x400000u;
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded;
}

// As `assign` does with each element.
template <int W>
MOESERVE_INLINE void store_pair(BFloat16* out, Pair<W> sum) {
  const typename Vector<W>::UInt words =
      (rounded_bits<W>(sum.first) >> 16) | (rounded_bits<W>(sum.second) & 0xFFFF0000u);
  std::memcpy(out, &words, sizeof(words));
}

MOESERVE_INLINE float widened(float value) { return value; }

MOESERVE_INLINE float widened(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

// The same additions for each element whatever W is.
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
    store_pair<W>(result + i, sum);
  }
  for (; i < num_elements; ++i) {
    float sum = widened(reinterpret_cast<const T*>(parts[0])[i]);
    for (int p = 1; p < num_parts; ++p) sum += widened(reinterpret_cast<const T*>(parts[p])[i]);
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

void add_baseline(Element element, const char* const* parts, int num_parts, char* out, int64_t bytes) {
  add_elements<4>(element, parts, num_parts, out, bytes);
}

#if defined(MOESERVE_X86)
MOESERVE_TARGET_AVX2 void add_avx2(Element element, const char* const* parts, int num_parts, char* out, int64_t bytes) {
  add_elements<8>(element, parts, num_parts, out, bytes);
}

MOESERVE_TARGET_AVX512 void add_avx512(Element element, const char* const* parts, int num_parts, char* out,
                                       int64_t bytes) {
  add_elements<16>(element, parts, num_parts, out, bytes);
}
#endif

}  // namespace

void add_in_order(Element element, const std::vector<const char*>& parts, char* out, int64_t num_bytes) {
  const int num_parts = static_cast<int>(parts.size());
#if defined(MOESERVE_X86)
  const auto add = choose_version(current_isa(), add_baseline, add_avx2, add_avx512);
#else
  const auto add = add_baseline;
#endif
  add(element, parts.data(), num_parts, out, num_bytes);
}

// --- what lies in a memory

struct alignas(kLine) SharedMemory::Bell {
  std::atomic<uint32_t> num_rings;
  std::atomic<uint32_t> has_left;
  std::atomic<uint64_t> awaited;  // 0: the owner is awake. Whoever makes it 0 rings.
};

struct alignas(kLine) SharedMemory::Mark {
  std::atomic<uint64_t> num_read;
};

struct alignas(kLine) SharedMemory::Note {
  std::atomic<uint64_t> number;  // counts the notes to this reader, from 1; written last
  uint64_t operation;
  uint64_t adds;
  int64_t offset;  // from the first slot
  int64_t num_bytes;
};

struct SharedMemory::Memory {
  char* start;
  Bell* bell;
  Mark* marks;  // by rank
  Note* notes;  // [rank][num_slots]
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
      is_gone_(memory_fds.size(), 0),
      receiving_(memory_fds.size(), 1),
      num_notes_(memory_fds.size(), 0),
      num_read_(memory_fds.size(), 0),
      uses_(slots.num_slots * memory_fds.size(), 0),
      nudged_at_(memory_fds.size(), 0) {
  const int64_t size = num_bytes(num_ranks_, slots_);
  const auto give_up = [&](const std::string& why) {
    for (const Memory& memory : memories_) munmap(memory.start, size);
    throw std::runtime_error(why);
  };
  if (slots_.num_slots < 1 || slots_.slot_bytes % kLine != 0 || slots_.slot_bytes < kLine * num_ranks_) {
    give_up("a slot must have a share of a cache line for each rank");
  }
  for (int fd : memory_fds) {
    struct stat found;
    if (fstat(fd, &found) != 0 || found.st_size < size) give_up("a rank's memory is smaller than it must be");
    void* const start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (start == MAP_FAILED) give_up(std::string("a rank's memory cannot be mapped: ") + std::strerror(errno));
    Memory memory;
    memory.start = static_cast<char*>(start);
    memory.bell = reinterpret_cast<Bell*>(memory.start);
    memory.marks = reinterpret_cast<Mark*>(memory.start + kLine);
    memory.notes = reinterpret_cast<Note*>(memory.start + kLine * (1 + num_ranks_));
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
  memories_[rank_].bell->has_left.store(1, std::memory_order_release);
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

// Own bytes never travel: they are copied from one to the other, if these are not the same.
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
  // Ranks that add up what comes must all have cut it in the same places.
  const int num_shares = operation.sends_same ? 1 : operation.adds ? num_ranks_ - 1 : std::max(1, num_readers);
  operation.share = std::max<int64_t>(kLine, slots_.slot_bytes / num_shares / kLine * kLine);
  const uint64_t number = operation.number;
  if (failure_ == Outcome::kDone)
    send_some();  // with what is on its way to the others, they need not wait for the rest
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
  return !is_gone_[rank] && !memories_[rank].bell->has_left.load(std::memory_order_acquire);
}

bool SharedMemory::is_free(int64_t slot) {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    uint64_t& use = uses_[slot * num_ranks_ + rank];
    if (use == 0) continue;
    const uint64_t num_read = memories_[rank].marks[rank_].num_read.load(std::memory_order_acquire);
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
  for (int step = 1; step < num_ranks_; ++step) {  // each rank begins with another reader
    const int reader = (rank_ + step) % num_ranks_;
    const Part& part = operation.parts[reader];
    const int64_t num_bytes = std::max<int64_t>(0, std::min(operation.share, part.to_send - operation.num_sent));
    if (num_bytes == 0 && !is_first) continue;
    if (num_bytes > 0 && (!operation.sends_same || step == 1)) {
      std::memcpy(mine.slots + offset, part.source + operation.num_sent, num_bytes);
    }
    const uint64_t number = ++num_notes_[reader];
    Note& note = mine.notes[reader * slots_.num_slots + (number - 1) % slots_.num_slots];
    note.operation = operation.number;
    note.adds = operation.adds;
    note.offset = offset;
    note.num_bytes = num_bytes;
    note.number.store(number, std::memory_order_release);
    uses_[slot * num_ranks_ + reader] = number;
    if (!operation.sends_same) offset += rounded_up(num_bytes, kLine);
  }
  operation.num_sent += operation.share;
  ++num_chunks_;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int reader = 0; reader < num_ranks_; ++reader) {
    if (uses_[slot * num_ranks_ + reader] != 0) wake(reader, kAnything | bit_of(rank_));
  }
}

// --- receiving

const SharedMemory::Note& SharedMemory::note_from(int rank) const {
  return memories_[rank].notes[rank_ * slots_.num_slots + num_read_[rank] % slots_.num_slots];
}

bool SharedMemory::has_note(int rank) const {
  return note_from(rank).number.load(std::memory_order_acquire) == num_read_[rank] + 1;
}

// The operation to which the rank's next note must belong, if it has been begun here.
SharedMemory::Operation* SharedMemory::expected_from(int rank) {
  uint64_t& number = receiving_[rank];
  number = std::max(number, first_number());
  for (; number < next_number_; ++number) {
    Operation& operation = operations_[number - first_number()];
    if (operation.parts[rank].is_open) return &operation;
  }
  return nullptr;
}

void SharedMemory::check_note(int rank, const Note& note, const Operation& operation, int64_t left) {
  const bool fits = note.operation == operation.number && (note.adds != 0) == operation.adds &&
                    (left == 0 ? note.num_bytes == 0 : note.num_bytes > 0) && note.num_bytes <= left &&
                    note.offset >= 0 && note.offset <= slots_.num_slots * slots_.slot_bytes - note.num_bytes;
  if (!fits && failure_ == Outcome::kDone) fail(Outcome::kDisagree, {rank});
}

bool SharedMemory::receive_some() {
  bool has_moved = false;
  for (int step = 1; step < num_ranks_; ++step) {
    const int rank = (rank_ + num_ranks_ - step) % num_ranks_;  // those who began with this rank come first
    while (failure_ == Outcome::kDone && has_note(rank)) {
      Operation* const operation = expected_from(rank);
      if (operation == nullptr || !receive_note(rank, *operation)) break;
      has_moved = true;
    }
  }
  if (!has_moved) return false;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank != rank_) wake(rank, kAnything);  // it may wait for a free slot
  }
  return true;
}

// False: it cannot be used yet.
bool SharedMemory::receive_note(int rank, Operation& operation) {
  Part& part = operation.parts[rank];
  const Note& note = note_from(rank);
  const int64_t num_bytes = note.num_bytes;
  check_note(rank, note, operation, part.to_receive - part.received);
  if (failure_ != Outcome::kDone) return false;
  if (operation.adds) return add_chunk(operation);
  if (num_bytes > 0) std::memcpy(part.target + part.received, memories_[rank].slots + note.offset, num_bytes);
  take(operation, part, num_bytes);
  memories_[rank_].marks[rank].num_read.store(++num_read_[rank], std::memory_order_release);
  return true;
}

void SharedMemory::take(Operation& operation, Part& part, int64_t num_bytes) {
  part.received += num_bytes;
  part.is_open = part.received < part.to_receive;
  operation.num_missing -= !part.is_open;
}

bool SharedMemory::add_chunk(Operation& operation) {
  addends_.assign(num_ranks_, operation.own + operation.num_added);
  int64_t num_bytes = -1;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank == rank_) continue;
    if (!has_note(rank) || expected_from(rank) != &operation) return false;
    const Part& part = operation.parts[rank];
    const Note& note = note_from(rank);
    check_note(rank, note, operation, part.to_receive - part.received);
    if (num_bytes < 0) num_bytes = note.num_bytes;
    if (note.num_bytes != num_bytes && failure_ == Outcome::kDone) fail(Outcome::kDisagree, {rank});
    if (failure_ != Outcome::kDone) return false;
    addends_[rank] = memories_[rank].slots + note.offset;
  }
  add_in_order(operation.element, addends_, operation.out + operation.num_added, num_bytes);
  operation.num_added += num_bytes;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank == rank_) continue;
    Part& part = operation.parts[rank];
    take(operation, part, num_bytes);
    memories_[rank_].marks[rank].num_read.store(++num_read_[rank], std::memory_order_release);
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
  // An operation begun before the step has too large an index, and is not measured.
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
      if (waited_for_ != number) look_interval_ = kFirstLook_s;
      waited_for_ = number;
      next_look_ = now() + look_interval_;
    }
    if (spin()) continue;
    if (failure_ != Outcome::kDone) return failure_;
    if (!lost(number).empty()) {
      progress();  // what they sent before they went is seen now, if not before
      const std::vector<int> still_lost = lost(number);
      if (!still_lost.empty()) return fail(Outcome::kLost, still_lost);
      continue;
    }
    const double left_s = deadline - now();
    if (left_s <= 0) return fail(Outcome::kTimeout, missing(number));
    if (!sleep(number, left_s)) return Outcome::kInterrupted;
    if (now() >= next_look_) {
      look_for_the_gone();
      look_interval_ = std::min(2 * look_interval_, kLastLook_s);
      return Outcome::kInterrupted;
    }
  }
}

bool SharedMemory::spin() {
  const bool is_trial = num_vain_spins_ < kVainSpins || num_vain_spins_ % kWaitsPerTrial == 0;
  const double deadline = is_trial ? now() + spin_s_ : 0;
  do {
    for (int i = 0; i < kSpinsPerClockRead; ++i) {
      if (progress()) {
        num_vain_spins_ = 0;
        return true;
      }
      pause_briefly();
    }
  } while (is_trial && now() < deadline && failure_ == Outcome::kDone);
  ++num_vain_spins_;
  return false;
}

// Sleeps until all of those have sent something from whom something is missing. A rank that still has to send, and has
// no free slot, wakes at whatever happens instead: others may wait for what it has not sent.
bool SharedMemory::sleep(uint64_t number, double left_s) {
  Bell& bell = *memories_[rank_].bell;
  const uint32_t seen = bell.num_rings.load(std::memory_order_acquire);
  const bool has_unsent = sending_ < next_number_;
  uint64_t awaited = 0;
  if (!has_unsent) {
    for (int rank : missing(number)) awaited |= bit_of(rank);
  }
  bell.awaited.store(awaited == 0 ? kAnything : awaited, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool has_moved = progress();
  bool is_undisturbed = true;
  if (!has_moved && failure_ == Outcome::kDone && !is_closing_ && lost(number).empty()) {
    if (has_unsent) {
      // A reader that sleeps until others have sent as well must make room first, or those might never.
      const int64_t slot = static_cast<int64_t>(num_chunks_ % slots_.num_slots);
      for (int rank = 0; rank < num_ranks_; ++rank) {
        if (uses_[slot * num_ranks_ + rank] == 0 || nudged_at_[rank] == num_chunks_ + 1) continue;
        nudged_at_[rank] = num_chunks_ + 1;
        if (memories_[rank].bell->awaited.load(std::memory_order_relaxed) != 0) ring(rank);
      }
    }
    is_undisturbed = futex_wait(bell.num_rings, seen, std::min(left_s, look_interval_));
  }
  bell.awaited.store(0, std::memory_order_relaxed);
  return is_undisturbed;
}

// Wakes a rank that waits for one of these, if nothing else is left that it waits for.
void SharedMemory::wake(int rank, uint64_t what) {
  Bell& bell = *memories_[rank].bell;
  const uint64_t awaited = bell.awaited.load(std::memory_order_relaxed);
  if ((awaited & what) == 0) return;
  // The owner may have gone to sleep anew in between. Then it is woken too early, which does no harm; never too late,
  // since whoever makes the last bit vanish rings.
  if (awaited & kAnything) {
    if (bell.awaited.exchange(0, std::memory_order_acq_rel) != 0) ring(rank);
  } else if (bell.awaited.fetch_and(~bit_of(rank_), std::memory_order_acq_rel) == bit_of(rank_)) {
    ring(rank);
  }
}

void SharedMemory::ring(int rank) {
  std::atomic<uint32_t>& num_rings = memories_[rank].bell->num_rings;
  num_rings.fetch_add(1, std::memory_order_acq_rel);
  futex_wake(num_rings);
}

void SharedMemory::look_for_the_gone() {
  std::vector<pollfd> polled;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    polled.push_back({rank == rank_ ? -1 : sockets_[rank], POLLRDHUP, 0});
  }
  if (poll(polled.data(), polled.size(), 0) <= 0) return;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (polled[rank].revents != 0) is_gone_[rank] = 1;
  }
}

// Ranks from which something must come, and nothing has.
std::vector<int> SharedMemory::missing(uint64_t number) {
  std::vector<int> ranks;
  if (is_done(number)) return ranks;
  const uint64_t first = first_number();
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank == rank_) continue;
    bool is_missing = false;
    if (number >= first) {
      is_missing = operations_[number - first].parts[rank].is_open && !has_note(rank);
    }
    if (!is_sent(number)) {
      const uint64_t use = uses_[num_chunks_ % slots_.num_slots * num_ranks_ + rank];
      is_missing |= memories_[rank].marks[rank_].num_read.load(std::memory_order_acquire) < use;
    }
    if (is_missing) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<int> SharedMemory::lost(uint64_t number) {
  std::vector<int> ranks;
  if (number < first_number()) return ranks;
  const Operation& operation = operations_[number - first_number()];
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (operation.parts[rank].is_open && !can_still_read(rank) && !has_note(rank)) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace moeserve

#endif  // __linux__
