// Bindings of the probe of the machine's limits.

#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "arguments.h"
#include "bindings.h"
#include "cpu/limit_probe.h"
#include "cpu/parallel.h"

namespace nb = nanobind;

namespace moeserve {

namespace {

constexpr int64_t kItemsPerThread = 128;  // for some milliseconds, so that a thread that starts late costs little
constexpr int64_t kItemBytes = 1 << 20;
constexpr int64_t kAheadBytes = 4096;  // distance of prefetching

int64_t multiply_on_registers(const std::string& format) {
  const bool is_known = format == "float32" || format == "bfloat16" || format == "int8";
  if (!is_known) refuse("'" + format + "' is none of float32, bfloat16, int8");
  const auto multiply = choose_multiply_ones(current_isa(), format == "float32"    ? WeightFormat::kFloat32
                                                            : format == "bfloat16" ? WeightFormat::kBFloat16
                                                                                   : WeightFormat::kInt8);
  std::atomic<int64_t> count{0};
  const nb::gil_scoped_release released;
  parallel_for(num_threads() * kItemsPerThread, [&](int64_t) { count += multiply(); });
  return count;
}

// Read both halves at once, because a core reads two streams faster than one.
template <int W>
MOESERVE_INLINE void sum_words(const char* words, int64_t num_bytes, std::atomic<uint32_t>& total) {
  typename Vector<W>::UInt sums[8] = {};
  for (int64_t byte = 0; byte < num_bytes / 2; byte += 16 * W) {
    MOESERVE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const char* source = words + byte + i % 2 * (num_bytes / 2) + i / 2 * 4 * W;
      if (i / 2 * 4 * W % 64 == 0) __builtin_prefetch(source + kAheadBytes);
      sums[i] += load_words<W>(source);
    }
  }
  uint32_t sum = 0;
  for (const auto& lanes : sums) {
    for (int i = 0; i < W; ++i) sum += lanes[i];
  }
  total += sum;
}

MOESERVE_DEFINE_VARIANTS(sum_words, (const char* words, int64_t num_bytes, std::atomic<uint32_t>& total),
                         (words, num_bytes, total))

uint32_t read_memory(const Tensor& memory) {
  check_array("memory", memory, {memory.num_elements()}, ElementType::kInt32, "int32");
  const int64_t num_bytes = memory.num_elements() * 4;
  if (num_bytes % 512 != 0) refuse("memory has " + std::to_string(num_bytes) + " bytes, not a multiple of 512");
  const auto* first = static_cast<const char*>(memory.data);
  const auto sum = choose_sum_words(current_isa());
  std::atomic<uint32_t> total{0};
  const nb::gil_scoped_release released;
  parallel_for((num_bytes + kItemBytes - 1) / kItemBytes, [&](int64_t item) {
    sum(first + item * kItemBytes, std::min(kItemBytes, num_bytes - item * kItemBytes), total);
  });
  return total;
}

}  // namespace

void bind_limits(nb::module_& module) {
  using namespace nb::literals;
  module.def("multiply_on_registers", &multiply_on_registers, "format"_a,
             "Execute multiply-adds of float32, bfloat16 or int8 on registers, with all threads and the fastest "
             "instruction for the format. Return their number.");
  module.def("read_memory", &read_memory, "memory"_a,
             "Read int32 numbers, with all threads and prefetching. Return their sum modulo 2^32.");
}

}  // namespace moeserve
