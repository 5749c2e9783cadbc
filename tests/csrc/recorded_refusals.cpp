// The encoder's host side where something cannot be had: a scenario's name is the argument. Each line is what a step
// said: "fine", "refused: …" or "lost: …"; "asked" counts what the device was asked before; at the end what still
// lives.

#include <cstring>

#include "recording_device.h"

using namespace embert;

namespace {

void say(const char* step, const Status& status) {
  const char* const kind = status.ok() ? "fine" : status.is_lost() ? "lost: " : "refused: ";
  std::printf("%s %s%s\n", step, kind, status.message().c_str());
}

struct Batch {
  std::vector<int32_t> cu_seqlens{0}, ids, positions, dimensions;
  BatchView view;

  explicit Batch(const std::vector<int>& lengths) {
    for (const int length : lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
    ids.assign(cu_seqlens.back(), 5);
    view.tokens = cu_seqlens.back();
    view.sequences = int(lengths.size());
    view.ids = ids.data();
    view.cu_seqlens = cu_seqlens.data();
  }
};

std::unique_ptr<Encoder> started(const EncoderConfig& model, const EncoderOptions& options) {
  std::unique_ptr<Encoder> encoder;
  check(Encoder::create(model, options, encoder));
  load(*encoder, Stored::kFloat16);
  load_heads(*encoder);
  std::string refusal;
  check(encoder->start(refusal));
  return encoder;
}

// The outcome of a batch, and of its result if it was accepted.
void run(Encoder& encoder, const BatchView& batch) {
  int64_t ticket = 0;
  telling = true;
  const Status status = encoder.submit(batch, ticket);
  telling = false;
  say("submit", status);
  if (!status.ok()) return;
  std::vector<Result> results;
  say("wait", encoder.wait(ticket, results));
}

void create(const EncoderConfig& model, const EncoderOptions& options) {
  std::unique_ptr<Encoder> encoder;
  say("create", Encoder::create(model, options, encoder));
}

void weights(const EncoderConfig& model, const EncoderOptions& options, const std::string& what) {
  std::unique_ptr<Encoder> encoder;
  check(Encoder::create(model, options, encoder));
  const std::vector<float> zeros(size_t(kVocabulary) * kInner);
  std::string refusal;
  const auto put = [&](const char* name, int layer, const TensorShape& of) {
    say("load", encoder->load(name, layer, zeros.data(), of, DType::kFloat32));
  };
  if (what == "missing") {
    load(*encoder, Stored::kFloat32, "inner.bias");
    say("start", encoder->start(refusal));
  } else if (what == "instead") {  // as many as there should be, one of them twice
    load(*encoder, Stored::kFloat32, "beta");
    put("gamma", -1, {kHidden});
    say("start", encoder->start(refusal));
  } else if (what == "heads") {
    load(*encoder, Stored::kFloat16);
    put("classifier.weight", 0, {2, kHidden});
    put("classifier.weight", 1, {3, kHidden});
    put("classifier.weight", 0, {3, kHidden});
    put("token_weights.weight", -1, {1, kHidden});
    say("start", encoder->start(refusal));
  } else if (what == "surplus") {
    put("pooler", -1, {kHidden, kHidden});
    put("query.weight", kLayers, {kHidden, kHidden});
    put("padding", -1, {1, kHidden});
  } else {  // shapes
    put("inner.weight", 1, {kHidden, kInner});
    put("out.bias", 2, {kInner});
    put("word", -1, {kVocabulary - 1, kHidden});
    put("query.weight", 0, {kHidden * kHidden});
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return 2;
  const std::string scenario = arguments[1];
  EncoderConfig model = small_model();
  EncoderOptions options;
  options.max_tokens = 4096;
  options.graphs = false;
  const auto is = [&](const char* name) { return scenario == name; };
  {
    if (is("capability")) {
      faults.major = 7, faults.minor = 5;
      create(model, options);
    } else if (is("no code")) {
      faults.told_build = Status::cuda(cudaErrorNoKernelImageForDevice, "build");
      create(model, options);
    } else if (is("empty code")) {
      faults.build = {};
      create(model, options);
    } else if (is("plain 90")) {
      faults.build = {900, false};
      create(model, options);
      options.gemm = "cublaslt";
      create(model, options);
    } else if (is("ampere")) {
      faults.major = 8, faults.build = {800, false};
      create(model, options);
    } else if (is("too many tokens")) {
      options.max_tokens = 65535 * 64 + 1;
      create(model, options);
    } else if (is("memory at start")) {
      for (faults.allocations = 0; faults.allocations < 20; ++faults.allocations) {
        const int left = faults.allocations;
        create(model, options);
        faults.allocations = left;
      }
    } else if (is("graphs")) {
      options.graphs = true;
      faults.instantiations = 3;
      std::unique_ptr<Encoder> encoder;
      check(Encoder::create(model, options, encoder));
      load(*encoder, Stored::kFloat16);
      std::string refusal;
      say("start", encoder->start(refusal));
    } else if (is("a capture")) {
      options.graphs = true;
      faults.attentions = 2 * kLayers + 1;  // after the two batches at start
      faults.attention = Status::refused("an attention that cannot be launched");
      std::unique_ptr<Encoder> encoder;
      check(Encoder::create(model, options, encoder));
      load(*encoder, Stored::kFloat16);
      std::string refusal;
      say("start", encoder->start(refusal));
    } else if (scenario.rfind("weights ", 0) == 0) {
      if (is("weights heads")) model.task_heads.classifier = {{kHidden, 3}};
      weights(model, options, scenario.substr(8));
    } else if (is("tiles")) {
      options.max_tokens = 65535 * 64;
      faults.major = 8, faults.build = {800, false};
      const auto encoder = started(model, options);
      run(*encoder, Batch(std::vector<int>(33000, 65)).view);
      run(*encoder, Batch(std::vector<int>(65536, 1)).view);
      run(*encoder, Batch(std::vector<int>(32767, 65)).view);
    } else if (is("memory")) {
      const auto encoder = started(model, options);
      const Batch many(std::vector<int>(500, 8)), few({20, 30});
      faults.allocations = 0;
      run(*encoder, many.view);
      run(*encoder, few.view);  // for which there is room
      faults.allocations = -1;
      run(*encoder, many.view);
    } else if (is("a launch")) {
      const auto encoder = started(model, options);
      const Batch few({20, 30});
      faults.attentions = 1;
      faults.attention = Status::cuda(cudaErrorMemoryAllocation, "attention");
      run(*encoder, few.view);
      faults.attentions = -1;
      run(*encoder, few.view);
      faults.attentions = 0;
      faults.attention = Status::cuda(cudaErrorIllegalAddress, "attention");
      run(*encoder, few.view);
      faults.attentions = -1;
      run(*encoder, few.view);
    } else if (is("tickets")) {
      const auto encoder = started(model, options), other = started(model, options);
      const Batch one({20}), two({30, 30});
      std::vector<Result> out;
      int64_t first = 0, second = 0, third = 0, theirs = 0;
      check(encoder->submit(one.view, first));
      check(encoder->wait(first, out));
      say("again", encoder->wait(first, out));
      check(encoder->submit(two.view, second));
      check(encoder->submit(one.view, third));
      say("stale", encoder->wait(first, out));
      check(other->submit(two.view, theirs));
      say("elsewhere", other->wait(second, out));
      say("never", encoder->wait(-1, out));
      say("third", encoder->wait(third, out));
      std::printf("rows %d\n", out[0].rows);
      say("second", encoder->wait(second, out));
      std::printf("rows %d\n", out[0].rows);
      say("theirs", other->wait(theirs, out));
    } else if (is("dimensions")) {
      const auto encoder = started(model, options);
      Batch batch({20, 30});
      for (const std::vector<int32_t>& asked : {std::vector<int32_t>{4, -1}, {257, 4}, {0, 256}}) {
        batch.view.dimensions = asked.data();
        run(*encoder, batch.view);
      }
    } else if (is("prefixes")) {
      Batch batch({100, 30, 24});
      const std::vector<std::vector<int32_t>> wrong = {{0, 0, 0, 8, 0, 0},   {0, 0, 0, 8, 0, 8},   {0, 0, 0, 12, 0, 0},
                                                       {0, 0, 0, 104, 0, 0}, {0, 0, 3, 8, 0, 0},   {0, 0, 0, -8, 0, 0},
                                                       {0, 0, 0, 8, 1, 8},   {0, 0, -1, 8, 0, 16}, {0, 8, 0, 0, 0, 0}};
      for (const bool causal : {false, true}) {
        model.causal = causal;
        const auto encoder = started(model, options);
        for (const std::vector<int32_t>& asked : wrong) {
          batch.view.prefixes = asked.data();
          run(*encoder, batch.view);
          if (!causal) break;
        }
      }
    } else if (is("tasks")) {
      model.task_heads.classifier = {{kHidden, 1}};
      const auto encoder = started(model, options);
      Batch batch({20, 30});
      for (const std::vector<Tasks>& asked : {std::vector<Tasks>{4, 0}, {8, 1}, {1, 32}, {5, 2}}) {
        batch.view.tasks = asked.data();
        run(*encoder, batch.view);
      }
    } else if (is("heads")) {
      model.task_heads.classifier = {{kHidden, 8}, {9, 2}};
      create(model, options);
      model.task_heads = {};
      model.task_heads.dense = {{kHidden - 8, 8}};
      create(model, options);
      model.task_heads = {};
      model.task_heads.multi = {{kHidden, 100}};
      create(model, options);
      model.task_heads.multi = {{kHidden, 128, HeadActivation::kTanh}};
      create(model, options);
    } else if (is("architectures")) {
      const auto changed = [&](Kind kind, auto change) {
        EncoderConfig changes = model_of(kind);
        change(changes);
        create(changes, options);
      };
      changed(Kind::kNomic, [](EncoderConfig& of) { of.gated = false; });
      changed(Kind::kModern, [](EncoderConfig& of) { of.attention.pop_back(); });
      changed(Kind::kModern, [](EncoderConfig& of) { of.relative = true; });
      changed(Kind::kGte, [](EncoderConfig& of) { of.attention[1].rotary_dim = kHidden / kHeads + 2; });
      changed(Kind::kGte, [](EncoderConfig& of) { of.attention[1].rotary_dim = 32; });
      changed(Kind::kAlbert, [](EncoderConfig& of) { of.shared = {0, 2, 2}; });
      changed(Kind::kElectra, [](EncoderConfig& of) { of.embedding = 100; });
      changed(Kind::kElectra, [](EncoderConfig& of) { of.task_heads.splade = SpladeKind{}; });
      const auto disentangled = [&](Kind kind, auto change) {
        changed(kind, [&](EncoderConfig& of) {
          of.distance_rows = 512, of.distance_keys = true;
          change(of);
        });
      };
      disentangled(Kind::kBert, [](EncoderConfig& of) { of.dtype = DType::kFloat32; });
      disentangled(Kind::kBert, [](EncoderConfig& of) { of.int8 = true; });
      disentangled(Kind::kBert, [](EncoderConfig& of) { of.distance_keys = false; });
      disentangled(Kind::kBert, [](EncoderConfig& of) { of.distance_rows = 32768; });
      disentangled(Kind::kBert, [](EncoderConfig& of) { of.heads = 1; });
      disentangled(Kind::kRelative, [](EncoderConfig&) {});
      disentangled(Kind::kNomic, [](EncoderConfig&) {});
      disentangled(Kind::kBert, [](EncoderConfig&) {});
      changed(Kind::kElectra, [](EncoderConfig& of) { of.projects_first = true; });
      changed(Kind::kModern, [](EncoderConfig& of) { of.attention[1].taps = 65; });
      changed(Kind::kModern, [](EncoderConfig& of) { of.attention[1].taps = of.attention[1].after = 3; });
      changed(Kind::kBert, [](EncoderConfig& of) { of.attention.assign(kLayers, {0, 0, 0, 0, 0, 3, 0}); });
      const auto routed = [&](Kind kind, int experts, int top_k, int layer) {
        changed(kind, [&](EncoderConfig& of) { of.experts = experts, of.top_k = top_k, of.expert_layers = {layer}; });
      };
      routed(Kind::kBert, 33, 2, 1);
      routed(Kind::kBert, 8, 9, 1);
      routed(Kind::kBert, 8, 2, kLayers);
      routed(Kind::kNomic, 8, 2, 1);
      routed(Kind::kBert, 8, 2, 1);
      for (int kind = 0; kind <= int(Kind::kJina); ++kind) changed(Kind(kind), [](EncoderConfig&) {});
    } else if (is("newer weights")) {
      const auto asked = [&](Kind kind, const char* without, const char* name, int layer, const TensorShape& of) {
        std::unique_ptr<Encoder> encoder;
        check(Encoder::create(model_of(kind), options, encoder));
        load(*encoder, Stored::kFloat16, without);
        std::string refusal;
        const std::vector<float> zeros(size_t(kVocabulary) * kInner);
        if (name[0] == 0)
          say("start", encoder->start(refusal));
        else
          say("load", encoder->load(name, layer, zeros.data(), of, DType::kFloat32));
      };
      asked(Kind::kModern, "last.beta", "", 0, {});
      asked(Kind::kNomic, "gate.weight", "", 0, {});
      asked(Kind::kElectra, "projection.bias", "", 0, {});
      asked(Kind::kModern, "", "attention.gamma", 0, {kHidden});
      asked(Kind::kModern, "", "position", -1, {kPositions, kHidden});
      asked(Kind::kAlbert, "", "out.bias", 1, {kHidden});
      asked(Kind::kBert, "", "gate.bias", 0, {kInner});
      asked(Kind::kGte, "gate.bias", "gate.bias", 0, {2 * kInner});
      asked(Kind::kGte, "", "angles", 1, {kPositions, kRotaryDim / 2, 2});
    } else if (is("positions")) {
      model.padding = true;
      options.graphs = true;
      const auto encoder = started(model, options);
      Batch batch({3, 2});
      for (const std::vector<int32_t>& asked :
           {std::vector<int32_t>{0, 512, 1, 0, 1}, {0, 513, 1, 0, 1}, {0, -1, 1, 0, 1}}) {
        batch.view.positions = asked.data();
        run(*encoder, batch.view);
      }
      batch.view.positions = nullptr;
      run(*encoder, batch.view);
    } else if (is("places")) {
      float rows[4] = {};
      float2 sums[4] = {};
      const RowView x{rows, nullptr}, residual{rows + 1, sums};
      say("apart", check_operands(x, residual, rows + 2, sums + 1));
      say("in place", check_operands(x, {rows + 1}, rows + 1, nullptr));
      say("over x", check_operands(x, residual, rows, nullptr));
      say("in place with sums", check_operands(x, residual, rows + 1, sums + 1));
      say("over sums", check_operands(x, residual, rows + 2, sums));
    } else {
      return 2;
    }
  }
  std::printf("living %d %d %d %d %d\n", living.allocations, living.streams, living.events, living.graphs,
              living.executables);
}
