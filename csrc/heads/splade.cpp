#include "heads/splade.h"

#include <algorithm>

#include "ops/norm.h"

namespace embert {
namespace {

// Texts of a group: every block that writes pairs sums the counts of the texts before its own.
constexpr int kMaxTexts = 1024;

}  // namespace

Status SpladePairs::allocate(int vocabulary, int texts) {
  capacity_ = std::max<int64_t>(kPairs, vocabulary);
  EMBERT_TRY(counts_.allocate(std::max(texts, 1) * sizeof(int)));
  EMBERT_TRY(indices_.allocate(capacity_ * sizeof(int)));
  return values_.allocate(capacity_ * sizeof(float));
}

int SpladePairs::complete(int texts) const {
  int64_t pairs = 0;
  for (int text = 0; text < texts; ++text) {
    pairs += counts()[text];
    if (pairs > capacity_) return text;
  }
  return texts;
}

void SpladeHead::lay_out_scratch(uint8_t* base, int rows, size_t& bytes) {
  Arena arena(base);
  const size_t texts = texts_at_once_;
  scratch_.maxima = arena.take<float>(texts * maxima_pitch(shape_.vocabulary));
  scratch_.text_of = arena.take<int>(rows);
  scratch_.totals = arena.take<int>(texts);
  scratch_.pieces = arena.take<int>(texts * pieces_of(shape_.vocabulary));
  scratch_.ends = arena.take<int64_t>(2);
  bytes = arena.used();
}

Status SpladeHead::prepare(GemmProvider& gemm, const SpladeWeights& weights, int rows, int texts,
                           const Stream& stream) {
  weights_ = weights;
  const int hidden = shape_.hidden, vocabulary = shape_.vocabulary;
  const size_t fitting = kMaximaBytes / (maxima_pitch(vocabulary) * sizeof(float));
  texts_at_once_ = int(std::clamp<size_t>(std::min<size_t>(fitting, texts), 1, kMaxTexts));
  size_t bytes = 0;
  lay_out_scratch(nullptr, rows, bytes);
  EMBERT_TRY(work_.allocate(bytes));
  lay_out_scratch(work_.as(), rows, bytes);

  const LinearWeights transform{
      weights.transform, weights.transform_bias, hidden, hidden, shape_.activation, {}, {}, 0.0f};
  EMBERT_TRY(gemm.prepare(transform, stream, transform_));
  const LinearWeights decoder{
      weights.decoder, weights.decoder_bias, vocabulary, hidden, Activation::kNone, {}, {}, 0.0f};
  EMBERT_TRY(gemm.prepare_maxima(decoder, stream, maxima_));
  if (maxima_ == nullptr) EMBERT_TRY(make_portable_maxima(gemm, shape_.dtype, decoder, stream, maxima_));
  return {};
}

TextSpan SpladeHead::group_from(int first, const SpladeBatch& batch, int& first_row) const {
  const int count = std::min(texts_at_once_, batch.texts - first);
  const auto sequence = [&](int text) { return batch.host_chosen == nullptr ? text : batch.host_chosen[text]; };
  first_row = batch.host_cu_seqlens[sequence(first)];
  return {batch.cu_seqlens, batch.chosen, first, count, batch.host_cu_seqlens[sequence(first + count - 1) + 1]};
}

Status SpladeHead::run(const SpladeBatch& batch, const SpladePairs& result, const Stream& stream) {
  const int pitch = maxima_pitch(shape_.vocabulary), vocabulary = shape_.vocabulary;
  int none = 0;
  EMBERT_TRY(transform_->run({batch.x}, {}, batch.rows, batch.scratch, nullptr, none, stream));
  EMBERT_TRY(layernorm(shape_.dtype, batch.scratch, {weights_.gamma, weights_.beta}, batch.rows, shape_.hidden,
                       shape_.epsilon, batch.scratch, stream));
  const PairBuffers places = result.places(shape_.logs);
  for (int first = 0, group = 0; first < batch.texts; ++group) {
    int first_row = 0;
    const TextSpan span = group_from(first, batch, first_row);
    EMBERT_TRY(begin_maxima(span, pitch, scratch_.text_of, scratch_.maxima, scratch_.totals, stream));
    EMBERT_TRY(maxima_->run({batch.scratch, scratch_.text_of, batch.rows, first_row, span.end_row - first_row, first},
                            scratch_.maxima, stream));
    EMBERT_TRY(count_pairs(scratch_.maxima, vocabulary, pitch, span.count, scratch_.totals, scratch_.pieces, stream));
    const int64_t* const before = group == 0 ? nullptr : scratch_.ends + group % 2;
    EMBERT_TRY(write_pairs(scratch_.maxima, vocabulary, pitch, first, span.count, scratch_.totals, scratch_.pieces,
                           before, scratch_.ends + (group + 1) % 2, places, stream));
    first += span.count;
  }
  return {};
}

}  // namespace embert
