#include "expert_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <system_error>

namespace moeserve {

namespace {

constexpr int64_t kPage = 4096;  // at whose multiples files are read without the page cache
constexpr int64_t kPieceBytes =
    1 << 18;  // of one read; one expert has several, because disks are fast with many reads at a time
constexpr float kHalfLife = 64;  // visits of a layer after which a visit counts half
constexpr float kAnyScore = std::numeric_limits<float>::infinity();
// A visit that reads many experts, such as that of a prompt, replaces experts that are worth more than its own only by
// this part of the slots. The rest of its experts pass through these slots.
constexpr size_t kStartedShare = 4;
constexpr int kEndOfFile = -1;  // in place of an errno
constexpr int kDamaged = -2;    // the same: the checksum differs
constexpr size_t kMaxErrors = 100;
constexpr std::chrono::milliseconds kPauses[] = {std::chrono::milliseconds(10), std::chrono::milliseconds(100)};

int64_t round_down(int64_t number) { return number / kPage * kPage; }
int64_t round_up(int64_t number) { return round_down(number + kPage - 1); }

std::string reason_of(int error) {
  if (error == kEndOfFile) return "the file ends before";
  if (error == kDamaged) return "its checksum differs: the file was changed, or the disk is damaged";
  return std::generic_category().message(error);
}

}  // namespace

uint64_t checksum(const void* data, int64_t num_bytes) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;  // multiplication by it is a bijection
  constexpr int kLanes = 8;
  uint64_t lanes[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8};
  const auto* bytes = static_cast<const unsigned char*>(data);
  int64_t place = 0;
  for (; place + kLanes * 8 <= num_bytes; place += kLanes * 8) {
    uint64_t words[kLanes];
    std::memcpy(words, bytes + place, sizeof(words));
    for (int i = 0; i < kLanes; ++i) {
      lanes[i] = (lanes[i] ^ words[i]) * kOdd;
      lanes[i] ^= lanes[i] >> 32;
    }
  }
  uint64_t sum = static_cast<uint64_t>(num_bytes);
  const auto add = [&](uint64_t word) {
    sum = (sum ^ word) * kOdd;
    sum ^= sum >> 32;
  };
  for (const uint64_t lane : lanes) add(lane);
  for (; place < num_bytes; ++place) add(bytes[place]);
  return sum;
}

ExpertStore::ExpertStore(const std::string& path, int num_readers) : path_(path) {
#if defined(O_DIRECT)
  file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
#endif
  if (file_ < 0) {
    is_direct_ = false;
    file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  }
  if (file_ < 0) throw std::system_error(errno, std::generic_category(), path);
  for (int i = 0; i < num_readers; ++i) readers_.emplace_back([this] { read_pieces(); });
}

ExpertStore::~ExpertStore() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
  }
  has_pieces_.notify_all();
  for (std::thread& reader : readers_) reader.join();
  for (const Layer& layer : layers_) munmap(layer.memory, layer.num_bytes);
  close(file_);
}

void ExpertStore::add_layer(std::vector<StoredExpert> experts, int num_slots) {
  Layer layer{};
  for (int part = 0; part < kExpertParts; ++part) {
    layer.first_byte[part] = layer.slot_bytes;
    int64_t room = 0;  // for the whole pages of the file that an expert touches
    for (const StoredExpert& stored : experts) {
      const int64_t first = round_down(stored[part].offset);
      room = std::max(room, round_up(stored[part].offset + stored[part].num_bytes) - first);
    }
    layer.slot_bytes += room;
  }
  layer.num_bytes = num_slots * layer.slot_bytes;
  void* memory = mmap(nullptr, layer.num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(memory, layer.num_bytes, MADV_HUGEPAGE);  // best effort
#endif
  layer.memory = static_cast<char*>(memory);
  for (int i = 0; i < num_slots; ++i) layer.slots.push_back({layer.memory + i * layer.slot_bytes});
  for (const StoredExpert& stored : experts) layer.experts.push_back({stored});
  layers_.push_back(std::move(layer));
}

void ExpertStore::visit(int layer_number, const std::vector<int>& experts, const Compute& compute) {
  const std::lock_guard<std::mutex> only(visit_);
  std::unique_lock<std::mutex> lock(mutex_);
  Layer& layer = layers_.at(layer_number);
  ++layer.num_visits;
  if (is_recording_) {
    recorded_.insert(recorded_.end(), {layer_number, static_cast<int>(experts.size())});
    recorded_.insert(recorded_.end(), experts.begin(), experts.end());
  }
  std::deque<int> missing;   // indices of experts that have no slot yet
  std::vector<int> waiting;  // indices of experts that have one, and are not computed
  for (size_t i = 0; i < experts.size(); ++i) {
    Expert& expert = layer.experts.at(experts[i]);
    expert.score = score_now(layer, expert) + 1;
    expert.last_visit = layer.num_visits;
    if (expert.slot < 0) {
      missing.push_back(static_cast<int>(i));
      ++layer.counters.num_misses;
    } else {
      layer.slots[expert.slot].is_needed = true;
      waiting.push_back(static_cast<int>(i));
      ++layer.counters.num_hits;
    }
  }
  std::vector<Ready> ready;
  size_t num_started = 0;  // experts that this visit has begun to read, and has not computed
  while (!missing.empty() || !waiting.empty()) {
    while (!missing.empty()) {
      const float score = layer.experts[experts[missing.front()]].score;
      const bool may_replace_better = num_started < std::max<size_t>(1, layer.slots.size() / kStartedShare);
      Slot* slot = choose_slot(layer, may_replace_better ? kAnyScore : score);
      if (slot == nullptr) break;
      ++num_started;
      start_reading(layer_number, experts[missing.front()], *slot);
      waiting.push_back(missing.front());
      missing.pop_front();
    }
    ready.clear();
    const auto rest = std::stable_partition(waiting.begin(), waiting.end(), [&](int index) {
      return layer.slots[layer.experts[experts[index]].slot].state == State::kReading;
    });
    for (auto index = rest; index != waiting.end(); ++index) {
      const Slot& slot = layer.slots[layer.experts[experts[*index]].slot];
      Ready each{*index, {}};
      for (int part = 0; part < kExpertParts && slot.state == State::kResident; ++part) {
        each.parts[part] = part_of(layer, slot, part);
      }
      ready.push_back(each);
    }
    waiting.erase(rest, waiting.end());
    if (ready.empty()) {
      const auto begin = std::chrono::steady_clock::now();
      has_read_.wait(lock);
      const auto waited = std::chrono::steady_clock::now() - begin;
      layer.counters.wait_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count();
      continue;
    }
    lock.unlock();
    compute(ready);
    lock.lock();
    for (const Ready& each : ready) {
      Expert& expert = layer.experts[experts[each.index]];
      Slot& slot = layer.slots[expert.slot];
      slot.is_needed = false;
      num_started -= slot.is_new;
      slot.is_new = false;
      if (slot.state == State::kUnreadable) {  // the next visit tries again
        slot.state = State::kFree;
        expert.slot = slot.expert = -1;
      }
    }
  }
}

float ExpertStore::score_now(const Layer& layer, const Expert& expert) {
  return expert.score * std::exp2(static_cast<float>(expert.last_visit - layer.num_visits) / kHalfLife);
}

// Return a slot that can be overwritten and whose expert has at most this score, or null.
ExpertStore::Slot* ExpertStore::choose_slot(Layer& layer, float highest_score) {
  Slot* best = nullptr;
  float lowest = highest_score;
  for (Slot& slot : layer.slots) {
    if (slot.state == State::kFree) return &slot;
    if (slot.state != State::kResident || slot.is_needed) continue;
    const float score = score_now(layer, layer.experts[slot.expert]);
    if (score <= lowest) {
      best = &slot;
      lowest = score;
    }
  }
  return best;
}

void ExpertStore::start_reading(int layer_number, int expert_number, Slot& slot) {
  Layer& layer = layers_[layer_number];
  if (slot.expert >= 0) layer.experts[slot.expert].slot = -1;
  slot.expert = expert_number;
  slot.state = State::kReading;
  slot.is_needed = slot.is_new = true;
  slot.error = 0;
  const int slot_number = static_cast<int>(&slot - layer.slots.data());
  layer.experts[expert_number].slot = slot_number;
  const std::vector<Piece> pieces = pieces_of(layer_number, slot_number);
  slot.num_pieces = static_cast<int>(pieces.size());
  for (const Piece& piece : pieces) {
    layer.counters.num_bytes += piece.num_bytes;
    pieces_.push_back(piece);
  }
  has_pieces_.notify_all();
}

std::vector<ExpertStore::Piece> ExpertStore::pieces_of(int layer_number, int slot_number) const {
  const Layer& layer = layers_[layer_number];
  const Slot& slot = layer.slots[slot_number];
  std::vector<Piece> pieces;
  for (int part = 0; part < kExpertParts; ++part) {
    const StoredPart& stored = layer.experts[slot.expert].stored[part];
    const int64_t first = round_down(stored.offset);
    const int64_t end = round_up(stored.offset + stored.num_bytes);
    for (int64_t begin = first; begin < end; begin += kPieceBytes) {
      char* target = slot.memory + layer.first_byte[part] + (begin - first);
      pieces.push_back({layer_number, slot_number, begin, std::min(kPieceBytes, end - begin), target});
    }
  }
  return pieces;
}

const char* ExpertStore::part_of(const Layer& layer, const Slot& slot, int part) const {
  return slot.memory + layer.first_byte[part] + layer.experts[slot.expert].stored[part].offset % kPage;
}

bool ExpertStore::is_intact(const Layer& layer, const Slot& slot) const {
  for (int part = 0; part < kExpertParts; ++part) {
    const StoredPart& stored = layer.experts[slot.expert].stored[part];
    if (checksum(part_of(layer, slot, part), stored.num_bytes) != stored.checksum) return false;
  }
  return true;
}

// The work of a reader thread.
void ExpertStore::read_pieces() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    has_pieces_.wait(lock, [this] { return is_closing_ || !pieces_.empty(); });
    if (is_closing_) return;
    const Piece piece = pieces_.front();
    pieces_.pop_front();
    lock.unlock();
    const int error = read_piece(piece);
    lock.lock();
    Slot& slot = layers_[piece.layer].slots[piece.slot];
    if (error != 0) slot.error = error;
    if (--slot.num_pieces == 0) finish(piece.layer, slot, lock);
  }
}

// Return 0, an errno, or kEndOfFile. Bytes behind the end of the file are not needed if they only fill a page.
int ExpertStore::read_piece(const Piece& piece) const {
  int error = 0;
  for (int attempt = 0; attempt <= static_cast<int>(std::size(kPauses)); ++attempt) {
    if (attempt > 0) std::this_thread::sleep_for(kPauses[attempt - 1]);
    int64_t num_read = 0;
    while (num_read < piece.num_bytes) {
      const ssize_t size = pread(file_, piece.target + num_read, piece.num_bytes - num_read, piece.begin + num_read);
      if (size < 0 && errno == EINTR) continue;
      error = size < 0 ? errno : (size == 0 ? kEndOfFile : 0);
      if (error != 0) break;
      num_read += size;
    }
    if (num_read > piece.num_bytes - kPage) error = 0;
    if (error == 0) break;
  }
#if defined(POSIX_FADV_DONTNEED)
  if (!is_direct_) posix_fadvise(file_, piece.begin, piece.num_bytes, POSIX_FADV_DONTNEED);
#endif
  return error;
}

// Check a slot whose pieces have all been read. A damaged expert is read once more.
void ExpertStore::finish(int layer_number, Slot& slot, std::unique_lock<std::mutex>& lock) {
  Layer& layer = layers_[layer_number];
  lock.unlock();
  if (slot.error == 0 && !is_intact(layer, slot)) {
    for (const Piece& piece : pieces_of(layer_number, static_cast<int>(&slot - layer.slots.data()))) {
      if (const int error = read_piece(piece)) slot.error = error;
    }
    if (slot.error == 0 && !is_intact(layer, slot)) slot.error = kDamaged;
  }
  lock.lock();
  slot.state = slot.error == 0 ? State::kResident : State::kUnreadable;
  if (slot.error != 0 && errors_.size() < kMaxErrors) {
    const StoredPart& first = layer.experts[slot.expert].stored[0];
    errors_.push_back("expert " + std::to_string(slot.expert) + " of layer " + std::to_string(layer_number) +
                      " with experts, from byte " + std::to_string(first.offset) + " of " + path_ +
                      " on, cannot be read: " + reason_of(slot.error));
  }
  has_read_.notify_all();
}

void ExpertStore::shrink(int least_slots) {
  const std::lock_guard<std::mutex> only(visit_);
  std::unique_lock<std::mutex> lock(mutex_);
  has_read_.wait(lock, [this] { return !is_reading(); });  // a visit that failed leaves readers behind
  const int64_t page = sysconf(_SC_PAGESIZE);
  for (Layer& layer : layers_) {
    const size_t num_kept = std::max<size_t>(least_slots, layer.slots.size() / 2);
    while (layer.slots.size() > num_kept) remove_last_slot(layer);
    const int64_t num_bytes = (static_cast<int64_t>(layer.slots.size()) * layer.slot_bytes + page - 1) / page * page;
    if (num_bytes >= layer.num_bytes) continue;
    munmap(layer.memory + num_bytes, layer.num_bytes - num_bytes);
    layer.counters.num_released += layer.num_bytes - num_bytes;
    layer.num_bytes = num_bytes;
  }
}

bool ExpertStore::is_reading() const {
  return std::any_of(layers_.begin(), layers_.end(), [](const Layer& layer) {
    return std::any_of(layer.slots.begin(), layer.slots.end(),
                       [](const Slot& slot) { return slot.state == State::kReading; });
  });
}

// Remove a layer's last slot. Its expert moves to the slot of the least valuable one, if it is worth more.
void ExpertStore::remove_last_slot(Layer& layer) {
  const Slot last = layer.slots.back();
  layer.slots.pop_back();
  if (last.expert < 0) return;
  Expert& expert = layer.experts[last.expert];
  expert.slot = -1;
  Slot* slot = choose_slot(layer, score_now(layer, expert));
  if (slot == nullptr) return;
  if (slot->expert >= 0) layer.experts[slot->expert].slot = -1;
  std::memcpy(slot->memory, last.memory, layer.slot_bytes);
  slot->expert = last.expert;
  slot->state = last.state;
  expert.slot = static_cast<int>(slot - layer.slots.data());
}

std::vector<int> ExpertStore::num_slots() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> numbers;
  for (const Layer& layer : layers_) numbers.push_back(static_cast<int>(layer.slots.size()));
  return numbers;
}

int64_t ExpertStore::num_slot_bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t num_bytes = 0;
  for (const Layer& layer : layers_) num_bytes += layer.num_bytes;
  return num_bytes;
}

std::vector<int> ExpertStore::record(bool is_on) {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_recording_ = is_on;
  std::vector<int> recorded;
  recorded.swap(recorded_);
  return recorded;
}

std::vector<ExpertStore::Counters> ExpertStore::counters() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Counters> counters;
  for (const Layer& layer : layers_) counters.push_back(layer.counters);
  return counters;
}

std::vector<std::string> ExpertStore::take_errors() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> errors;
  errors.swap(errors_);
  return errors;
}

}  // namespace moeserve
