// CPU graphs: kernel calls that are captured while Python makes them and replayed without Python.

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

// Thrown by a replayed call that failed. The outcome is passed to the failure handler of the call.
struct ReplayedCallFailed {
  int outcome;
};

// The kernel calls of one thread during capture, and the objects whose memory they use. A replay repeats the calls in
// the same memory on its current contents.
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
  // A number that one call passes to another, such as the number of an operation. It is identified by the address of
  // its owner and its value during capture.
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
  std::map<size_t, nanobind::object> handlers_;  // key: number of calls up to and including the call
  std::map<std::pair<const void*, uint64_t>, std::shared_ptr<uint64_t>> cells_;
};

// Return the graph that this thread is capturing, or null.
CpuGraph* capturing_cpu_graph();

// Run a kernel without the GIL, and add it to the graph being captured, if any. A replayed call must return the same
// value as during capture, because Python has already acted on it.
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
        if (call() != result) throw std::runtime_error("a replayed call returned another value than during capture");
      });
    }
    return result;
  }
}

void bind_cpu_graph(nanobind::module_& module);

}  // namespace moeserve
