"""Encoders on the CPU in eight bits and in float32: embert and ONNX Runtime, each in its own process."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rivals.cpu_encoders import BATCH_TEXTS, MAX_LENGTH, EmbertEncoder, Floats, Rival
from embert.engine.tokenization.encoded import TokenizeOptions

CONTRIB = "com.microsoft"


def write_fused(folder: Path, path: Path) -> None:
    """Write the float32 graph of the BERT model in `folder`: input_ids and attention_mask → last_hidden_state."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from embert import engine
    from embert.engine.weights.checkpoint import Checkpoint

    model = engine.load_model(str(folder))
    config, checkpoint = model.config, Checkpoint.open(model)
    if config.gated or config.pre_norm or config.activation != "gelu":
        raise SystemExit(f"{folder} is not a BERT with gelu: this graph has no other operators")
    nodes: list[Any] = []
    tensors: dict[str, Floats] = {}

    def weight(name: str, *, transposed: bool = False) -> str:
        array = checkpoint.float32(name)
        tensors[name] = np.ascontiguousarray(array.T if transposed else array)
        return name

    def node(kind: str, inputs: list[str], outputs: list[str], domain: str = CONTRIB, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, outputs, name=outputs[0], domain=domain, **attributes))
        return outputs[0]

    epsilon = config.layer_norm_eps
    x = node(
        "EmbedLayerNormalization",
        [
            "input_ids",
            "token_types",
            weight("embeddings.word_embeddings.weight"),
            weight("embeddings.position_embeddings.weight"),
            weight("embeddings.token_type_embeddings.weight"),
            weight("embeddings.LayerNorm.weight"),
            weight("embeddings.LayerNorm.bias"),
            "attention_mask",
        ],
        ["embedded", "mask_index"],
        epsilon=epsilon,
    )
    for layer in range(config.layers):
        prefix = f"encoder.layer.{layer}."
        parts = [f"{prefix}attention.self.{name}" for name in ("query", "key", "value")]
        tensors[f"{prefix}qkv.weight"] = np.concatenate([checkpoint.float32(f"{each}.weight").T for each in parts], 1)
        tensors[f"{prefix}qkv.bias"] = np.concatenate([checkpoint.float32(f"{each}.bias") for each in parts])
        attended = node(
            "Attention",
            [x, f"{prefix}qkv.weight", f"{prefix}qkv.bias", "mask_index"],
            [f"{prefix}attended"],
            num_heads=config.heads,
        )
        x = _added(node, weight, attended, x, f"{prefix}attention.output", epsilon)
        dense = f"{prefix}intermediate.dense"
        inner = node("MatMul", [x, weight(f"{dense}.weight", transposed=True)], [f"{prefix}inner"], domain="")
        inner = node("BiasGelu", [inner, weight(f"{dense}.bias")], [f"{prefix}activated"])
        x = _added(node, weight, inner, x, f"{prefix}output", epsilon)
    nodes[-1].output[0] = "last_hidden_state"
    int32, hidden = TensorProto.INT32, config.hidden_size
    graph = helper.make_graph(
        nodes,
        "bert",
        [
            helper.make_tensor_value_info(name, int32, ["texts", "tokens"])
            for name in ("input_ids", "token_types", "attention_mask")
        ],
        [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["texts", "tokens", hidden])],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in tensors.items()],
    )
    versions = [helper.make_opsetid("", 17), helper.make_opsetid(CONTRIB, 1)]
    onnx.save(helper.make_model(graph, opset_imports=versions, ir_version=9), path)


def _added(node: Any, weight: Any, x: str, residual: str, prefix: str, epsilon: float) -> str:
    """A product, its bias, the residual and LayerNorm."""
    y = node("MatMul", [x, weight(f"{prefix}.dense.weight", transposed=True)], [f"{prefix}.product"], domain="")
    inputs = [
        y,
        residual,
        weight(f"{prefix}.LayerNorm.weight"),
        weight(f"{prefix}.LayerNorm.bias"),
        weight(f"{prefix}.dense.bias"),
    ]
    return str(node("SkipLayerNormalization", inputs, [f"{prefix}.normed"], epsilon=epsilon))


def write_int8(fused: Path, path: Path) -> None:
    """Quantize a fused graph as ONNX Runtime does without calibration: activations by tensor, weights by channel."""
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        fused,
        path,
        op_types_to_quantize=["MatMul", "Attention"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        extra_options={"DefaultTensorType": TensorProto.FLOAT},
    )


class EmbertInt8(EmbertEncoder):
    """embert from token ids, int8: one packed batch."""

    def load(self, folder: Path, dtype: str) -> None:  # noqa: ARG002  # each rival has its own dtype
        super().load(folder, "int8")


class OnnxRuntime(Rival):
    """ONNX Runtime from token ids: a fused graph in float32, batches of 32 sorted by length, mean pooling in numpy."""

    int8 = False

    def load(self, folder: Path, dtype: str) -> None:  # noqa: ARG002  # each rival has its own dtype
        import onnxruntime

        from embert import engine
        from embert.engine.host import usable_cpus

        model = dataclasses.replace(engine.load_model(str(folder)), max_input_length=MAX_LENGTH)
        self.tokenizer = engine.Tokenizer(model)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "fused.onnx")
            write_fused(folder, path)
            if self.int8:
                write_int8(path, path := Path(scratch, "int8.onnx"))
            options = onnxruntime.SessionOptions()
            if usable_cpus() < (os.cpu_count() or 1):  # by default it pins a thread to each core of the machine
                options.intra_op_num_threads = usable_cpus()
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def prepare(self, texts: Sequence[str]) -> Any:
        encoded = self.tokenizer.encode(texts, TokenizeOptions(limit=MAX_LENGTH))
        sequences = np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
        order = np.argsort([-len(each) for each in sequences], kind="stable")
        batches = []
        for first in range(0, len(order), BATCH_TEXTS):
            numbers = order[first : first + BATCH_TEXTS]
            longest = len(sequences[numbers[0]])
            ids, mask = (np.zeros((len(numbers), longest), np.int32) for _ in range(2))
            for row, number in enumerate(numbers):
                ids[row, : len(sequences[number])] = sequences[number]
                mask[row, : len(sequences[number])] = 1
            batches.append((numbers, {"input_ids": ids, "token_types": np.zeros_like(ids), "attention_mask": mask}))
        return batches

    def run(self, prepared: Any) -> Floats:
        vectors = []
        for _, batch in prepared:
            (hidden,) = self.session.run(None, batch)
            mask = batch["attention_mask"][:, None].astype(np.float32)
            rows = (mask @ hidden)[:, 0]
            vectors.append(rows / np.linalg.norm(rows, axis=1, keepdims=True))
        every = np.concatenate(vectors)
        in_order: Floats = np.empty_like(every)
        in_order[np.concatenate([numbers for numbers, _ in prepared])] = every
        return in_order


class OnnxRuntimeInt8(OnnxRuntime):
    """The same graph quantized by ONNX Runtime's quantize_dynamic."""

    int8 = True


# embert in int8 is the first, its own float32 the second.
RIVALS: dict[str, type[Rival]] = {
    "embert int8": EmbertInt8,
    "embert float32": EmbertEncoder,
    "ONNX Runtime float32": OnnxRuntime,
    "ONNX Runtime int8": OnnxRuntimeInt8,
}
