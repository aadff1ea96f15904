// Sending and receiving: operations, their messages and the sums.

#include "shared_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "add_in_tree.h"
#include "progress_record.h"
#include "shared_memory_layout.h"

namespace moeserve {

namespace {

constexpr int64_t kPage = 4096;

int64_t rounded_up(int64_t num_bytes, int64_t unit) { return (num_bytes + unit - 1) / unit * unit; }

}  // namespace

// --- layout of the memory

int64_t SharedMemory::num_bytes(int num_ranks, Slots slots) {
  const int64_t lines = 1 + num_ranks + num_ranks * slots.num_slots;
  return rounded_up(lines * kLine, kPage) + slots.num_slots * slots.slot_bytes;
}

SharedMemory::SharedMemory(int rank, const std::vector<int>& memory_fds, const std::vector<int>& sockets, Slots slots,
                           double spin_s, bool naps)
    : rank_(rank),
      num_ranks_(static_cast<int>(memory_fds.size())),
      slots_(slots),
      spin_s_(spin_s),
      naps_(naps),
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
  count(progress_record().num_collectives);
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

uint64_t SharedMemory::begin_sum_of_parts(ElementType element, const char* sent, ElementType out_element, char* out,
                                          const std::vector<int64_t>& bytes_of_rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Operation& operation = new_operation();
  operation.adds = true;
  operation.element = element;
  operation.out_element = out_element;
  operation.out = out;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    operation.parts[rank] = {sent, bytes_of_rank[rank], nullptr, bytes_of_rank[rank_], 0, true};
    if (rank == rank_) operation.own = sent;
    sent += bytes_of_rank[rank];
  }
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
  char* const out =
      operation.out + operation.num_added / element_bytes(operation.element) * element_bytes(operation.out_element);
  add_in_tree(operation.element, addends_, operation.out_element, out, num_bytes);
  operation.num_added += num_bytes;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank == rank_) continue;
    Part& part = operation.parts[rank];
    record_received(operation, part, num_bytes);
    memories_[rank_].acknowledgements[rank].num_read.store(++num_read_[rank], std::memory_order_release);
  }
  return true;
}

}  // namespace moeserve
