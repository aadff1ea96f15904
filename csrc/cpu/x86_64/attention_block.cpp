// The kernels of attention for the instruction sets of x86-64.

#include "cpu/attention_block.h"

#include "attention_amx.h"
#include "cpu/attention_kernels.h"
#include "cpu/products.h"

namespace moeserve {

namespace {

// A word is two bfloat16, the first in its low half. VDPBF16PS adds both products of a step in float32 and treats
// subnormal numbers as zero. Only for functions with MOESERVE_TARGET_AVX512_BF16.
struct BFloat16Products {
  static constexpr int W = 16;
  static constexpr int kPerWord = 2;
  static constexpr int kVectors = 4;
  static constexpr int kExponentialDegree = 4;
  static constexpr int kStepGroup = 1;
  using Word = uint32_t;
  using Words = Vector<16>::UInt;

  static MOESERVE_INLINE Words load_words(const Word* source) {
    Words words;
    std::memcpy(&words, source, sizeof(words));
    return words;
  }
  static MOESERVE_INLINE Words broadcast_word(const Word* source) {
    Words words;
    asm("vpbroadcastd %1, %0" : "=v"(words) : "m"(*source));
    return words;
  }
  static MOESERVE_INLINE Words ones() {
    static const Word pair = 0x3F803F80u;
    return broadcast_word(&pair);
  }

  // Round 32 floats to nearest, in order. This is inline assembly, because compilers refuse intrinsics in a function
  // that lacks their target attribute, even if it is inlined into a function that has it.
  static MOESERVE_INLINE Words pack(const Float<W>* vectors) {
    Words words;
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(words) : "v"(vectors[1]), "v"(vectors[0]));
    return words;
  }
  static MOESERVE_INLINE void add(Float<W>& sums, const Words& a, const Words& b) {
    Float<W> added = sums;
    asm("vdpbf16ps %2, %1, %0" : "+v"(added) : "v"(a), "v"(b));
    sums = added;
  }
};

MOESERVE_BLOCK_KERNELS(Avx512BFloat16, MOESERVE_TARGET_AVX512_BF16);
MOESERVE_BLOCK_KERNELS(Avx512, MOESERVE_TARGET_AVX512);
MOESERVE_BLOCK_KERNELS(Avx2, MOESERVE_TARGET_AVX2);

// The same operands, padded to whole tile registers.
struct AmxProducts : BFloat16Products {
  static constexpr int kStepGroup = kAmxSteps;
};

// Values are always packed, because the tile registers need pairs of positions.
struct Amx {
  using Common = Avx512BFloat16<AmxProducts, BFloat16>;

  MOESERVE_TARGET_AVX512_BF16 static void weigh_packed(const Tile& tile, int head_size) {
    score_with_tiles<Common::L>(tile, head_size);
    weigh<Common::L, true>(tile);
  }
  MOESERVE_TARGET_AVX512_BF16 static void add_packed(const Tile& tile, int strip, int value_size,
                                                     int64_t values_stride) {
    add_with_tiles<Common::L>(tile, strip, value_size, values_stride);
  }
  MOESERVE_TARGET_AVX512_BF16 static void weigh_in_place(const Tile& tile, int head_size) {
    score_in_place_with_tiles<Common::L>(tile, head_size);
    weigh<Common::L, true>(tile);
  }
  MOESERVE_TARGET_AVX512_BF16 static void add_positive(const Tile& tile, int head_size, const float* weights,
                                                       float* sums) {
    score_with_tiles<Common::L>(tile, head_size);
    add_weighted<Common::L>(tile, weights, sums);
  }
  MOESERVE_TARGET_AVX512_BF16 static void score(const Tile& tile, int head_size) {
    score_with_tiles<Common::L>(tile, head_size);
  }
  static void configure() { TileSizes(kAmxRows, kAmxInputs).use(); }

  static constexpr TileKernels tiles[] = {
      {kAmxRows, weigh_packed, add_packed, weigh_in_place, nullptr, add_positive, score}};
  static constexpr BlockKernels make() {
    BlockKernels kernels = with_tiles(Common::without_tiles, tiles);
    kernels.configure = configure;
    kernels.release = release_tiles;
    return kernels;
  }
};

template <template <typename, typename> typename Kernels, int W>
const BlockKernels& choose_of_type(ElementType type) {
  if (type == ElementType::kBFloat16) return Kernels<FloatProducts<W>, BFloat16>::kernels;
  return Kernels<FloatProducts<W>, float>::kernels;
}

}  // namespace

const BlockKernels& choose_block_kernels(Isa isa, ElementType type) {
  if (isa < Isa::kAvx512) return choose_of_type<Avx2, 8>(type);
  if (isa == Isa::kAvx512 || type != ElementType::kBFloat16) return choose_of_type<Avx512, 16>(type);
  if (isa == Isa::kAvx512Bf16) return Avx512BFloat16<BFloat16Products, BFloat16>::kernels;
  static constexpr BlockKernels amx = Amx::make();
  return amx;
}

}  // namespace moeserve
