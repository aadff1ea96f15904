// Draws tokens without sorting whole rows: tokens are divided into buckets by score, and only the buckets are sorted
// that contain the limits set by `top_k`, `top_p` and the random number.

#include "draw_tokens.h"

#include <algorithm>
#include <cfloat>
#include <cstring>
#include <limits>
#include <vector>

#include "isa.h"
#include "lanes.h"
#include "parallel.h"
#include "rows.h"

namespace moeserve {

namespace {

// The scores of a bucket span 1/32 of the temperature. The last bucket has all tokens that are less likely than e^-32
// times the most likely token, including those with score minus infinity.
constexpr int kBucketsPerUnit = 32;
constexpr int kNumBuckets = 32 * kBucketsPerUnit + 1;

struct Entry {
  float score;
  int32_t token;
};

bool is_before(const Entry& a, const Entry& b) {
  return a.score > b.score || (a.score == b.score && a.token < b.token);
}

// The first tokens of a row, in its order, up to a certain token.
struct Prefix {
  int bucket;     // the bucket that holds the last token
  int64_t count;  // tokens of this bucket
  double weight;  // sum of the weights of the prefix's tokens
};

// A row of scores in buckets. The weight of a token is its probability divided by the largest probability.
class Row {
 public:
  template <int W>
  MOESERVE_INLINE void fill(const float* scores, int64_t width, float temperature) {
    scores_ = scores;
    weights_.resize(width);
    bucket_of_.resize(width);
    const float highest = largest<W>(scores, width);
    const float divisor = std::max(temperature, FLT_MIN);  // with zero, the largest weight would be 0 / 0
    int64_t i = 0;
    for (; i + W <= width; i += W) weigh<W>(load<W>(scores + i), highest, divisor, i, W);
    // The remaining tokens use whole vectors one by one, because a weight must not depend on the token's place.
    for (; i < width; ++i) weigh<W>(broadcast<W>(scores[i]), highest, divisor, i, 1);
    std::fill(counts_, counts_ + kNumBuckets, 0);
    std::fill(sums_, sums_ + kNumBuckets, 0.0);
    for (i = 0; i < width; ++i) {
      ++counts_[bucket_of_[i]];
      sums_[bucket_of_[i]] += weights_[i];
    }
    sorted_bucket_ = -1;
  }

  // Return the number of tokens whose weight is at least `least`.
  int64_t count_from(float least) const {
    return std::count_if(weights_.begin(), weights_.end(), [&](float weight) { return weight >= least; });
  }

  // Return the first `count` tokens, or all tokens if there are fewer.
  Prefix first_tokens(int64_t count) {
    Prefix prefix{};
    for (int bucket = 0; bucket < kNumBuckets && count > 0; ++bucket) {
      if (counts_[bucket] == 0) continue;
      if (count < counts_[bucket]) {
        return prefix_in_bucket(bucket, prefix.weight, [&](int64_t n, double) { return n == count; });
      }
      prefix = {bucket, counts_[bucket], prefix.weight + sums_[bucket]};
      count -= counts_[bucket];
    }
    return prefix;
  }

  // Return the shortest prefix whose weight satisfies `is_enough`, but at most `most`.
  template <typename IsEnough>
  Prefix shortest(const Prefix& most, const IsEnough& is_enough) {
    double weight = 0.0;
    for (int bucket = 0; bucket < most.bucket; ++bucket) {
      if (counts_[bucket] != 0 && is_enough(weight + sums_[bucket])) {
        return prefix_in_bucket(bucket, weight, [&](int64_t, double sum) { return is_enough(sum); });
      }
      weight += sums_[bucket];
    }
    return prefix_in_bucket(most.bucket, weight,
                            [&](int64_t n, double sum) { return n == most.count || is_enough(sum); });
  }

  // Return the last token of a prefix.
  int64_t last_token(const Prefix& prefix) {
    sort_bucket(prefix.bucket);
    return sorted_[prefix.count - 1].token;
  }

 private:
  template <int W>
  MOESERVE_INLINE static float largest(const float* scores, int64_t width) {
    Float<W> best = broadcast<W>(scores[0]);
    int64_t i = 0;
    for (; i + W <= width; i += W) best = larger<W>(best, load<W>(scores + i));
    float result = largest_lane<W>(best);
    for (; i < width; ++i) result = std::max(result, scores[i]);
    return result;
  }

  // Set the weights and buckets of `count` tokens from `first` on.
  template <int W>
  MOESERVE_INLINE void weigh(Float<W> scores, float highest, float divisor, int64_t first, int count) {
    const Float<W> distances = (highest - scores) / divisor;
    const Float<W> weights = exp_of_nonpositive<W>(-distances);
    const Float<W> places = distances * static_cast<float>(kBucketsPerUnit);
    const Float<W> last = broadcast<W>(static_cast<float>(kNumBuckets - 1));
    const auto buckets =
        __builtin_convertvector(__builtin_convertvector(places < last ? places : last, typename Vector<W>::Int),
                                typename Vector<W>::HalfAsMany);
    std::memcpy(weights_.data() + first, &weights, count * sizeof(float));
    std::memcpy(bucket_of_.data() + first, &buckets, count * sizeof(uint16_t));
  }

  // Return the shortest prefix that ends in a bucket and satisfies `is_end(tokens of the bucket, weight)`; the prefix
  // that ends with the bucket if there is none.
  template <typename IsEnd>
  Prefix prefix_in_bucket(int bucket, double weight, const IsEnd& is_end) {
    sort_bucket(bucket);
    int64_t count = 0;
    for (const Entry& entry : sorted_) {
      weight += weights_[entry.token];
      if (is_end(++count, weight)) break;
    }
    return {bucket, count, weight};
  }

  void sort_bucket(int bucket) {
    if (bucket == sorted_bucket_) return;
    sorted_bucket_ = bucket;
    sorted_.clear();
    for (size_t i = 0; i < bucket_of_.size(); ++i) {
      if (bucket_of_[i] == bucket && scores_[i] != -std::numeric_limits<float>::infinity()) {
        sorted_.push_back({scores_[i], static_cast<int32_t>(i)});
      }
    }
    std::sort(sorted_.begin(), sorted_.end(), is_before);
  }

  const float* scores_ = nullptr;
  std::vector<float> weights_;
  std::vector<uint16_t> bucket_of_;
  int64_t counts_[kNumBuckets];  // number of tokens of each bucket
  double sums_[kNumBuckets];     // sum of the weights of each bucket
  std::vector<Entry> sorted_;    // the tokens of one bucket
  int sorted_bucket_ = -1;
};

template <int W>
MOESERVE_INLINE void draw_row(const DrawTokens& draw, int64_t r) {
  static thread_local Row row;  // static, to keep its memory
  row.fill<W>(draw.scores + r * draw.row_stride, draw.width, draw.temperatures[r]);
  int64_t count = draw.top_k[r] > 0 ? draw.top_k[r] : draw.width;
  if (draw.min_p[r] > 0.0f) count = std::min(count, row.count_from(draw.min_p[r]));
  Prefix kept = row.first_tokens(count);
  if (draw.top_p[r] < 1.0f) {
    const double least = draw.top_p[r] * kept.weight;
    kept = row.shortest(kept, [&](double weight) { return weight >= least; });
  }
  const double at = draw.uniform[r] * kept.weight;
  draw.tokens[r] = row.last_token(row.shortest(kept, [&](double weight) { return weight > at; }));
}

MOESERVE_DEFINE_VARIANTS(draw_row, (const DrawTokens& draw, int64_t r), (draw, r))

}  // namespace

void draw_tokens(const DrawTokens& draw) {
  const auto run = choose_draw_row(current_isa());
  parallel_for(draw.num_rows, [&](int64_t r) { run(draw, r); });
}

}  // namespace moeserve
