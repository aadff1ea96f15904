// Sums of rows with the vectors of each instruction set.

#include "add_in_tree.h"

#if defined(MOESERVE_HAS_KERNELS)
#include <algorithm>

#include "cpu/isa.h"
#include "cpu/rows.h"
#else
#include <stdexcept>
#endif

namespace moeserve {

#if defined(MOESERVE_HAS_KERNELS)

namespace {

constexpr int kStrip = 256;      // elements that are added at a time: their sums stay in the L1 cache
constexpr int kMaxWaiting = 16;  // sums that wait for their neighbours: one for each bit of the number of parts

struct Parts {
  const char* const* parts;
  int num_parts;
  char* out;
  int64_t num_elements;
};

template <int W, typename T>
MOESERVE_INLINE void widen_strip(const T* source, int count, float* target) {
  int i = 0;
  for (; i + W <= count; i += W) store<W>(target + i, load_in_order<W>(source + i));
  for (; i < count; ++i) target[i] = widen(source[i]);
}

template <int W, typename T>
MOESERVE_INLINE void add_strip(const T* source, int count, float* target) {
  int i = 0;
  for (; i + W <= count; i += W) store<W>(target + i, load<W>(target + i) + load_in_order<W>(source + i));
  for (; i < count; ++i) target[i] += widen(source[i]);
}

template <int W, typename T>
MOESERVE_INLINE void round_strip(const float* source, int count, T* target) {
  int i = 0;
  for (; i + W <= count; i += W) store_in_order<W>(target + i, load<W>(source + i));
  for (; i < count; ++i) assign(target + i, source[i]);
}

// The additions per element do not depend on W.
template <int W, typename T, typename Out>
MOESERVE_INLINE void add_parts(const Parts& sum) {
  alignas(64) float waiting[kMaxWaiting][kStrip];
  for (int64_t first = 0; first < sum.num_elements; first += kStrip) {
    const int count = static_cast<int>(std::min<int64_t>(kStrip, sum.num_elements - first));
    int num_waiting = 0;
    for (int part = 0; part < sum.num_parts; ++part) {
      const T* source = reinterpret_cast<const T*>(sum.parts[part]) + first;
      const bool is_last = part + 1 == sum.num_parts;
      int place = part + 1;
      if (part % 2 == 0) {
        widen_strip<W>(source, count, waiting[num_waiting++]);
      } else {
        add_strip<W>(source, count, waiting[num_waiting - 1]);
        place /= 2;
      }
      for (; num_waiting > 1 && (place % 2 == 0 || is_last); place /= 2) {
        --num_waiting;
        add_strip<W>(waiting[num_waiting], count, waiting[num_waiting - 1]);
      }
    }
    round_strip<W>(waiting[0], count, reinterpret_cast<Out*>(sum.out) + first);
  }
}

template <int W>
MOESERVE_INLINE void add_parts_of_types(ElementType element, ElementType out_element, const Parts& sum) {
  const bool from_bfloat16 = element == ElementType::kBFloat16;
  if (out_element == ElementType::kBFloat16) {
    from_bfloat16 ? add_parts<W, BFloat16, BFloat16>(sum) : add_parts<W, float, BFloat16>(sum);
  } else {
    from_bfloat16 ? add_parts<W, BFloat16, float>(sum) : add_parts<W, float, float>(sum);
  }
}

MOESERVE_DEFINE_VARIANTS(add_parts_of_types, (ElementType element, ElementType out_element, const Parts& sum),
                         (element, out_element, sum))

}  // namespace

void add_in_tree(ElementType element, const std::vector<const char*>& parts, ElementType out_element, char* out,
                 int64_t num_bytes) {
  const Parts sum{parts.data(), static_cast<int>(parts.size()), out, num_bytes / element_bytes(element)};
  choose_add_parts_of_types(current_isa())(element, out_element, sum);
}
#else

void add_in_tree(ElementType, const std::vector<const char*>&, ElementType, char*, int64_t) {
  throw std::logic_error("sums need the kernels, which this module was built without");
}

#endif

}  // namespace moeserve
