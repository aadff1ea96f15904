// Which tape records, and tapes as Python sees them.

#include "tape.h"

#include <string>

namespace nb = nanobind;

namespace moeserve {

namespace {

thread_local Tape* tape_of_this_thread = nullptr;

}  // namespace

Tape* recorded_tape() { return tape_of_this_thread; }

void Tape::start() {
  if (tape_of_this_thread != nullptr) throw std::logic_error("this thread is recording a tape already");
  tape_of_this_thread = this;
}

void Tape::stop() {
  if (tape_of_this_thread == this) tape_of_this_thread = nullptr;
}

void Tape::play() const {
  if (tape_of_this_thread != nullptr) throw std::logic_error("this thread is recording a tape");
  size_t num_made = 0;
  int outcome = 0;
  {
    const nb::gil_scoped_release released;
    try {
      for (const std::function<void()>& call : calls_) {
        ++num_made;
        call();
      }
      return;
    } catch (const PlayedCallFailed& failure) {
      outcome = failure.outcome;
    }
  }
  const auto handler = handlers_.find(num_made);
  if (handler != handlers_.end()) handler->second(outcome);
  throw std::runtime_error("recorded call " + std::to_string(num_made) + " failed: " + std::to_string(outcome));
}

void bind_tape(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<Tape>(module, "Tape", "Records the calls of kernels that this thread makes, to make them again.")
      .def(nb::init<uintptr_t, size_t>(), "address"_a = 0, "num_bytes"_a = 0,
           "Tensors whose memory begins in a range of addresses are not kept alive.")
      .def("start", &Tape::start, "Begins to record. The calls are made as well.")
      .def("stop", &Tape::stop)
      .def("play", &Tape::play, "Makes all calls again, in the memory of the tensors that they were made with.")
      .def_prop_ro("num_calls", &Tape::num_calls);
  module.def("is_recording", [] { return recorded_tape() != nullptr; }, "Whether this thread records.");
  module.def(
      "on_failure_when_played",
      [](nb::object handler) {
        if (Tape* tape = recorded_tape()) tape->set_handler(std::move(handler));
      },
      "handler"_a,
      "If this thread records: where the call recorded last fails when it is played, `handler` gets its outcome, and "
      "raises.");
}

}  // namespace moeserve
