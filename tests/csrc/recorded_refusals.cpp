// The encoder's host side where something cannot be had: a scenario's name is the argument. Each line is what a step
// said: "fine", "refused: …" or "lost: …"; "asked" counts what the device was asked before; at the end what still
// lives.

#include <cstring>

#include "gemm/kernels/sm90_checks.h"
#include "recording_device.h"

using namespace embert;

namespace {

void say(const char* step, const Status& status) {
  const char* const kind = status.ok() ? "fine" : status.is_lost() ? "lost: " : "refused: ";
  std::printf("%s %s%s\n", step, kind, status.message().c_str());
}

std::unique_ptr<Encoder> started(const EncoderConfig& model, const EncoderOptions& options) {
  std::unique_ptr<Encoder> encoder;
  check(Encoder::create(model, options, encoder));
  load(*encoder);
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

void start(const EncoderConfig& model, const EncoderOptions& options, const std::string& without = "") {
  std::unique_ptr<Encoder> encoder;
  check(Encoder::create(model, options, encoder));
  load(*encoder, without);
  std::string refusal;
  say("start", encoder->start(refusal));
}

// A line for each case that is not refused with a message which contains `reason`; an empty reason: that is refused.
class Cases {
 public:
  explicit Cases(const EncoderOptions& options) : options_(options) {}

  template <typename Change>
  void add(const std::string& reason, Kind kind, const Change& change) {
    EncoderConfig model = model_of(kind);
    change(model);
    std::unique_ptr<Encoder> encoder;
    compare(reason, Encoder::create(model, options_, encoder));
  }
  // A tensor of zeros in FP32.
  void load(const std::string& reason, Encoder& encoder, const char* name, int layer, const TensorShape& shape,
            DType stored = DType::kFloat32) {
    const std::vector<float> zeros(elements_of(shape));
    compare(reason, encoder.load(name, layer, zeros.data(), shape, stored));
  }
  void load(const std::string& reason, Kind kind, const char* name, int layer, const TensorShape& shape) {
    std::unique_ptr<Encoder> encoder;
    check(Encoder::create(model_of(kind), options_, encoder));
    load(reason, *encoder, name, layer, shape);
  }
  void start(const std::string& reason, const EncoderConfig& model, const char* without) {
    std::unique_ptr<Encoder> encoder;
    check(Encoder::create(model, options_, encoder));
    ::load(*encoder, without);
    std::string refusal;
    compare(reason, encoder->start(refusal));
  }
  void compare(const std::string& reason, const Status& status) const {
    const bool matches = status.message().find(reason) != std::string::npos;
    if (status.is_lost() || status.ok() != reason.empty() || !matches)
      std::printf("%s: found %s\n", reason.c_str(), status.message().c_str());
  }

 private:
  EncoderOptions options_;
};

void weights(Cases& cases, const EncoderOptions& options) {
  EncoderConfig model = model_of(Kind::kBert);
  cases.start("inner.bias of layer 0 was not loaded: of 53 weights there are 50", model, "inner.bias");
  std::unique_ptr<Encoder> encoder;
  check(Encoder::create(model, options, encoder));
  load(*encoder, "beta");
  cases.load("gamma was loaded before", *encoder, "gamma", -1, {kHidden});
  std::string refusal;
  cases.compare("beta was not loaded: of 53 weights there are 52", encoder->start(refusal));

  cases.load("no weight pooler", Kind::kBert, "pooler", -1, {kHidden, kHidden});
  cases.load("no weight query.weight of layer 3", Kind::kBert, "query.weight", kLayers, {kHidden, kHidden});
  cases.load("no weight padding", Kind::kBert, "padding", -1, {1, kHidden});
  cases.load("inner.weight of layer 1 has shape [256, 1024], expected [1024, 256]", Kind::kBert, "inner.weight", 1,
             {kHidden, kInner});
  cases.load("out.bias of layer 2 has shape [1024], expected [256]", Kind::kBert, "out.bias", 2, {kInner});
  cases.load("word has shape [999, 256], expected [1000, 256]", Kind::kBert, "word", -1, {kVocabulary - 1, kHidden});
  cases.load("has shape [65536], expected [256, 256]", Kind::kBert, "query.weight", 0, {kHidden * kHidden});

  cases.start("last.beta was not loaded: of 60 weights there are 59", model_of(Kind::kModern), "last.beta");
  cases.start("gate.weight of layer 0 was not loaded", model_of(Kind::kNomic), "gate.weight");
  cases.start("projection.bias was not loaded", model_of(Kind::kElectra), "projection.bias");
  cases.load("no weight attention.gamma of layer 0", Kind::kModern, "attention.gamma", 0, {kHidden});
  cases.load("no weight position", Kind::kModern, "position", -1, {kPositions, kHidden});
  cases.load("no weight out.bias of layer 1", Kind::kAlbert, "out.bias", 1, {kHidden});
  cases.load("no weight gate.bias of layer 0", Kind::kBert, "gate.bias", 0, {kInner});
  cases.load("gate.bias of layer 0 has shape [2048], expected [1024]", Kind::kGte, "gate.bias", 0, {2 * kInner});
  cases.load("no weight angles of layer 1", Kind::kGte, "angles", 1, {kPositions, kRotaryDim / 2, 2});

  model.task_heads.classifier = {{kHidden, 3}};
  check(Encoder::create(model, options, encoder));
  cases.load("classifier.weight of layer 0 has shape [2, 256], expected [3, 256]", *encoder, "classifier.weight", 0,
             {2, kHidden});
  cases.load("no weight classifier.weight of layer 1", *encoder, "classifier.weight", 1, {3, kHidden});
  cases.load("no weight token_weights.weight", *encoder, "token_weights.weight", -1, {1, kHidden});
  cases.start("classifier.bias of layer 0 was not loaded", model, "classifier.bias");

  model = model_of(Kind::kBert);
  model.int8 = true;
  check(Encoder::create(model, options, encoder));
  const TensorShape square = {kHidden, kHidden};
  cases.load("query.weight of layer 0 must be in int8", *encoder, "query.weight", 0, square, DType::kFloat16);
  cases.load("out.gamma of layer 0 is in int8", *encoder, "out.gamma", 0, {kHidden}, DType::kInt8);
  cases.start("inner.scale of layer 0 was not loaded", model, "inner.scale");
  cases.start("query.gamma of layer 0 was not loaded", model, "query.gamma");
}

void architectures(Cases& cases) {
  using C = EncoderConfig;
  cases.add("silu in a feed-forward part without a gate", Kind::kNomic, [](C& c) { c.gated = false; });
  cases.add("attention described for 2 of 3 layers", Kind::kModern, [](C& c) { c.attention.pop_back(); });
  cases.add("a window of 40 tokens together with scores", Kind::kModern, [](C& c) { c.relative = true; });
  cases.add("66 RoPE columns of heads of 64", Kind::kGte, [](C& c) { c.attention[1].rotary_dim = 66; });
  cases.add("one table of angles", Kind::kGte, [](C& c) { c.attention[1].rotary_dim = 32; });
  cases.add("weights of layer 1, which no layer uses", Kind::kAlbert, [](C& c) { c.shared = {0, 2, 2}; });
  cases.add("embeddings of 100 columns", Kind::kElectra, [](C& c) { c.embedding = 100; });
  cases.add("a word table of 128 columns", Kind::kElectra, [](C& c) { c.task_heads.splade = SpladeKind{}; });
  cases.add("projected before their norm", Kind::kElectra, [](C& c) { c.projects_first = true; });

  const auto disentangled = [&](const char* reason, Kind kind, auto change) {
    cases.add(reason, kind, [&](C& c) {
      c.distance_rows = 512, c.distance_keys = true;
      change(c);
    });
  };
  const char* const another = "disentangled attention with another kind";
  disentangled("disentangled attention in float32", Kind::kBert, [](C& c) { c.dtype = DType::kFloat32; });
  disentangled("disentangled attention in int8", Kind::kBert, [](C& c) { c.int8 = true; });
  disentangled("without a part of the scores", Kind::kBert, [](C& c) { c.distance_keys = false; });
  disentangled("32768 rows: at most 32767", Kind::kBert, [](C& c) { c.distance_rows = 32768; });
  disentangled("heads of 256 columns", Kind::kBert, [](C& c) { c.heads = 1; });
  disentangled(another, Kind::kRelative, [](C&) {});
  disentangled(another, Kind::kNomic, [](C&) {});
  disentangled("", Kind::kBert, [](C&) {});

  cases.add("65 taps, of which 0", Kind::kModern, [](C& c) { c.attention[1].taps = 65; });
  cases.add("3 taps, of which 3", Kind::kModern, [](C& c) { c.attention[1].taps = c.attention[1].after = 3; });
  cases.add("convolutions with a table of positions", Kind::kBert,
            [](C& c) { c.attention.assign(kLayers, {0, 0, 0, 0, 0, 3, 0}); });
  const auto routed = [&](const char* reason, Kind kind, int experts, int top_k, int layer) {
    cases.add(reason, kind, [&](C& c) { c.experts = experts, c.top_k = top_k, c.expert_layers = {layer}; });
  };
  routed("2 of 33 experts", Kind::kBert, 33, 2, 1);
  routed("9 of 8 experts", Kind::kBert, 8, 9, 1);
  routed("experts of a missing layer", Kind::kBert, 8, 2, kLayers);
  routed("experts with gates", Kind::kNomic, 8, 2, 1);
  routed("", Kind::kBert, 8, 2, 1);
  for (int kind = 0; kind <= int(Kind::kJina); ++kind) cases.add("", Kind(kind), [](C&) {});

  cases.add("a classification layer of 9 columns to 2 after 8", Kind::kBert,
            [](C& c) { c.task_heads.classifier = {{kHidden, 8}, {9, 2}}; });
  cases.add("a Dense module of 248 columns to 8 after 256", Kind::kBert,
            [](C& c) { c.task_heads.dense = {{kHidden - 8, 8}}; });
  cases.add("a multi-vector layer of 100 columns", Kind::kBert, [](C& c) { c.task_heads.multi = {{kHidden, 100}}; });
  cases.add("logits of a vocabulary from another row", Kind::kBert, [](C& c) { c.task_heads.label_mass = true; });
  cases.add("a multi-vector layer with tanh", Kind::kBert,
            [](C& c) { c.task_heads.multi = {{kHidden, 128, HeadActivation::kTanh}}; });
}

void int8(const EncoderOptions& options) {
  const auto add = [&](const char* reason, Kind kind, auto change, const EncoderOptions& options) {
    Cases(options).add(reason, kind, [&](EncoderConfig& c) {
      c.int8 = true;
      change(c);
    });
  };
  using C = EncoderConfig;
  add("rows in another type than float16", Kind::kBert, [](C& c) { c.dtype = DType::kBFloat16; }, options);
  add("hidden size 192", Kind::kBert, [](C& c) { c.hidden = 192; }, options);
  add("hidden size 1280", Kind::kBert, [](C& c) { c.hidden = 1280; }, options);
  add("intermediate size 1000", Kind::kBert, [](C& c) { c.inner = 1000; }, options);
  add("intermediate size 8320", Kind::kBert, [](C& c) { c.inner = 8320; }, options);
  for (int kind = int(Kind::kModern); kind <= int(Kind::kJina); ++kind)
    add("gates, rotary positions, LayerNorms", Kind(kind), [](C&) {}, options);
  add("", Kind::kRelative, [](C&) {}, options);
  EncoderOptions other = options;
  other.fold = false;
  add("hopper was asked for without", Kind::kBert, [](C&) {}, other);
  other.gemm = "cublaslt";
  add("which cuda-portable does not use", Kind::kBert, [](C&) {}, other);
  faults.major = 8, faults.build = {800, false};
  add("int8 needs a GPU of compute capability 9.0", Kind::kBert, [](C&) {}, options);
}

// What Hopper's products refuse of RoPE columns and gates while a model is loaded.
void fused(const Cases& cases) {
  const float2 table[1] = {};
  const int positions[1] = {};
  const float gamma[1] = {};
  using W = LinearWeights;
  const auto add = [&](const char* reason, const RopeColumns* rope, auto change) {
    LinearWeights weights;
    weights.n = 2304, weights.k = 768, weights.rope = rope;
    change(weights);
    cases.compare(reason, sm90::check_weights(weights));
  };
  const auto gates = [](W& w) { w.gated = true, w.activation = Activation::kSilu; };
  const RopeColumns whole{64, 64, 1536, table, positions};
  add("", nullptr, [](W&) {});
  add("", nullptr, gates);
  add("", &whole, [](W&) {});
  add("gates and a residual", nullptr, [&](W& w) { w.gated = true, w.residual_norm.gamma = gamma; });
  add("gates without an activation", nullptr, [](W& w) { w.gated = true; });
  add("SiLU without gates", nullptr, [](W& w) { w.activation = Activation::kSilu; });
  add("RoPE columns and an activation, gates or", &whole, gates);
  add("RoPE columns and an activation, gates or", &whole, [](W& w) { w.activation = Activation::kGeluErf; });
  const auto rope = [&](const char* reason, int head_size, int rotary_dim, int columns, const float2* angles) {
    const RopeColumns of{head_size, rotary_dim, columns, angles, positions};
    add(reason, &of, [](W&) {});
  };
  rope("", 64, 32, 1536, table);
  rope("", 24, 24, 1536, table);
  rope("20 RoPE columns of heads of 20, in 1520 of 2304", 20, 20, 1520, table);
  rope("33 RoPE columns of heads of 64", 64, 33, 1536, table);
  rope("66 RoPE columns of heads of 64", 64, 66, 1536, table);
  rope("in 1500 of 2304", 64, 64, 1500, table);
  rope("in 2368 of 2304", 64, 64, 2368, table);
  rope("64 RoPE columns of heads of 64, in 1536 of 2304", 64, 64, 1536, nullptr);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return 2;
  const std::string scenario = arguments[1];
  EncoderConfig model = model_of(Kind::kBert);
  EncoderOptions options;
  options.max_tokens = 4096;
  options.graphs = false;
  Cases cases(options);
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
      start(model, options);
    } else if (is("a capture")) {
      options.graphs = true;
      faults.attentions = 2 * kLayers + 1;  // after the two batches at start
      faults.attention = Status::refused("an attention that cannot be launched");
      start(model, options);
    } else if (is("weights")) {
      weights(cases, options);
    } else if (is("architectures")) {
      architectures(cases);
    } else if (is("int8")) {
      int8(options);
    } else if (is("fused")) {
      fused(cases);
    } else if (is("int8 memory")) {
      model.int8 = true;
      model.task_heads.multi = {{kHidden, 128}};
      telling = true;
      start(model, options);
      telling = false;
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
    } else if (is("attended")) {
      const auto encoder = started(model, options);
      Batch batch({20, 30});
      for (const std::vector<int32_t>& asked : {std::vector<int32_t>{20, 0}, {21, 1}, {20, 1}}) {
        batch.view.attended = asked.data();
        run(*encoder, batch.view);
      }
    } else if (is("tasks")) {
      model.task_heads.classifier = {{kHidden, 1}};
      const auto encoder = started(model, options);
      Batch batch({20, 30});
      for (const std::vector<Tasks>& asked : {std::vector<Tasks>{4, 0}, {8, 1}, {1, 32}, {5, 2}}) {
        batch.view.tasks = asked.data();
        run(*encoder, batch.view);
      }
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
