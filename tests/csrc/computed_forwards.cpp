// The encoder's host side before a device that computes on the CPU. Standard input: numbers and names, as
// test_computed_forwards.py writes them; arguments: gemm, dtype (DType; int8: of matrices), the file of all tensors'
// bytes, and where results go, in FP32: the rows of all tokens, or logits of a model with a decider; the pooled
// vectors; and LABEL_MASS, where the model has it.

#include <cstring>
#include <iostream>

#include "recording_device.h"

using namespace embert;

namespace {

void told(const Status& status) {
  if (status.ok()) return;
  std::cerr << status.message() << "\n";
  std::exit(1);
}

int number() {
  int value = 0;
  std::cin >> value;
  return value;
}

void read(int& value) {
  std::cin >> value;
}
void read(float& value) {
  std::cin >> value;
}
void read(bool& value) {
  std::cin >> value;
}
void read(DType& value) {
  value = DType(number());
}
void read(Activation& value) {
  value = Activation(number());
}
void read(Pooling& value) {
  value = Pooling(number());
}
void read(DenseShape& value) {
  std::cin >> value.in >> value.out;
  value.activation = HeadActivation(number());
}
template <typename T>
void read(std::vector<T>& values);
void read(TaskHeads& value) {
  std::cin >> value.options >> value.marker >> value.text_types;
  read(value.multi);
  read(value.token_weights);
  read(value.label_mass);
  read(value.tied_vocabulary);
}
void read(LayerAttention& value) {
  std::cin >> value.window >> value.rotary_dim >> value.table >> value.head_columns >> value.kv_heads >> value.taps >>
      value.after;
}

template <typename T>
void read(std::vector<T>& values) {
  values.resize(number());
  for (T& value : values) read(value);
}

// Fields by their names, up to "end".
EncoderConfig read_config(DType dtype) {
  EncoderConfig config;
  std::string field;
  while (std::cin >> field && field != "end") {
#define EMBERT_FIELD(type, name, ...) \
  if (field == #name) read(config.name);
#include "encoder/encoder_config_fields.inc"
#undef EMBERT_FIELD
  }
  config.int8 = dtype == DType::kInt8;
  config.dtype = config.int8 ? DType::kFloat16 : dtype;
  return config;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) return 2;
  computes = true;
  const DType dtype = DType(std::atoi(arguments[2]));
  const EncoderConfig model = read_config(dtype);
  const bool decides = model.task_heads.options > 0;
  const EncoderConfig decider = decides ? read_config(dtype) : EncoderConfig();
  EncoderOptions options;
  options.max_tokens = number();  // also of the batches at start
  options.gemm = arguments[1];
  options.graphs = 0;
  std::unique_ptr<Encoder> encoder;
  told(Encoder::create(model, options, encoder, decides ? &decider : nullptr));

  std::FILE* const file = std::fopen(arguments[3], "rb");
  std::vector<std::vector<uint8_t>> kept;  // until the encoder has started
  for (int left = number(); left > 0; --left) {
    std::string name;
    std::cin >> name;
    const int layer = number();
    const DType stored = DType(number());
    TensorShape shape(number());
    size_t bytes = bytes_of(stored);
    for (size_t& size : shape) bytes *= size = size_t(number());
    kept.emplace_back(bytes);
    if (std::fread(kept.back().data(), 1, bytes, file) != bytes) return 2;
    told(encoder->load(name, layer, kept.back().data(), shape, stored));
  }
  std::fclose(file);
  std::string refusal;
  told(encoder->start(refusal));

  std::vector<int> lengths(number());
  for (int& length : lengths) length = number();
  Batch batch(lengths);
  for (int32_t& id : batch.ids) id = number();
  std::vector<int32_t> types(number());  // none, or of each token
  for (int32_t& each : types) each = number();
  if (!types.empty()) batch.view.types = types.data();
  std::vector<int32_t> prefixes(number());  // none, or two numbers of each sequence
  for (int32_t& each : prefixes) each = number();
  std::vector<int32_t> attended(number());  // none, or of each sequence
  for (int32_t& each : attended) each = number();
  if (!attended.empty()) batch.view.attended = attended.data();
  const std::vector<uint8_t> as_they_are(lengths.size());
  std::FILE* const to = std::fopen(arguments[4], "wb");
  for (const Task task : {decides ? Task::kClassify : Task::kTokens, Task::kEmbed, Task::kLabelMass}) {
    if ((model.task_heads.tasks() & bit(task)) == 0) continue;
    const std::vector<Tasks> tasks(lengths.size(), bit(task));
    batch.view.normalize = as_they_are.data();
    batch.view.tasks = tasks.data();
    if (!prefixes.empty()) batch.view.prefixes = prefixes.data();
    int64_t ticket = 0;
    std::vector<Result> results;
    told(encoder->submit(batch.view, ticket));
    told(encoder->wait(ticket, results));
    std::fwrite(results[0].values.get(), sizeof(float), size_t(results[0].rows) * results[0].columns, to);
  }
  std::fclose(to);
}
