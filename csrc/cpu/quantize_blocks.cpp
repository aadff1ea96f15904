// Quantisation of blocks: weighted least squares, for the outputs of a panel side by side.

#include "quantize_blocks.h"

#include "isa.h"
#include "lanes.h"
#include "rounding.h"

namespace moeserve {

namespace {

// Inputs that share a scale, of W outputs.
template <int W, int kInputs>
struct Group {
  Float<W> weights[kInputs];
  Float<W> shares[kInputs];  // of the weights in the error
  Float<W> share = {};       // their sum
  Float<W> mean = {};        // sum of shares * weights
  Float<W> square = {};      // sum of shares * weights^2
};

// Sums over the codes of a group, times shares.
template <int W>
struct CodeSums {
  Float<W> codes = {};
  Float<W> squares = {};
  Float<W> products = {};  // of codes and weights
};

// The numbers that weights can have: scale * code - minimum.
template <int W>
struct Grid {
  Float<W> scale;
  Float<W> minimum;
};

template <int W>
MOESERVE_INLINE Float<W> smaller(Float<W> a, Float<W> b) {
  return a < b ? a : b;
}

// The formats of this file differ in their codes, from kLowest to kHighest, in their groups, and in minima.
template <int W, WeightFormat kFormat>
struct BlockQuantizer {
  static constexpr BlockLayout kLayout = traits_of(kFormat).blocks;
  static constexpr bool kHasMinima = kLayout.has_minima;
  static constexpr int kInputs = kLayout.scale_inputs;
  static constexpr int kMaxGroups = kMaxBlockInputs / kInputs;
  static constexpr int kCodes = 16 << kLayout.high_bits;
  static constexpr float kLowest = kHasMinima ? 0 : -kCodes / 2;
  static constexpr float kHighest = kLowest + kCodes - 1;
  static constexpr float kHighestScale = kHasMinima ? 63 : 127;
  using Lanes = Float<W>;
  using Inputs = Group<W, kInputs>;

  static MOESERVE_INLINE Lanes round_code(Lanes weight, Lanes minimum, Lanes inverse) {
    const Lanes code = round_to_integer<W>((weight + minimum) * inverse);
    return smaller<W>(larger<W>(code, broadcast<W>(kLowest)), broadcast<W>(kHighest));
  }

  static MOESERVE_INLINE Inputs load_group(const float* weights, const float* importances) {
    Inputs group;
    Lanes size = {};
    for (int k = 0; k < kInputs; ++k) {
      group.weights[k] = load<W>(weights + k * kPanel);
      size += magnitude<W>(group.weights[k]);
    }
    size *= 1.0f / kInputs;
    for (int k = 0; k < kInputs; ++k) {
      const Lanes weight = group.weights[k];
      Lanes share = size + magnitude<W>(weight);
      if (importances != nullptr) share *= broadcast<W>(importances[k]);
      group.shares[k] = share;
      group.share += share;
      group.mean += share * weight;
      group.square += share * weight * weight;
    }
    return group;
  }

  static MOESERVE_INLINE CodeSums<W> sum_codes(const Inputs& group, Lanes minimum, Lanes inverse) {
    CodeSums<W> sums;
    for (int k = 0; k < kInputs; ++k) {
      const Lanes code = round_code(group.weights[k], minimum, inverse);
      const Lanes shared = group.shares[k] * code;
      sums.codes += shared;
      sums.squares += shared * code;
      sums.products += shared * group.weights[k];
    }
    return sums;
  }

  static MOESERVE_INLINE Lanes best_minimum(const Inputs& group, const CodeSums<W>& sums, Lanes scale) {
    if constexpr (!kHasMinima) return Lanes{};
    return larger<W>((scale * sums.codes - group.mean) * inverse_or_zero<W>(group.share), Lanes{});
  }

  // Return the squared error of a grid with the codes of the sums.
  static MOESERVE_INLINE Lanes error_of(const Inputs& group, const CodeSums<W>& sums, const Grid<W>& grid) {
    const Lanes of_scale = grid.scale * (grid.scale * sums.squares - 2.0f * sums.products);
    const Lanes of_minimum =
        grid.minimum * (grid.minimum * group.share + 2.0f * (group.mean - grid.scale * sums.codes));
    return group.square + of_scale + of_minimum;
  }

  // Return the grid with the least error for the codes of the sums.
  static MOESERVE_INLINE Grid<W> best_grid(const Inputs& group, const CodeSums<W>& sums) {
    const Lanes alone = sums.products * inverse_or_zero<W>(sums.squares);  // the scale without a minimum
    if constexpr (!kHasMinima) return {alone, Lanes{}};
    const Lanes variance = group.share * sums.squares - sums.codes * sums.codes;
    const Lanes covariance = group.share * sums.products - sums.codes * group.mean;
    const Lanes scale = covariance * inverse_or_zero<W>(variance);
    const Lanes minimum = (scale * sums.codes - group.mean) * inverse_or_zero<W>(group.share);
    const auto has_minimum = minimum > 0.0f;
    return {larger<W>(has_minimum ? scale : alone, Lanes{}), has_minimum ? minimum : Lanes{}};
  }

  // Return a grid whose scale and minimum are not rounded yet.
  static MOESERVE_INLINE Grid<W> choose_grid(const Inputs& group) {
    Lanes low = {}, high = group.weights[0], farthest = {};
    for (int k = 0; k < kInputs; ++k) {
      low = smaller<W>(group.weights[k], low);
      high = larger<W>(group.weights[k], high);
      farthest = magnitude<W>(group.weights[k]) > magnitude<W>(farthest) ? group.weights[k] : farthest;
    }
    Grid<W> best = {};
    Lanes least = group.square;
    // Narrower and wider grids than the range of the weights.
    for (int step = -kTrials; step <= kTrials; ++step) {
      const float codes = kCodes / (kHasMinima ? 1.0f : 2.0f) - (kHasMinima ? 1.0f : 0.0f) + kTrialStep * step;
      const Lanes minimum = kHasMinima ? -low : Lanes{};
      const Lanes inverse = codes * inverse_or_zero<W>(kHasMinima ? high - low : -farthest);
      const CodeSums<W> sums = sum_codes(group, minimum, inverse);
      const Grid<W> grid = best_grid(group, sums);
      const Lanes error = error_of(group, sums, grid);
      const auto is_better = error < least;
      least = is_better ? error : least;
      best = {is_better ? grid.scale : best.scale, is_better ? grid.minimum : best.minimum};
    }
    return best;
  }

  static constexpr int kTrials = 3;
  static constexpr float kTrialStep = 0.4f;

  // Return the factor for integers of at most `highest`, rounded to float16.
  static MOESERVE_INLINE Lanes factor_of(Lanes largest, float highest) {
    return round_to_float16<W>(largest * (1.0f / highest));
  }

  static MOESERVE_INLINE void quantize(const float* weights, const float* importances, int groups, int first,
                                       PanelBlock& block) {
    const int count = groups * kInputGroup / kInputs;
    Inputs inputs[kMaxGroups];
    Grid<W> grids[kMaxGroups];  // of integers, from the second loop on
    Lanes largest = {}, largest_minimum = {};
    for (int g = 0; g < count; ++g) {
      const float* of_group = importances == nullptr ? nullptr : importances + g * kInputs;
      inputs[g] = load_group(weights + g * kInputs * kPanel + first, of_group);
      grids[g] = choose_grid(inputs[g]);
      largest = larger<W>(magnitude<W>(grids[g].scale), largest);
      largest_minimum = larger<W>(grids[g].minimum, largest_minimum);
    }
    Lanes factor = factor_of(largest, kHighestScale);
    Lanes of_minima = factor_of(largest_minimum, kHighestScale);
    // Sums over the block of scale * code and of the weights, for the best factors.
    Lanes squares = {}, minima = {}, both = {}, products = {}, products_of_minima = {};
    for (int g = 0; g < count; ++g) {
      const Lanes inverse = inverse_or_zero<W>(factor), inverse_of_minima = inverse_or_zero<W>(of_minima);
      const Lanes nearest = round_to_integer<W>(grids[g].scale * inverse);
      const Lanes minimum = round_to_integer<W>(grids[g].minimum * inverse_of_minima) * of_minima;
      Grid<W> best = {};
      CodeSums<W> best_sums;
      Lanes least = {};
      for (int step = -1; step <= 1; ++step) {
        constexpr float kLeast = kHasMinima ? 0 : -kHighestScale;
        const Lanes integer = smaller<W>(larger<W>(nearest + static_cast<float>(step), broadcast<W>(kLeast)),
                                         broadcast<W>(kHighestScale));
        const Lanes scale = integer * factor;
        const CodeSums<W> sums = sum_codes(inputs[g], minimum, inverse_or_zero<W>(scale));
        const Lanes fitted = best_minimum(inputs[g], sums, scale) * inverse_of_minima;
        const Lanes of_minimum = smaller<W>(round_to_integer<W>(fitted), broadcast<W>(kHighestScale));
        const Lanes error = error_of(inputs[g], sums, {scale, of_minimum * of_minima});
        const auto is_better = step == -1 ? integer == integer : error < least;
        least = is_better ? error : least;
        best = {is_better ? integer : best.scale, is_better ? of_minimum : best.minimum};
        best_sums.codes = is_better ? sums.codes : best_sums.codes;
        best_sums.squares = is_better ? sums.squares : best_sums.squares;
        best_sums.products = is_better ? sums.products : best_sums.products;
      }
      grids[g] = best;
      squares += best.scale * best.scale * best_sums.squares;
      products += best.scale * best_sums.products;
      minima += best.minimum * best.minimum * inputs[g].share;
      products_of_minima += best.minimum * inputs[g].mean;
      both += best.scale * best.minimum * best_sums.codes;
    }
    // The best factors for these integers: the minimum of a quadratic function of both.
    const Lanes determinant = squares * minima - both * both;
    const auto has_both = determinant > 1e-6f * squares * minima;
    const Lanes inverse = inverse_or_zero<W>(has_both ? determinant : Lanes{});
    const Lanes fitted = has_both ? (products * minima - products_of_minima * both) * inverse
                                  : (kHasMinima ? factor : products * inverse_or_zero<W>(squares));
    const Lanes fitted_of_minima = has_both ? (products * both - products_of_minima * squares) * inverse : of_minima;
    factor = round_to_float16<W>(larger<W>(fitted, Lanes{}));
    of_minima = round_to_float16<W>(larger<W>(fitted_of_minima, Lanes{}));
    store_block(inputs, grids, factor, of_minima, count, first, block);
  }

  static MOESERVE_INLINE void store_block(const Inputs* inputs, const Grid<W>* grids, Lanes factor, Lanes of_minima,
                                          int count, int first, PanelBlock& block) {
    float numbers[W], minima[W];
    for (int g = 0; g < count; ++g) {
      const Lanes inverse = inverse_or_zero<W>(grids[g].scale * factor);
      for (int k = 0; k < kInputs; ++k) {
        const Lanes code = round_code(inputs[g].weights[k], grids[g].minimum * of_minima, inverse);
        store<W>(numbers, code - kLowest);
        const int input = g * kInputs + k;
        for (int n = 0; n < W; ++n) {
          block.codes[input / kInputGroup][first + n][input % kInputGroup] = static_cast<uint8_t>(numbers[n]);
        }
      }
      store<W>(numbers, grids[g].scale);
      store<W>(minima, grids[g].minimum);
      for (int n = 0; n < W; ++n) {
        block.scales[g][first + n] = static_cast<int8_t>(numbers[n]);
        if (kHasMinima) block.minima[g][first + n] = static_cast<uint8_t>(minima[n]);
      }
    }
    store<W>(numbers, factor);
    store<W>(minima, of_minima);
    for (int n = 0; n < W; ++n) {
      block.factors[first + n] = float16_bits(numbers[n]);
      block.factors_of_minima[first + n] = float16_bits(minima[n]);
    }
  }
};

template <int W>
MOESERVE_INLINE void quantize_outputs(WeightFormat format, const float* weights, const float* importances, int groups,
                                      PanelBlock& block) {
  for (int first = 0; first < kPanel; first += W) {
    if (format == WeightFormat::kQ4_K) {
      BlockQuantizer<W, WeightFormat::kQ4_K>::quantize(weights, importances, groups, first, block);
    } else if (format == WeightFormat::kQ5_K) {
      BlockQuantizer<W, WeightFormat::kQ5_K>::quantize(weights, importances, groups, first, block);
    } else {
      BlockQuantizer<W, WeightFormat::kQ6_K>::quantize(weights, importances, groups, first, block);
    }
  }
}

MOESERVE_DEFINE_VARIANTS(quantize_outputs,
                         (WeightFormat format, const float* weights, const float* importances, int groups,
                          PanelBlock& block),
                         (format, weights, importances, groups, block))

}  // namespace

void quantize_block(WeightFormat format, const float* weights, const float* importances, int groups,
                    PanelBlock& block) {
  choose_quantize_outputs(current_isa())(format, weights, importances, groups, block);
}

}  // namespace moeserve
