// Division of products into items of 64 outputs and some rows, and their execution.
//
// Few rows, whose sums all fit in registers, read their panels once from beginning to end at memory speed. More rows
// are processed tile by tile over a block of the panels that stays in the L1 cache, while the next block is prefetched
// to the L2 cache: memory access and computation overlap.

#include "packed_product.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "product_tile.h"
#include "product_tile_avx512_bf16.h"
#include "rows.h"

namespace moeserve {

namespace {

constexpr int kMaxItemRows = 192;
constexpr int kBlockInputs = 128;     // inputs of a block shared by few tiles
constexpr int kBigBlockInputs = 256;  // inputs of a block shared by many tiles
constexpr int kFewTiles = 4;
constexpr int64_t kParallelWork = 1 << 17;  // bytes read, or multiply-adds / 8, that justify a second thread

// The unit of work of a thread.
struct Item {
  int32_t group;
  int32_t first_row;
  int32_t num_rows;
  int32_t column;  // outputs from 32 * column on, gates and ups; or outputs from 64 * column on
};

// The rows and panels of an item.
struct Work {
  const PackedProduct& product;
  const char* input;
  int64_t input_bytes;  // from row to row
  const char* panels[2];
  int64_t next_item;  // bytes from a panel to that of the next item
  int num_rows;
  int64_t num_inputs;
};

constexpr int kMaxWaitingSums = 4;  // of chunks that wait for their neighbours in the tree
static_assert(kMaxInputChunks <= 1 << (kMaxWaitingSums - 1));

// Buffers that each thread keeps from call to call.
struct Scratch {
  alignas(64) float waiting_sums[kMaxWaitingSums][kMaxItemRows * kTileOutputs];
  float* sums = waiting_sums[0];  // of the current chunk
  alignas(64) char weights[2][kBigBlockInputs * kPanel * sizeof(float)];
  alignas(64) float scales[kTileOutputs];
};

Scratch& scratch() {
  thread_local std::unique_ptr<Scratch> of_this_thread = std::make_unique<Scratch>();
  return *of_this_thread;
}

bool is_gated(const PackedProduct& product) { return product.activation != Activation::kNone; }
bool is_quantized(WeightFormat format) { return format == WeightFormat::kInt8 || format == WeightFormat::kInt4; }

// Return the number of inputs of a block. The last block may have fewer.
int64_t block_inputs(WeightFormat format, int num_tiles) {
  if (format == WeightFormat::kInt4) return kInt4Group;
  return num_tiles <= kFewTiles ? kBlockInputs : kBigBlockInputs;
}

// Widen inputs [first, last) of a quantised panel to the panel layout of `Element`, and the scales of int4.
template <typename Element>
MOESERVE_INLINE void widen_block(WeightFormat format, const char* panel, int64_t first, int64_t last, Element* target,
                                 float* scales) {
  constexpr int kTogether = sizeof(Element) == 2 ? 2 : 1;
  const auto place = [&](int64_t k, int n) {
    return (k - first) / kTogether * kTogether * kPanel + n * kTogether + (k - first) % kTogether;
  };
  if (format == WeightFormat::kInt8) {
    const auto* values = reinterpret_cast<const int8_t*>(panel);
    for (int64_t k = first; k < last; ++k) {
      for (int n = 0; n < kPanel; ++n) assign(target + place(k, n), values[k / 2 * 2 * kPanel + n * 2 + k % 2]);
    }
    return;
  }
  const char* group = panel + first / kInt4Group * kInt4GroupBytes;
  const auto* words = reinterpret_cast<const uint16_t*>(group);
  for (int64_t k = first; k < last; ++k) {
    for (int n = 0; n < kPanel; ++n) {
      const int code = words[k % kInt4Group / 4 * 32 + n % 16 * 2 + k % 2] >> (4 * (k % 4 / 2 * 2 + n / 16)) & 15;
      assign(target + place(k, n), static_cast<float>(kInt4Values[code]));
    }
  }
  const auto* group_scales = reinterpret_cast<const BFloat16*>(group + kInt4ScalesAt);
  for (int n = 0; n < kPanel; ++n) scales[n] = widen(group_scales[n]);
}

// Return a block of the panels of an item: in place, or widened by widen(panel, target, scales) into the scratch
// buffers.
template <typename Element, typename Widen>
MOESERVE_INLINE Block make_block(const Work& work, int64_t first, int64_t last, Scratch& room, const Widen& widen) {
  const WeightFormat format = work.product.format;
  Block block{{}, nullptr, last - first, first == 0};
  for (int p = 0; p < 2; ++p) {
    if (is_quantized(format)) {
      widen(work.panels[p], room.weights[p], room.scales + p * kPanel);
      block.panels[p] = room.weights[p];
    } else {
      block.panels[p] = work.panels[p] + first * kPanel * sizeof(Element);
    }
  }
  if (format == WeightFormat::kInt4) block.scales = room.scales;
  return block;
}

// Call tile(index, first row, rows) for tiles of similar size that cover all rows.
template <typename Call>
MOESERVE_INLINE void for_each_tile(int num_rows, int num_tiles, const Call& tile) {
  for (int t = 0, row = 0; t < num_tiles; ++t) {
    const int rows = (num_rows - row + num_tiles - t - 1) / (num_tiles - t);
    tile(t, row, rows);
    row += rows;
  }
}

template <int W, int kRows, int kVectors, typename Element>
MOESERVE_INLINE void accumulate(const Work& work, Scratch& room) {
  const auto* input = reinterpret_cast<const Element*>(work.input);
  const int64_t stride = work.input_bytes / sizeof(Element);
  const int num_tiles = (work.num_rows + kRows - 1) / kRows;
  const int64_t step = block_inputs(work.product.format, num_tiles);
  for (int64_t first = 0; first < work.num_inputs; first += step) {
    const int64_t last = std::min(first + step, work.num_inputs);
    const auto widen = [&](const char* panel, char* target, float* scales) {
      widen_block(work.product.format, panel, first, last, reinterpret_cast<Element*>(target), scales);
    };
    const Block block = make_block<Element>(work, first, last, room, widen);
    for (int row = 0; row < work.num_rows; row += kRows) {
      const int rows = std::min(kRows, work.num_rows - row);
      add_tile<W, kRows, kVectors>(input + row * stride + first, stride, rows, block, room.sums + row * kTileOutputs);
    }
  }
}

// Call run(std::integral_constant) with a number of rows from 1 to kDotRows.
template <int kRows = 1, typename Run>
MOESERVE_TARGET_AVX512_BF16 void call_with_rows(int num_rows, const Run& run) {
  if constexpr (kRows < kDotRows) {
    if (num_rows > kRows) return call_with_rows<kRows + 1>(num_rows, run);
  }
  run(std::integral_constant<int, kRows>{});
}

template <WeightFormat kFormat>
MOESERVE_TARGET_AVX512_BF16 void dot_few_rows(const Work& work, float* sums) {
  const auto* input = reinterpret_cast<const BFloat16*>(work.input);
  const int64_t stride = work.input_bytes / 2;
  const Block block{{work.panels[0], work.panels[1]}, nullptr, work.num_inputs, true};
  const auto run = [&](auto rows) MOESERVE_TARGET_AVX512_BF16 {
    constexpr int kRows = decltype(rows)::value;
    const Prefetch next{{work.panels[0] + work.next_item, work.panels[1] + work.next_item}};
    if constexpr (kFormat == WeightFormat::kInt4) {
      dot_int4<kRows>(input, stride, block.panels, work.num_inputs, next, sums);
    } else {
      dot_tile<kRows, kFormat, kAhead>(input, stride, block, next, sums);
    }
  };
  call_with_rows(work.num_rows, run);
}

// Process tile t of `num_tiles`, which reads the block once and prefetches its share of the next block.
template <int kRows>
MOESERVE_TARGET_AVX512_BF16 void dot_shared(const BFloat16* input, int64_t stride, const Block& block,
                                            const Prefetch& next, int t, int num_tiles, float* sums) {
  const int64_t half = block.num_inputs / 2 * 64;  // half of the bytes of a panel in the block
  if (num_tiles <= 3 && t < 2) {
    const Prefetch share{{next.panels[0] + t * half, next.panels[1] + t * half}};
    dot_tile<kRows, WeightFormat::kBFloat16, 2>(input, stride, block, share, sums);
  } else if (num_tiles > 3 && t < 4) {
    const Prefetch share{{next.panels[t / 2] + t % 2 * half, nullptr}};
    dot_tile<kRows, WeightFormat::kBFloat16, 1>(input, stride, block, share, sums);
  } else {
    dot_tile<kRows, WeightFormat::kBFloat16, 0>(input, stride, block, next, sums);
  }
}

MOESERVE_TARGET_AVX512_BF16 void dot_many_rows(const Work& work, Scratch& room) {
  const auto* input = reinterpret_cast<const BFloat16*>(work.input);
  const int64_t stride = work.input_bytes / 2;
  const int num_tiles = (work.num_rows + kDotRows - 1) / kDotRows;
  const int64_t step = block_inputs(work.product.format, num_tiles);
  for (int64_t first = 0; first < work.num_inputs; first += step) {
    const int64_t last = std::min(first + step, work.num_inputs);
    const auto widen = [&](const char* panel, char* target, float* scales) {
      widen_panel(work.product.format, panel, first, last, target, scales);
    };
    const Block block = make_block<BFloat16>(work, first, last, room, widen);
    Prefetch next{{block.panels[0], block.panels[1]}};
    if (!is_quantized(work.product.format)) {
      for (int p = 0; p < 2; ++p) {
        next.panels[p] =
            last < work.num_inputs ? block.panels[p] + (last - first) * kPanel * 2 : work.panels[p] + work.next_item;
      }
    }
    for_each_tile(work.num_rows, num_tiles, [&](int t, int row, int rows) MOESERVE_TARGET_AVX512_BF16 {
      const BFloat16* values = input + row * stride + first;
      float* sums = room.sums + row * kTileOutputs;
      call_with_rows(rows, [&](auto count) MOESERVE_TARGET_AVX512_BF16 {
        dot_shared<decltype(count)::value>(values, stride, block, next, t, num_tiles, sums);
      });
    });
  }
}

MOESERVE_TARGET_AVX512_BF16 void dot_few_rows(const Work& work, float* sums) {
  switch (work.product.format) {
    case WeightFormat::kInt8:
      return dot_few_rows<WeightFormat::kInt8>(work, sums);
    case WeightFormat::kInt4:
      return dot_few_rows<WeightFormat::kInt4>(work, sums);
    default:
      return dot_few_rows<WeightFormat::kBFloat16>(work, sums);
  }
}

MOESERVE_TARGET_AVX512_BF16 void accumulate_avx512_bf16(const Work& work, Scratch& room) {
  if (work.product.type != ElementType::kBFloat16) return accumulate<16, 6, 2, float>(work, room);
  if (work.num_rows <= kDotRows) return dot_few_rows(work, room.sums);
  // Quantised panels are small: reading them several times from the cache is faster than widening them once.
  const int num_tiles = (work.num_rows + kDotRows - 1) / kDotRows;
  if (!is_quantized(work.product.format) || num_tiles > kFewTiles) return dot_many_rows(work, room);
  for_each_tile(work.num_rows, num_tiles, [&](int, int row, int rows) MOESERVE_TARGET_AVX512_BF16 {
    Work part = work;
    part.input += row * work.input_bytes;
    part.num_rows = rows;
    dot_few_rows(part, room.sums + row * kTileOutputs);
  });
}

MOESERVE_TARGET_AVX512 void accumulate_avx512(const Work& work, Scratch& room) {
  if (work.product.type == ElementType::kBFloat16) return accumulate<16, 6, 2, BFloat16>(work, room);
  accumulate<16, 6, 2, float>(work, room);
}

MOESERVE_TARGET_AVX2 void accumulate_avx2(const Work& work, Scratch& room) {
  if (work.product.type == ElementType::kBFloat16) return accumulate<8, 4, 2, BFloat16>(work, room);
  accumulate<8, 4, 2, float>(work, room);
}

template <int W>
MOESERVE_INLINE Float<W> activate(const PackedProduct& product, Float<W> gate, Float<W> up) {
  if (product.activation == Activation::kSwiGLU) return gate * sigmoid<W>(gate) * up;
  const Float<W> limit = broadcast<W>(product.limit);
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  return gate * sigmoid<W>(product.alpha * gate) * (up + 1.0f);
}

// Scales and biases of the 64 outputs of an item, the same for all rows.
struct Epilogue {
  alignas(64) float factors[kTileOutputs];
  alignas(64) float biases[kTileOutputs];
  int num_outputs[2];  // valid outputs of each panel
  bool is_needed;      // true if a factor differs from 1 or a bias from 0
};

template <typename Element>
MOESERVE_INLINE Epilogue make_epilogue(const PackedProduct& product, const Item& item, const Work& work,
                                       const void* bias) {
  Epilogue epilogue;
  epilogue.is_needed = bias != nullptr || product.format == WeightFormat::kInt8;
  const int64_t half = is_gated(product) ? product.num_outputs / 2 : product.num_outputs;
  for (int p = 0; p < 2; ++p) {
    const int64_t in_half = is_gated(product) ? item.column * kPanel : (item.column * 2 + p) * kPanel;
    const int64_t first = is_gated(product) ? p * half + in_half : in_half;
    const int count = static_cast<int>(std::clamp<int64_t>(half - in_half, 0, kPanel));
    epilogue.num_outputs[p] = count;
    if (!epilogue.is_needed) continue;
    const auto* scales = reinterpret_cast<const float*>(work.panels[p] + work.num_inputs * kPanel);  // int8 only
    for (int n = 0; n < kPanel; ++n) {
      const bool has_bias = bias != nullptr && n < count;
      epilogue.biases[p * kPanel + n] = has_bias ? widen(static_cast<const Element*>(bias)[first + n]) : 0;
      epilogue.factors[p * kPanel + n] = product.format == WeightFormat::kInt8 ? scales[n] : 1;
    }
  }
  return epilogue;
}

template <int W>
MOESERVE_INLINE void scale_row(const Epilogue& epilogue, float* sums) {
  for (int n = 0; epilogue.is_needed && n < kTileOutputs; n += W) {
    store<W>(sums + n, load<W>(sums + n) * load<W>(epilogue.factors + n) + load<W>(epilogue.biases + n));
  }
}

template <int W, typename Output>
MOESERVE_INLINE void finish_rows(const PackedProduct& product, const Epilogue& epilogue, float* sums, int num_rows,
                                 Output* output) {
  const int count = epilogue.num_outputs[0] + (is_gated(product) ? 0 : epilogue.num_outputs[1]);
  const int last = count / W * W;
  for (int r = 0; r < num_rows; ++r, sums += kTileOutputs, output += product.output_stride) {
    scale_row<W>(epilogue, sums);
    if (is_gated(product)) {
      for (int n = 0; n < kPanel; n += W) {
        store<W>(sums + n, activate<W>(product, load<W>(sums + n), load<W>(sums + kPanel + n)));
      }
    }
    for (int n = 0; n < last; n += W) store_in_order<W>(output + n, load<W>(sums + n));
    for (int n = last; n < count; ++n) assign(output + n, sums[n]);
  }
}

// Sum the chunks of an item one after the other, and add neighbours in the tree as soon as both are complete. The sums
// in `room.sums` are scaled and have the bias. Return an epilogue that has nothing left to do.
template <int W, typename Element>
MOESERVE_INLINE Epilogue sum_chunks(const Work& work, const Item& item, const void* bias, Scratch& room,
                                    void (*accumulate_rows)(const Work&, Scratch&)) {
  const PackedProduct& product = work.product;
  const InputChunks chunks = product.chunks();
  Epilogue epilogue;
  const int64_t chunk_bytes = panel_bytes(product.format, chunks.chunk_inputs);
  const int64_t chunk_stride =
      padded_inputs(product.format, chunks.chunk_inputs) * static_cast<int64_t>(sizeof(Element));
  int num_waiting = 0;
  for (int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    const bool is_last = chunk + 1 == chunks.count();
    Work part = work;
    part.input += chunk * chunk_stride;
    for (const char*& panel : part.panels) panel += chunk * chunk_bytes;
    part.next_item = is_last ? work.next_item - chunk * chunk_bytes : chunk_bytes;
    part.num_inputs = padded_inputs(product.format, chunks.size(chunk));
    room.sums = room.waiting_sums[num_waiting++];
    accumulate_rows(part, room);
    epilogue = make_epilogue<Element>(product, item, part, chunk == 0 ? bias : nullptr);
    for (int r = 0; r < item.num_rows; ++r) scale_row<W>(epilogue, room.sums + r * kTileOutputs);
    for (int64_t place = chunk + 1; num_waiting > 1 && (place % 2 == 0 || is_last); place /= 2) {
      const float* right = room.waiting_sums[--num_waiting];
      room.sums = room.waiting_sums[num_waiting - 1];
      for (int64_t i = 0; i < item.num_rows * kTileOutputs; i += W) {
        store<W>(room.sums + i, load<W>(room.sums + i) + load<W>(right + i));
      }
    }
  }
  epilogue.is_needed = false;
  return epilogue;
}

template <int W, typename Element, typename Output>
MOESERVE_INLINE void run_item(const PackedProduct& product, const RowGroup& group, const Item& item,
                              void (*accumulate_rows)(const Work&, Scratch&)) {
  const int64_t panel_size = panel_bytes(product.format, product.chunks());
  const int64_t num_panels = count_panels(is_gated(product) ? product.num_outputs / 2 : product.num_outputs);
  const int64_t first = is_gated(product) ? item.column : item.column * 2;
  const int64_t second = is_gated(product) ? num_panels + item.column : std::min(first + 1, num_panels - 1);
  const Work work{product,
                  group.input + item.first_row * product.input_stride * static_cast<int64_t>(sizeof(Element)),
                  product.input_stride * static_cast<int64_t>(sizeof(Element)),
                  {group.panels + first * panel_size, group.panels + second * panel_size},
                  is_gated(product) ? panel_size : 2 * panel_size,
                  item.num_rows,
                  padded_inputs(product.format, product.num_inputs)};
  Scratch& room = scratch();
  auto* output = reinterpret_cast<Output*>(group.output) + item.first_row * product.output_stride + first * kPanel;
  Epilogue epilogue;
  if (product.chunks().count() > 1) {
    epilogue = sum_chunks<W, Element>(work, item, group.bias, room, accumulate_rows);
  } else {
    room.sums = room.waiting_sums[0];
    accumulate_rows(work, room);
    epilogue = make_epilogue<Element>(product, item, work, group.bias);
  }
  finish_rows<W>(product, epilogue, room.sums, item.num_rows, output);
}

template <int W>
MOESERVE_INLINE void run_item(const PackedProduct& product, const RowGroup& group, const Item& item,
                              void (*accumulate_rows)(const Work&, Scratch&)) {
  if (product.type == ElementType::kFloat32) return run_item<W, float, float>(product, group, item, accumulate_rows);
  if (product.output_type == ElementType::kBFloat16) {
    return run_item<W, BFloat16, BFloat16>(product, group, item, accumulate_rows);
  }
  run_item<W, BFloat16, float>(product, group, item, accumulate_rows);
}

MOESERVE_TARGET_AVX512_BF16 void run_avx512_bf16(const PackedProduct& product, const RowGroup& group,
                                                 const Item& item) {
  run_item<16>(product, group, item, accumulate_avx512_bf16);
}
MOESERVE_TARGET_AVX512 void run_avx512(const PackedProduct& product, const RowGroup& group, const Item& item) {
  run_item<16>(product, group, item, accumulate_avx512);
}
MOESERVE_TARGET_AVX2 void run_avx2(const PackedProduct& product, const RowGroup& group, const Item& item) {
  run_item<8>(product, group, item, accumulate_avx2);
}

// Items are ordered by group, rows and column, because panels of neighbouring columns are adjacent in memory.
void plan(const PackedProduct& product, const std::vector<RowGroup>& groups, std::vector<Item>& items) {
  const int64_t num_panels = count_panels(is_gated(product) ? product.num_outputs / 2 : product.num_outputs);
  const int64_t num_columns = is_gated(product) ? num_panels : (num_panels + 1) / 2;
  items.clear();
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t num_blocks = (groups[g].num_rows + kMaxItemRows - 1) / kMaxItemRows;
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int64_t begin = groups[g].num_rows * b / num_blocks;
      const int64_t end = groups[g].num_rows * (b + 1) / num_blocks;
      for (int64_t column = 0; column < num_columns; ++column) {
        items.push_back({static_cast<int32_t>(g), static_cast<int32_t>(begin), static_cast<int32_t>(end - begin),
                         static_cast<int32_t>(column)});
      }
    }
  }
}

// Copy the rows with the inputs of each chunk filled up with zeros, as the weights are.
std::vector<RowGroup> with_padded_inputs(PackedProduct& product, const std::vector<RowGroup>& groups,
                                         std::vector<char>& room) {
  const int64_t element = element_bytes(product.type);
  const InputChunks chunks = product.chunks();
  const int64_t width = padded_inputs(product.format, chunks);
  const int64_t chunk_bytes = chunks.chunk_inputs * element;
  const int64_t padded_chunk_bytes = padded_inputs(product.format, chunks.chunk_inputs) * element;
  int64_t num_rows = 0;
  for (const RowGroup& group : groups) num_rows += group.num_rows;
  room.assign(num_rows * width * element, 0);
  std::vector<RowGroup> padded = groups;
  char* target = room.data();
  for (RowGroup& group : padded) {
    const char* source = group.input;
    group.input = target;
    for (int64_t r = 0; r < group.num_rows; ++r, target += width * element) {
      const char* row = source + r * product.input_stride * element;
      for (int64_t c = 0; c < chunks.count(); ++c) {
        std::memcpy(target + c * padded_chunk_bytes, row + c * chunk_bytes, chunks.size(c) * element);
      }
    }
  }
  product.input_stride = width;
  return padded;
}

}  // namespace

void packed_product(const PackedProduct& asked, const std::vector<RowGroup>& asked_groups) {
  PackedProduct product = asked;
  std::vector<char> room;
  std::vector<RowGroup> padded;
  const bool is_padded = padded_inputs(product.format, product.chunks()) != product.num_inputs;
  if (is_padded) padded = with_padded_inputs(product, asked_groups, room);
  const std::vector<RowGroup>& groups = is_padded ? padded : asked_groups;

  thread_local std::vector<Item> items_of_this_thread;
  std::vector<Item>& items = items_of_this_thread;  // a reference, because other threads use it
  plan(product, groups, items);
  int64_t num_rows = 0;
  int64_t num_weights = 0;
  for (const RowGroup& group : groups) {
    num_rows += group.num_rows;
    num_weights += group.num_rows > 0 ? product.num_outputs * product.num_inputs : 0;
  }
  const auto run = choose_version(current_isa(), run_avx2, run_avx512, run_avx512_bf16);
  const auto work = [&](int64_t i) { run(product, groups[items[i].group], items[i]); };
  if (std::max(num_weights * 2, num_rows * product.num_outputs * product.num_inputs / 8) < kParallelWork) {
    for (size_t i = 0; i < items.size(); ++i) work(static_cast<int64_t>(i));
  } else {
    parallel_for(static_cast<int64_t>(items.size()), work);
  }
}

}  // namespace moeserve
