// CPU graphs: kernel calls that are recorded while Python makes them, and executed later without Python.

#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace moeserve {

// Thrown by a replayed call that failed. The outcome is passed to the failure handler of the call.
struct ReplayedCallFailed {
  int outcome;
};

// The kernel calls of one thread during capture, which are not executed, and the objects whose memory they use. A
// replay executes the calls in this memory on its current contents.
class CpuGraph {
 public:
  // Objects with memory in the `num_bytes` from `address` on are not kept alive: the caller owns that memory.
  CpuGraph(uintptr_t address, size_t num_bytes) : address_(address), num_bytes_(num_bytes) {}
  CpuGraph(const CpuGraph&) = delete;
  ~CpuGraph() { end_capture(); }

  // Throws std::logic_error if this thread is already capturing.
  void begin_capture();
  void end_capture();
  // Rethrows the exception of a call and skips the calls after it. After ReplayedCallFailed the handler of the call
  // raises the error.
  void replay() const;

  void add(std::function<void()> call) { calls_.push_back(std::move(call)); }
  // Sets the handler that raises the error if the last captured call fails during replay.
  void set_handler(nanobind::object handler) { handlers_[calls_.size()] = std::move(handler); }
  // Returns a stand-in for a number that one call returns and a later one takes, such as that of an operation. No
  // operation has this number.
  uint64_t add_number() {
    numbers_.push_back(std::make_shared<uint64_t>());
    return kFirstStandIn + numbers_.size() - 1;
  }
  // The number of the current replay, for a stand-in.
  std::shared_ptr<uint64_t> number(uint64_t stand_in) const { return numbers_.at(stand_in - kFirstStandIn); }
  void keep(nanobind::handle owner) { owners_.push_back(nanobind::borrow(owner)); }
  void keep(nanobind::handle owner, const void* data) {
    if (reinterpret_cast<uintptr_t>(data) - address_ >= num_bytes_) keep(owner);
  }
  size_t num_calls() const { return calls_.size(); }

 private:
  static constexpr uint64_t kFirstStandIn = uint64_t{1} << 63;

  uintptr_t address_;
  size_t num_bytes_;
  std::vector<std::function<void()>> calls_;
  std::vector<nanobind::object> owners_;
  std::map<size_t, nanobind::object> handlers_;  // key: number of calls up to and including the call
  std::vector<std::shared_ptr<uint64_t>> numbers_;
};

// Return the graph that this thread is capturing, or null.
CpuGraph* capturing_cpu_graph();

// Run a kernel without the GIL, or add it to the graph that this thread is capturing.
template <typename Call>
void run_kernel(const Call& call) {
  if (CpuGraph* graph = capturing_cpu_graph()) {
    graph->add(call);
    return;
  }
  const nanobind::gil_scoped_release released;
  call();
}

// Run a kernel that returns a value. During capture this is `expected`; a replay that finds another value throws,
// because Python has acted on it.
template <typename Call, typename Value>
Value run_kernel(const Call& call, Value expected) {
  if (CpuGraph* graph = capturing_cpu_graph()) {
    graph->add([call, expected] {
      if (call() != expected) throw std::runtime_error("a replayed call returned another value than during capture");
    });
    return expected;
  }
  const nanobind::gil_scoped_release released;
  return call();
}

void bind_cpu_graph(nanobind::module_& module);

}  // namespace moeserve
