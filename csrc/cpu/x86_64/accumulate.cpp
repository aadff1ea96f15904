// Sums of products with the instruction sets of x86-64.

#include "cpu/accumulate.h"

#include <algorithm>
#include <type_traits>

#include "byte_products.h"
#include "product_tile_amx.h"
#include "product_tile_avx512_bf16.h"

namespace moeserve {

namespace {

// Return the number of inputs of two panels that stay in the L1 cache while tiles of rows share them.
constexpr int64_t inputs_of_block(int num_tiles) { return num_tiles <= 4 ? 128 : kBlockInputs; }

MOESERVE_TARGET_AVX2 void accumulate_avx2(const ProductWork& work, float* sums) {
  accumulate<8, WidenedProducts<8>, PairTile>(work, sums);
}
MOESERVE_TARGET_AVX2 void accumulate_avx2_vnni(const ProductWork& work, float* sums) {
  accumulate<8, WidenedProducts<8>, DotTile>(work, sums);
}
MOESERVE_TARGET_AVX512 void accumulate_avx512(const ProductWork& work, float* sums) {
  accumulate<16, WidenedProducts<16>, DotTile>(work, sums);
}

// Call run(std::integral_constant) with the number of rows, from 1 to kDotRows, as a constant.
template <int kRows = 1, typename Run>
MOESERVE_TARGET_AVX512_BF16 void call_with_rows(int num_rows, const Run& run) {
  if constexpr (kRows < kDotRows) {
    if (num_rows > kRows) return call_with_rows<kRows + 1>(num_rows, run);
  }
  run(std::integral_constant<int, kRows>{});
}

MOESERVE_TARGET_AVX512_BF16 void dot_few_rows(const ProductWork& work, float* sums) {
  const auto* input = reinterpret_cast<const BFloat16*>(work.input);
  const int64_t stride = work.input_bytes / 2;
  const DotBlock block{{work.panels[0], work.panels[1]}, work.num_inputs, work.is_first};
  const DotPrefetch next{{work.panels[0] + work.next_item, work.panels[1] + work.next_item}};
  call_with_rows(work.num_rows, [&](auto rows) MOESERVE_TARGET_AVX512_BF16 {
    dot_tile<decltype(rows)::value, kAhead>(input, stride, block, next, sums);
  });
}

// Process tile t of `num_tiles`: read the block once, and prefetch the tile's share of the next block.
template <int kRows>
MOESERVE_TARGET_AVX512_BF16 void dot_shared(const BFloat16* input, int64_t stride, const DotBlock& block,
                                            const DotPrefetch& next, int t, int num_tiles, float* sums) {
  const int64_t half = block.num_inputs / 2 * 64;  // half of the block's bytes in a panel
  if (num_tiles <= 3 && t < 2) {
    const DotPrefetch share{{next.panels[0] + t * half, next.panels[1] + t * half}};
    dot_tile<kRows, 2>(input, stride, block, share, sums);
  } else if (num_tiles > 3 && t < 4) {
    const DotPrefetch share{{next.panels[t / 2] + t % 2 * half, nullptr}};
    dot_tile<kRows, 1>(input, stride, block, share, sums);
  } else {
    dot_tile<kRows, 0>(input, stride, block, next, sums);
  }
}

MOESERVE_TARGET_AVX512_BF16 void dot_many_rows(const ProductWork& work, float* sums) {
  const auto* input = reinterpret_cast<const BFloat16*>(work.input);
  const int64_t stride = work.input_bytes / 2;
  const int num_tiles = (work.num_rows + kDotRows - 1) / kDotRows;
  const int64_t step = inputs_of_block(num_tiles);
  for (int64_t first = 0; first < work.num_inputs; first += step) {
    const int64_t last = std::min(first + step, work.num_inputs);
    DotBlock block{{}, last - first, work.is_first && first == 0};
    DotPrefetch next{};
    for (int p = 0; p < 2; ++p) {
      block.panels[p] = work.panels[p] + first * kPanel * 2;
      next.panels[p] =
          last < work.num_inputs ? block.panels[p] + (last - first) * kPanel * 2 : work.panels[p] + work.next_item;
    }
    for (int t = 0, row = 0; t < num_tiles; ++t) {
      const int rows = rows_of_tile(t, num_tiles, work.num_rows - row);
      const BFloat16* values = input + row * stride + first;
      call_with_rows(rows, [&](auto count) MOESERVE_TARGET_AVX512_BF16 {
        dot_shared<decltype(count)::value>(values, stride, block, next, t, num_tiles, sums + row * kTileOutputs);
      });
      row += rows;
    }
  }
}

MOESERVE_TARGET_AVX512_BF16 void accumulate_avx512_bf16(const ProductWork& work, float* sums) {
  if (work.format != WeightFormat::kBFloat16) return accumulate_avx512(work, sums);
  work.num_rows <= kDotRows ? dot_few_rows(work, sums) : dot_many_rows(work, sums);
}

// The same with AMX. Used for any number of rows, because its sums have other bits than those of VDPBF16PS.
void accumulate_amx(const ProductWork& work, float* sums) {
  if (work.format != WeightFormat::kBFloat16) return accumulate_avx512(work, sums);
  const auto* input = reinterpret_cast<const BFloat16*>(work.input);
  const int64_t stride = work.input_bytes / 2;
  const int num_tiles = (work.num_rows + kAmxRows - 1) / kAmxRows;
  const int64_t input_bytes = 2 * kPanel;
  const int64_t num_bytes = work.num_inputs * input_bytes;
  const int64_t num_whole = work.num_inputs / kAmxInputs * kAmxInputs;
  const int64_t step = num_tiles == 1 ? num_whole : inputs_of_block(num_tiles);
  const int64_t ahead = num_tiles == 1 ? kPrefetchBytes : step * input_bytes;
  int sized_rows = 0;
  int64_t sized_inputs = 0;
  for (int64_t first = 0, count; first < work.num_inputs; first += count) {
    count = first < num_whole ? std::min(step, num_whole - first) : work.num_inputs - num_whole;
    const int64_t begin = first * input_bytes;
    const char* const panels[2] = {work.panels[0] + begin, work.panels[1] + begin};
    const bool is_first = work.is_first && first == 0;
    const int64_t skip = begin + ahead < num_bytes ? begin + ahead : work.next_item + begin + ahead - num_bytes;
    for (int t = 0, row = 0; t < num_tiles; ++t) {
      const int rows = rows_of_tile(t, num_tiles, work.num_rows - row);
      const int64_t inputs = std::min<int64_t>(count, kAmxInputs);
      if (rows != sized_rows || inputs != sized_inputs) {
        sized_rows = rows;
        sized_inputs = inputs;
        TileSizes(rows, inputs).use();
      }
      // All tiles together prefetch the next block. A single tile would first wait for memory, and then compute without
      // it.
      const AmxPrefetch prefetch{
          {work.panels[0] + skip, work.panels[1] + skip}, kAmxLines * t / num_tiles, kAmxLines * (t + 1) / num_tiles};
      amx_tile(input + row * stride + first, stride, panels, count, is_first, prefetch, sums + row * kTileOutputs);
      row += rows;
    }
  }
  release_tiles();
}

// Return true if the product of a format with AVX2 alone reads rows as 16-bit integers.
template <int kFirst = 0>
bool widens_pairs(WeightFormat format) {
  if constexpr (kFirst < kNumFormats) {
    constexpr auto kFormat = static_cast<WeightFormat>(kFirst);
    if (format != kFormat) return widens_pairs<kFirst + 1>(format);
    if constexpr (is_quantized(kFormat)) return PairTile<8, kFormat>::kRowBytes == 8;
  }
  return false;
}

}  // namespace

Accumulate choose_accumulate(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return accumulate_avx2;
    case Isa::kAvx2Vnni:
      return accumulate_avx2_vnni;
    case Isa::kAvx512:
      return accumulate_avx512;
    case Isa::kAvx512Bf16:
      return accumulate_avx512_bf16;
    case Isa::kAmx:
      break;
  }
  return accumulate_amx;
}

bool widens_rows(WeightFormat format, Isa isa) {
  if (traits_of(format).rows == RowForm::kBFloat16) return isa < Isa::kAvx512Bf16;
  return isa == Isa::kAvx2 && widens_pairs(format);
}

}  // namespace moeserve
