// Calls of kernels that are recorded while Python makes them, to be made again without Python. Knows no kernel.

#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

namespace moeserve {

// What a recorded call throws that could not do its work. The number says why, to who recorded it.
struct ReplayedCallFailed {
  int outcome;
};

// The calls of one thread between `start` and `stop`, with all objects whose memory they use. Played again, they do the
// same work in the same memory, on whatever numbers are there by then.
class CpuGraph {
 public:
  // Objects with memory among the `num_bytes` from `address` on are not kept: who records takes care of that memory.
  CpuGraph(uintptr_t address, size_t num_bytes) : address_(address), num_bytes_(num_bytes) {}
  CpuGraph(const CpuGraph&) = delete;
  ~CpuGraph() { end_capture(); }

  // Throws std::logic_error while this thread is recording.
  void begin_capture();
  void end_capture();
  // Throws what a call throws; those after it are then not made. After ReplayedCallFailed the call's handler raises.
  void replay() const;

  void add(std::function<void()> call) { calls_.push_back(std::move(call)); }
  // Of the call recorded last: raises what is wrong when it is played and fails.
  void set_handler(nanobind::object handler) { handlers_[calls_.size()] = std::move(handler); }
  // What one call leaves for another: a number that belongs to something of which the calls know the address and the
  // number that it had while they were recorded.
  std::shared_ptr<uint64_t> cell(const void* address, uint64_t recorded_number) {
    std::shared_ptr<uint64_t>& found = cells_[{address, recorded_number}];
    if (found == nullptr) found = std::make_shared<uint64_t>(recorded_number);
    return found;
  }
  void keep(nanobind::handle owner) { owners_.push_back(nanobind::borrow(owner)); }
  void keep(nanobind::handle owner, const void* data) {
    if (reinterpret_cast<uintptr_t>(data) - address_ >= num_bytes_) keep(owner);
  }
  size_t num_calls() const { return calls_.size(); }

 private:
  uintptr_t address_;
  size_t num_bytes_;
  std::vector<std::function<void()>> calls_;
  std::vector<nanobind::object> owners_;
  std::map<size_t, nanobind::object> handlers_;  // by the number of calls up to theirs
  std::map<std::pair<const void*, uint64_t>, std::shared_ptr<uint64_t>> cells_;
};

// The graph that this thread is recording, or null.
CpuGraph* capturing_cpu_graph();

// Makes a kernel's call without the interpreter's lock, and records it where that is asked for. What a call returned
// then, it must return whenever it is played: what Python did with it stays as it was.
template <typename Call>
auto run_kernel(const Call& call) {
  const auto run = [&call] {
    const nanobind::gil_scoped_release released;
    return call();
  };
  CpuGraph* graph = capturing_cpu_graph();
  if constexpr (std::is_void_v<decltype(call())>) {
    run();
    if (graph != nullptr) graph->add(call);
  } else {
    const auto result = run();
    if (graph != nullptr) {
      graph->add([call, result] {
        if (call() != result) throw std::runtime_error("a recorded call returned something else than when it was made");
      });
    }
    return result;
  }
}

void bind_cpu_graph(nanobind::module_& module);

}  // namespace moeserve
