// The encoder's host side with matrices in int8, before a device that only writes down what it is asked. The argument
// is "forward", which tells what a Hopper GPU is asked from the start on and for a batch of the lengths that follow; or
// what is refused, which is printed.

#include <cstring>

#include "recording_device.h"

using namespace embert;

namespace {

// All weights of a model in int8 but the one called `without`.
void load_int8(Encoder& encoder, const std::string& without) {
  const std::vector<float> zeros(size_t(kVocabulary) * kInner);
  const auto put = [&](const std::string& name, int layer, const TensorShape& shape, DType stored) {
    if (name != without) check(encoder.load(name, layer, zeros.data(), shape, stored));
  };
  put("word", -1, {kVocabulary, kHidden}, DType::kFloat32);
  put("position", -1, {kPositions, kHidden}, DType::kFloat32);
  put("type", -1, {1, kHidden}, DType::kFloat32);
  for (const char* const name : {"gamma", "beta"}) put(name, -1, {kHidden}, DType::kFloat32);
  for (int layer = 0; layer < kLayers; ++layer) {
    for (const std::string name : {"query", "key", "value", "attention", "inner", "out"}) {
      const size_t out = name == "inner" ? kInner : kHidden, in = name == "out" ? kInner : kHidden;
      put(name + ".weight", layer, {out, in}, DType::kInt8);
      for (const char* const of : {".scale", ".bias"}) put(name + of, layer, {out}, DType::kFloat32);
    }
    for (const char* const name : {"attention.gamma", "attention.beta", "out.gamma", "out.beta", "query.gamma",
                                   "query.beta", "inner.gamma", "inner.beta"})
      put(name, layer, {kHidden}, DType::kFloat32);
  }
}

void forward(const EncoderConfig& model, const EncoderOptions& options, int count, char** lengths) {
  std::unique_ptr<Encoder> encoder;
  check(Encoder::create(model, options, encoder));
  load_int8(*encoder, "");
  load_heads(*encoder);
  std::string refusal;
  telling = true;
  check(encoder->start(refusal));
  tell("started refused=%d\n", !refusal.empty());
  std::vector<int32_t> cu_seqlens{0};
  for (int i = 0; i < count; ++i) cu_seqlens.push_back(cu_seqlens.back() + std::atoi(lengths[i]));
  const std::vector<int32_t> ids(cu_seqlens.back(), 5);
  BatchView batch;
  batch.tokens = cu_seqlens.back();
  batch.sequences = count;
  batch.ids = ids.data();
  batch.cu_seqlens = cu_seqlens.data();
  int64_t ticket = 0;
  check(encoder->submit(batch, ticket));
  std::vector<Result> results;
  check(encoder->wait(ticket, results));
  telling = false;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return 2;
  const std::string what = arguments[1];
  EncoderConfig model = small_model();
  if (what.compare(0, 5, "kind ") == 0) model = model_of(Kind(std::atoi(what.c_str() + 5)));
  model.int8 = true;
  model.task_heads.multi = {{kHidden, 128}};
  EncoderOptions options;
  options.max_tokens = 4096;
  options.graphs = 0;
  if (what == "separate") options.fold = false;
  if (what == "ampere") faults.major = 8, faults.build = {800, false};
  if (what == "portable") options.gemm = "cublaslt";
  if (what == "bfloat16") model.dtype = DType::kBFloat16;
  if (what == "hidden 192") model.hidden = 192;
  if (what == "hidden 1280") model.hidden = 1280;
  if (what == "inner 1000") model.inner = 1000;
  if (what == "inner 8320") model.inner = 8320;
  if (what == "forward") {
    forward(model, options, count - 2, arguments + 2);
    return 0;
  }
  std::unique_ptr<Encoder> encoder;
  check(Encoder::create(model, options, encoder));
  const std::vector<float> zeros(size_t(kHidden) * kHidden);
  if (what == "float16 matrix")
    check(encoder->load("query.weight", 0, zeros.data(), {kHidden, kHidden}, DType::kFloat16));
  if (what == "int8 vector") check(encoder->load("out.gamma", 0, zeros.data(), {kHidden}, DType::kInt8));
  if (what == "no scale" || what == "no norm") {
    load_int8(*encoder, what == "no scale" ? "inner.scale" : "query.gamma");
    load_heads(*encoder);
    std::string refusal;
    check(encoder->start(refusal));
  }
  std::printf("fine\n");
}
