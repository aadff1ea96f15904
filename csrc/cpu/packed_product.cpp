// Division of products into items of some rows and 64 outputs, and their execution.
//
// Few rows, whose sums all fit in registers, read their panels once from beginning to end at memory speed. More rows
// are processed in tiles over a block of the panels that stays in the L1 cache, while the next block is prefetched to
// the L2 cache, so that memory access and computation overlap.

#include "packed_product.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "accumulate.h"
#include "accumulate_float8.h"
#include "isa.h"
#include "parallel.h"
#include "quantized_rows.h"
#include "rows.h"

namespace moeserve {

namespace {

constexpr int kMaxItemRows = 192;
constexpr int64_t kParallelWork = 1 << 17;  // bytes read, or multiply-adds / 8, that justify a second thread

// The unit of work of a thread.
struct Item {
  int32_t group;
  int32_t first_row;
  int32_t num_rows;
  int32_t column;  // from output 32 * column of gates and ups, or from output 64 * column
};

// The rows of all groups in the form that the kernels read.
struct PreparedRows {
  int64_t row_bytes;    // distance between rows
  int64_t chunk_bytes;  // distance between chunks of a row
  std::vector<RowGroup> groups;
};

constexpr int kMaxWaitingSums = 4;  // sums of chunks that wait for their neighbours in the tree
static_assert(kMaxInputChunks <= 1 << (kMaxWaitingSums - 1));

// Buffers that each thread keeps from call to call.
struct Scratch {
  alignas(64) float waiting_sums[kMaxWaitingSums][kMaxItemRows * kTileOutputs];
  float* sums = waiting_sums[0];  // sums of the current chunk
};

Scratch& scratch() {
  thread_local std::unique_ptr<Scratch> of_this_thread = std::make_unique<Scratch>();
  return *of_this_thread;
}

bool is_gated(const PackedProduct& product) { return is_gated(product.activation); }

template <int W>
MOESERVE_INLINE Float<W> activate(const PackedProduct& product, Float<W> gate, Float<W> up) {
  if (product.activation == Activation::kSwiGLU) return gate * sigmoid<W>(gate) * up;
  if (product.activation == Activation::kGeGLU) {  // (1 + tanh(x)) / 2 = sigmoid(2 * x)
    constexpr float kTwoRootsOf2ByPi = 1.5957691216f;
    return gate * sigmoid<W>(kTwoRootsOf2ByPi * (gate + 0.044715f * gate * gate * gate)) * up;
  }
  if (product.activation == Activation::kCappedSwiGLU) {
    const Float<W> capped = product.alpha * tanh_of<W>(gate * (1.0f / product.alpha));
    return capped * sigmoid<W>(gate) * (product.limit * tanh_of<W>(up * (1.0f / product.limit)));
  }
  const Float<W> limit = broadcast<W>(product.limit);
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  if (product.activation == Activation::kLimitedSwiGLU) {
    const Float<W> gated = gate * sigmoid<W>(gate);
    return (gated > limit ? limit : gated) * up;
  }
  gate = gate > limit ? limit : gate;
  if (product.activation == Activation::kCutSwiGLU) return gate * sigmoid<W>(gate) * up;
  return gate * sigmoid<W>(product.alpha * gate) * (up + 1.0f);
}

// The scales and biases of an item's 64 outputs, which are the same for all rows.
struct Epilogue {
  alignas(64) float factors[kTileOutputs];
  alignas(64) float biases[kTileOutputs];
  int num_outputs[2];  // valid outputs of each panel
  bool is_needed;      // true if a factor differs from 1 or a bias from 0
};

template <typename Element>
MOESERVE_INLINE Epilogue make_epilogue(const PackedProduct& product, const Item& item, const ProductWork& work,
                                       const void* bias) {
  Epilogue epilogue;
  const bool has_scales = traits_of(product.format).end_bytes > 0;
  epilogue.is_needed = bias != nullptr || has_scales;
  const int64_t half = is_gated(product) ? product.num_outputs / 2 : product.num_outputs;
  for (int p = 0; p < 2; ++p) {
    const int64_t in_half = is_gated(product) ? item.column * kPanel : (item.column * 2 + p) * kPanel;
    const int64_t first = is_gated(product) ? p * half + in_half : in_half;
    const int count = static_cast<int>(std::clamp<int64_t>(half - in_half, 0, kPanel));
    epilogue.num_outputs[p] = count;
    if (!epilogue.is_needed) continue;
    const auto* scales = reinterpret_cast<const float*>(work.panels[p] + work.num_inputs * kPanel);
    for (int n = 0; n < kPanel; ++n) {
      const bool has_bias = bias != nullptr && n < count;
      epilogue.biases[p * kPanel + n] = has_bias ? widen(static_cast<const Element*>(bias)[first + n]) : 0;
      epilogue.factors[p * kPanel + n] = has_scales ? scales[n] : 1;
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
    } else if (product.activation == Activation::kSquaredReLU) {
      for (int n = 0; n < kTileOutputs; n += W) {
        const Float<W> up = load<W>(sums + n);
        const Float<W> positive = up < 0.0f ? broadcast<W>(0.0f) : up;  // NaN stays NaN
        store<W>(sums + n, positive * positive);
      }
    }
    for (int n = 0; n < last; n += W) store_in_order<W>(output + n, load<W>(sums + n));
    for (int n = last; n < count; ++n) assign(output + n, sums[n]);
  }
}

// Scale the last of the waiting sums, and add to it the `num_neighbours` sums before it whose branch it completes.
template <int W>
MOESERVE_INLINE void merge_sums(const Epilogue& epilogue, int num_rows, int last, int num_neighbours, Scratch& room) {
  float* target = room.waiting_sums[last - num_neighbours];
  for (int row = 0; row < num_rows; ++row) {
    for (int n = 0; n < kTileOutputs; n += W) {
      const int place = row * kTileOutputs + n;
      Float<W> sums = load<W>(room.waiting_sums[last] + place);
      if (epilogue.is_needed) sums = sums * load<W>(epilogue.factors + n) + load<W>(epilogue.biases + n);
      for (int i = 1; i <= num_neighbours; ++i) sums = load<W>(room.waiting_sums[last - i] + place) + sums;
      store<W>(target + place, sums);
    }
  }
}

// Sum the chunks of an item one after another, and add neighbours in the tree as soon as both are complete. The results
// in `room.sums` are scaled and include the bias. Return an epilogue that does nothing.
template <int W, typename Element>
MOESERVE_INLINE Epilogue sum_chunks(const PackedProduct& product, const ProductWork& work, const Item& item,
                                    const void* bias, Scratch& room, int64_t row_chunk_bytes,
                                    Accumulate accumulate_rows) {
  const InputChunks chunks = product.chunks();
  Epilogue epilogue;
  const int64_t chunk_bytes = panel_bytes(product.format, chunks, 0);
  int num_waiting = 0;
  for (int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    const bool is_last = chunk + 1 == chunks.count();
    ProductWork part = work;
    part.input += chunk * row_chunk_bytes;
    for (const char*& panel : part.panels) panel += chunk * chunk_bytes;
    part.next_item = is_last ? work.next_item - chunk * chunk_bytes : chunk_bytes;
    part.num_inputs = padded_inputs(product.format, chunks, chunk);
    room.sums = room.waiting_sums[num_waiting];
    accumulate_rows(part, room.sums);
    epilogue = make_epilogue<Element>(product, item, part, chunk == 0 ? bias : nullptr);
    int num_neighbours = 0;
    for (int64_t place = chunk + 1; num_neighbours < num_waiting && (place % 2 == 0 || is_last); place /= 2) {
      ++num_neighbours;
    }
    if (epilogue.is_needed || num_neighbours > 0) {
      merge_sums<W>(epilogue, item.num_rows, num_waiting, num_neighbours, room);
    }
    num_waiting += 1 - num_neighbours;
  }
  room.sums = room.waiting_sums[0];
  epilogue.is_needed = false;
  return epilogue;
}

template <int W, typename Element, typename Output>
MOESERVE_INLINE void run_item(const PackedProduct& product, const PreparedRows& prepared, const RowGroup& group,
                              const Item& item, Accumulate accumulate_rows) {
  const InputChunks chunks = product.chunks();
  const int64_t panel_size = panel_bytes(product.format, chunks);
  const int64_t num_panels = count_panels(is_gated(product) ? product.num_outputs / 2 : product.num_outputs);
  const int64_t first = is_gated(product) ? item.column : item.column * 2;
  const int64_t second = is_gated(product) ? num_panels + item.column : std::min(first + 1, num_panels - 1);
  const ProductWork work{product.format,
                         panel_unit(product.format, chunks.chunk_inputs),
                         group.input + item.first_row * prepared.row_bytes,
                         prepared.row_bytes,
                         {group.panels + first * panel_size, group.panels + second * panel_size},
                         is_gated(product) ? panel_size : 2 * panel_size,
                         item.num_rows,
                         padded_inputs(product.format, chunks)};
  Scratch& room = scratch();
  auto* output = reinterpret_cast<Output*>(group.output) + item.first_row * product.output_stride + first * kPanel;
  Epilogue epilogue;
  if (chunks.count() > 1) {
    epilogue = sum_chunks<W, Element>(product, work, item, group.bias, room, prepared.chunk_bytes, accumulate_rows);
  } else {
    room.sums = room.waiting_sums[0];
    accumulate_rows(work, room.sums);
    epilogue = make_epilogue<Element>(product, item, work, group.bias);
  }
  finish_rows<W>(product, epilogue, room.sums, item.num_rows, output);
}

template <int W>
MOESERVE_INLINE void run_item(const PackedProduct& product, const PreparedRows& prepared, const RowGroup& group,
                              const Item& item, Accumulate accumulate_rows) {
  if (product.type == ElementType::kFloat32) {
    run_item<W, float, float>(product, prepared, group, item, accumulate_rows);
  } else if (product.output_type == ElementType::kBFloat16) {
    run_item<W, BFloat16, BFloat16>(product, prepared, group, item, accumulate_rows);
  } else {
    run_item<W, BFloat16, float>(product, prepared, group, item, accumulate_rows);
  }
}

MOESERVE_DEFINE_VARIANTS(run_item,
                         (const PackedProduct& product, const PreparedRows& prepared, const RowGroup& group,
                          const Item& item, Accumulate accumulate_rows),
                         (product, prepared, group, item, accumulate_rows))

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

// Return `num_bytes` of `room`, aligned to a cache line.
char* aligned_room(std::vector<char>& room, int64_t num_bytes) {
  room.resize(num_bytes + 64);
  return room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64;
}

void widen_row(const BFloat16* row, int64_t size, float* target) {
  for (int64_t i = 0; i < size; ++i) target[i] = widen(row[i]);
}

// Convert the rows to the form that the kernels read: quantised, or widened if the instruction set needs it and with
// the inputs of each chunk padded with zeros as in the weights. Rows that already have this form are used in place.
PreparedRows prepare(const PackedProduct& product, const std::vector<RowGroup>& groups, Isa isa,
                     std::vector<char>& room) {
  const int64_t element = element_bytes(product.type);
  const InputChunks chunks = product.chunks();
  const bool quantizes = is_quantized(product.format), widens = widens_rows(product.format, isa);
  if (!quantizes && !widens && padded_inputs(product.format, chunks) == product.num_inputs) {
    return {product.input_stride * element, chunks.chunk_inputs * element, groups};
  }
  const PanelUnit unit = panel_unit(product.format, chunks.chunk_inputs);
  const auto layout_of = [&](int64_t chunk) {
    return row_layout(product.format, unit, padded_inputs(product.format, chunks, chunk), widens);
  };
  const int64_t prepared_element = widens ? sizeof(float) : element;
  const auto bytes_of = [&](int64_t chunk) {
    return quantizes ? layout_of(chunk).row_bytes() : padded_inputs(product.format, chunks, chunk) * prepared_element;
  };
  const int64_t chunk_bytes = bytes_of(0);
  const int64_t last = chunks.count() - 1;
  PreparedRows prepared{last * chunk_bytes + bytes_of(last), chunk_bytes, groups};
  char* target = aligned_room(room, count_rows(groups) * prepared.row_bytes);
  for (RowGroup& group : prepared.groups) {
    const char* source = std::exchange(group.input, target);
    for (int64_t c = 0; c < chunks.count(); ++c) {
      const char* from = source + c * chunks.chunk_inputs * element;
      char* to = target + c * chunk_bytes;
      const int64_t size = chunks.size(c);
      if (quantizes) {
        quantize_rows(product.type, from, product.input_stride, group.num_rows, size, layout_of(c), to,
                      prepared.row_bytes);
        continue;
      }
      for (int64_t r = 0; r < group.num_rows; ++r, from += product.input_stride * element, to += prepared.row_bytes) {
        if (widens) {
          widen_row(reinterpret_cast<const BFloat16*>(from), size, reinterpret_cast<float*>(to));
        } else {
          std::memcpy(to, from, size * element);
        }
        std::memset(to + size * prepared_element, 0, bytes_of(c) - size * prepared_element);
      }
    }
    target += group.num_rows * prepared.row_bytes;
  }
  return prepared;
}

// Copy prepared rows of the source to those of the groups.
PreparedRows gather(const PreparedRows& source, const GatheredRows& gathered, int64_t row_bytes,
                    const std::vector<RowGroup>& groups, std::vector<char>& room) {
  PreparedRows prepared{row_bytes, source.chunk_bytes, groups};
  const int64_t num_rows = count_rows(groups);
  char* target = aligned_room(room, num_rows * row_bytes);
  for_rows(num_rows, row_bytes, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const char* row = source.groups[0].input + gathered.indices[r] / gathered.divisor * source.row_bytes;
      std::memcpy(target + r * row_bytes, row, row_bytes);
    }
  });
  for (RowGroup& group : prepared.groups) {
    group.input = target;
    target += group.num_rows * row_bytes;
  }
  return prepared;
}

}  // namespace

void packed_product(const PackedProduct& product, const std::vector<RowGroup>& groups, const GatheredRows* gathered) {
  const Isa isa = current_isa();
  thread_local std::vector<char> rows_of_this_thread, source_of_this_thread;
  thread_local std::vector<Item> items_of_this_thread;
  PreparedRows prepared;
  if (gathered == nullptr) {
    prepared = prepare(product, groups, isa, rows_of_this_thread);
  } else {
    const RowGroup all{nullptr, nullptr, gathered->source, nullptr, gathered->num_rows};
    const PreparedRows source = prepare(product, {all}, isa, source_of_this_thread);
    const bool is_in_place = source.groups[0].input == gathered->source;
    const int64_t row_bytes = is_in_place ? product.num_inputs * element_bytes(product.type) : source.row_bytes;
    prepared = gather(source, *gathered, row_bytes, groups, rows_of_this_thread);
  }
  std::vector<Item>& items = items_of_this_thread;  // a reference, which other threads can use
  plan(product, groups, items);
  int64_t num_rows = 0;
  int64_t num_weights = 0;
  for (const RowGroup& group : groups) {
    num_rows += group.num_rows;
    num_weights += group.num_rows > 0 ? product.num_outputs * product.num_inputs : 0;
  }
  const auto run = choose_run_item(isa);
  const bool is_float8 = product.format == WeightFormat::kFp8;
  const auto accumulate_rows = is_float8 ? choose_accumulate_float8(isa) : choose_accumulate(isa);
  const auto work = [&](int64_t i) {
    const Item& item = items[i];
    run(product, prepared, prepared.groups[item.group], item, accumulate_rows);
  };
  if (std::max(num_weights * 2, num_rows * product.num_outputs * product.num_inputs / 8) < kParallelWork) {
    for (size_t i = 0; i < items.size(); ++i) work(static_cast<int64_t>(i));
  } else {
    parallel_for(static_cast<int64_t>(items.size()), work);
  }
}

}  // namespace moeserve
