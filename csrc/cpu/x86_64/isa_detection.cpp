// Detection of the instruction sets of x86-64.

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/isa.h"

namespace moeserve {

namespace {

struct CpuFeatures {
  bool avx_vnni = false;
  bool amx = false;  // with bfloat16 and int8
};

// Read features whose names some compilers do not know.
CpuFeatures read_features() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  CpuFeatures features;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
    constexpr unsigned kAmxBits = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, int8
    features.amx = (edx & kAmxBits) == kAmxBits;
  }
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) features.avx_vnni = (eax & 1u << 4) != 0;
  return features;
}

// Request permission to use the tile registers, for all threads of this process. Linux saves their large state only for
// processes that have requested it.
bool request_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

std::vector<Isa> detect_isas() {
  std::vector<Isa> usable;
  __builtin_cpu_init();
  const CpuFeatures features = read_features();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (bf16 && features.amx && request_tiles()) usable.push_back(Isa::kAmx);
  // Intel's cores begin a VDPBF16PS every other cycle, but two FMAs in each: floats are faster by three quarters.
  const bool has_slow_dots = __builtin_cpu_is("intel");
  if (bf16 && !has_slow_dots) usable.push_back(Isa::kAvx512Bf16);
  if (avx512) usable.push_back(Isa::kAvx512);
  if (bf16 && has_slow_dots) usable.push_back(Isa::kAvx512Bf16);
  if (avx2 && features.avx_vnni) usable.push_back(Isa::kAvx2Vnni);
  if (avx2) usable.push_back(Isa::kAvx2);
  return usable;
}

}  // namespace moeserve
