// Detection of the instruction sets of 64-bit ARM, as reported by the operating system.

#include "cpu/isa.h"

#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif

namespace moeserve {

namespace {

struct CpuFeatures {
  bool dot;
  bool bf16;
};

#if defined(__APPLE__)

bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

CpuFeatures read_features() {
  return {has_feature("hw.optional.arm.FEAT_DotProd"), has_feature("hw.optional.arm.FEAT_BF16")};
}

#else

CpuFeatures read_features() {
  constexpr unsigned long kDot = 1ul << 20;   // HWCAP_ASIMDDP
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16
  return {(getauxval(AT_HWCAP) & kDot) != 0, (getauxval(AT_HWCAP2) & kBf16) != 0};
}

#endif

}  // namespace

std::vector<Isa> detect_isas() {
  const CpuFeatures features = read_features();
  std::vector<Isa> usable;
  if (features.dot && features.bf16) usable.push_back(Isa::kNeonBf16);
  if (features.dot) usable.push_back(Isa::kNeonDot);
  usable.push_back(Isa::kNeon);
  return usable;
}

}  // namespace moeserve
