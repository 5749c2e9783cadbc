"""A model's embeddings and layers for the CUDA extension: their tensors for `load`, and whether they fit float16.

float16's numbers end at 65 504 and lose digits below 6e-5; checkpoints in bfloat16 or float32 may hold others. A weight
below 2⁻¹⁷ is stored with an error of up to 2⁻²⁵. Weights of a usual size hide it, but it ruins a matrix
that has no others. So the test looks at a matrix as a whole, not at single small numbers.

For int8, `column_factors` balances the products whose input is a LayerNorm: QKV and the first one of the feed-forward
network. Dividing by a column's factor costs nothing: loading divides the LayerNorm's weight and bias.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.cuda.shapes import adds_types, marker_decider, padded_head, rotary_tables
from embert.engine.encoders.positions import alibi_by_distance, bias_by_distance, relative_rows, rotations
from embert.engine.encoders.self_test import normed_magnitudes, spread_ids
from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.safetensors_file import Tensor
from embert.engine.model import Model
from embert.engine.models import tensor_names as tn
from embert.engine.models.encoder_config import Disentangled, EncoderConfig, tensor_shapes
from embert.engine.quantization.blocks import HEAD, balance, block_weight, quarter_weight
from embert.engine.quantization.rows import QuantizedWeight
from embert.engine.weights.checkpoint import PADDING_POSITION, Checkpoint

LARGEST = 65504.0
# The smallest step of float16 is 2⁻²⁴, so rounding errors there are 2⁻²⁴/√12 on average. Below this root mean square
# that is over three times the relative error that float16 makes in a usual matrix, 2.1e-4.
LEAST_RMS = 2.0**-15
_PART = 1 << 24  # elements
SAMPLE = 1 << 18  # evenly spaced elements that a tensor's root mean square is taken from


def select_dtype(dtype: str, model: Model, checkpoint: Checkpoint) -> tuple[str, str]:
    """The type to compute in for a requested one, and the reason if "auto" is not float16.

    Raises UnsupportedModel if float16 was asked for, or int8 next to float16, and does not hold the model, BrokenModel
    naming a tensor that has a NaN or an infinity.
    """
    if dtype not in ("auto", "float16", "int8"):
        return dtype, ""
    unfit = _unfit_for_float16(model.config, checkpoint, tables_only=dtype == "int8")
    if unfit is None and (decider := marker_decider(model)) is not None:
        own = Checkpoint.open(dataclasses.replace(model, config=decider.config))
        unfit = _unfit_for_float16(decider.config, own, tables_only=False)
    if unfit is None:
        return ("int8" if dtype == "int8" else "float16"), ""
    if dtype == "auto":
        return "bfloat16", unfit
    raise UnsupportedModel(f"{model.model_id} cannot be run in {dtype}: {unfit}; choose bfloat16 or float32")


def _unfit_for_float16(config: EncoderConfig, checkpoint: Checkpoint, *, tables_only: bool) -> str | None:
    """Reason if float16 does not hold a model, in half a sentence; None if it does.

    Matrices are checked for elements that are not finite before anything else.
    """
    unfit = f"hidden states of {config.model_type} exceed float16's {LARGEST:.0f}" if config.wide_range else None
    for name, shape in tensor_shapes(config).items():
        if (
            len(shape) != 2
            or name == tn.RELATIVE_ATTENTION_BIAS
            or (tables_only and not name.startswith("embeddings."))
        ):
            continue
        reason = misfit(checkpoint.stored(name), f"{checkpoint.path}: {name}")
        if reason is not None and unfit is None:
            unfit = f"{name} {reason}"
    return unfit


def misfit(tensor: Tensor, name: str) -> str | None:
    """Reason if a matrix does not fit float16, as the rest of a sentence; None if it fits.

    Raises BrokenModel, which gives the `name`, if the matrix has a NaN or an infinity.
    """
    largest = _largest(tensor)
    if not np.isfinite(largest):
        raise BrokenModel(f"{name} has elements that are not finite")
    if tensor.dtype == "F16":
        return None
    if largest > LARGEST:
        return f"has an element of {largest:.4g}, and float16 ends at {LARGEST:.0f}"
    rms = _root_mean_square(tensor)
    if 0 < rms < LEAST_RMS:
        return f"has elements of {rms:.2g} on average, too small for float16"
    return None


def _largest(tensor: Tensor) -> float:
    """The largest absolute value; NaN if there is one. Parts of the tensor are copied, never all of it."""
    flat, largest = tensor.array.reshape(-1), 0.0
    for start in range(0, flat.size, _PART):
        part = flat[start : start + _PART]
        if tensor.dtype == "BF16":  # without the sign, its bits sort as its numbers do
            bits = np.uint16((part & np.uint16(0x7FFF)).max())
            largest_here = float((bits.astype(np.uint32) << 16).view(np.float32))
        else:
            largest_here = float(max(part.max(), -part.min()))
        if not largest_here <= largest:  # NaN too
            largest = largest_here
        if np.isnan(largest):
            break
    return largest


def _root_mean_square(tensor: Tensor) -> float:
    flat: npt.NDArray[np.generic] = tensor.array.reshape(-1)
    some = Tensor(flat[:: max(1, flat.size // SAMPLE)], tensor.dtype).float32().astype(np.float64)
    return float(np.sqrt(np.mean(np.square(some)))) if some.size else 0.0


# The extension's name of a layer's weights → BERT's. In pre-norm models a norm precedes the block that names it.
LAYER_LINEAR = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention": "attention.output.dense",
    "gate": "intermediate.gate",
    "inner": "intermediate.dense",
    "out": "output.dense",
    "input_gate": tn.INPUT_GATE,
    "input_dense": tn.INPUT_DENSE,
}
CONVOLUTION = {"convolution": tn.CONVOLUTION_IN, "taps": tn.CONVOLUTION_TAPS, "attention": tn.CONVOLUTION_OUT}
EXPERTS = {
    "router.weight": tn.ROUTER,
    "experts_inner.weight": tn.EXPERTS_INNER,
    "experts_out.weight": tn.EXPERTS_OUTER,
    "experts.bias": tn.EXPERTS_BIAS,
}
PADDED = {*(f"{part}.{kind}" for part in ("query", "key", "value") for kind in ("weight", "bias")), "attention.weight"}
LAYER_NORMS = {"attention": "attention.output.LayerNorm", "out": "output.LayerNorm"}
RMS_NORMS = {  # of which only gamma is loaded
    "query_norm": tn.QUERY_NORM,
    "key_norm": tn.KEY_NORM,
    "attention_sublayer": tn.ATTENTION_SUBLAYER_NORM,
    "out_sublayer": tn.SUBLAYER_NORM,
}
EMBEDDING_WEIGHTS = {
    "word": tn.WORD_EMBEDDINGS,
    "position": tn.POSITION_EMBEDDINGS,
    "type": tn.TOKEN_TYPE_EMBEDDINGS,
    "gamma": "embeddings.LayerNorm.weight",
    "beta": "embeddings.LayerNorm.bias",
    "projection.weight": f"{tn.EMBEDDING_PROJECTION}.weight",
    "projection.bias": f"{tn.EMBEDDING_PROJECTION}.bias",
    "inputs.gamma": f"{tn.LAYER_INPUTS_NORM}.weight",
    "last.gamma": f"{tn.FINAL_NORM}.weight",
    "last.beta": f"{tn.FINAL_NORM}.bias",
}
STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _round(matrix: str, weight: npt.NDArray[np.float32], name: str, head_size: int) -> QuantizedWeight:
    """A layer's matrix in int8, with the rotation of its input rows."""
    if matrix == "out":
        return block_weight(weight, name)
    if matrix == "attention" and head_size == HEAD:
        return block_weight(weight, name, HEAD)
    return quarter_weight(weight, name)


def _with_padded_heads(
    matrix: str, tensor: npt.NDArray[np.float32], config: EncoderConfig, padded: int
) -> npt.NDArray[np.float32]:
    """A weight or bias of attention with `padded` rows (of its output: columns) a head, the last of them zeros.

    Queries are multiplied by the root of padded / size, because the kernels divide scores by the root of `padded`.
    """
    size = config.head_size
    if matrix == "attention":
        columns = tensor.reshape(-1, config.heads, size)
        return np.pad(columns, ((0, 0), (0, 0), (0, padded - size))).reshape(len(tensor), -1)
    rows = tensor.reshape(config.heads, size, -1)
    rows = np.pad(rows, ((0, 0), (0, padded - size), (0, 0))).reshape(-1, *tensor.shape[1:])
    return rows * np.float32(np.sqrt(padded / size)) if matrix == "query" else rows


def layer_tensors(
    config: EncoderConfig, checkpoint: Checkpoint, int8: bool = False
) -> Iterator[tuple[str, int, Any, str]]:
    """The tensors: the extension's name, the layer (-1: none) or a table's number, the values and their type.

    Tensors keep their stored values and the model's order: the extension converts and orders them. With `int8` the
    layers' matrices are int8, each with its scales. Products after a LayerNorm have their own gamma and beta, which
    balance the columns with those of the matrix.
    """
    shapes = tensor_shapes(config)
    names = [(ours, -1, name) for ours, name in EMBEDDING_WEIGHTS.items()]
    for layer in sorted({config.stored_layer(layer) for layer in range(config.layers)}):
        prefix = f"encoder.layer.{layer}."
        for ours, name in (*LAYER_LINEAR.items(), *CONVOLUTION.items()):
            names += [(f"{ours}.{kind}", layer, f"{prefix}{name}.{kind}") for kind in ("weight", "bias")]
        names += [(ours, layer, prefix + name) for ours, name in EXPERTS.items()]
        for ours, name in LAYER_NORMS.items():
            names.append((f"{ours}.gamma", layer, f"{prefix}{name}.weight"))
            names.append((f"{ours}.beta", layer, f"{prefix}{name}.bias"))
        names += [(f"{ours}.gamma", layer, f"{prefix}{name}.weight") for ours, name in RMS_NORMS.items()]
    names = [entry for entry in names if entry[2] in shapes and (adds_types(config) or entry[0] != "type")]
    if config.padding_id is not None:
        names.append(("padding", -1, PADDING_POSITION))
    factors = column_factors(config, checkpoint) if int8 else {}
    padded = padded_head(config)
    for ours, layer, name in names:
        tensor = checkpoint.stored(name)
        matrix, _, kind = ours.partition(".")
        if int8 and matrix in LAYER_LINEAR and kind == "weight":
            by = factors.get(name.removesuffix(".weight"), np.float32(1))
            values, scales = _round(matrix, tensor.float32() * by, name, config.head_size)
            yield ours, layer, values, "int8"
            yield f"{matrix}.scale", layer, scales, "float32"
        elif ours == "taps.weight":  # [hidden, 1, taps]
            yield ours, layer, np.ascontiguousarray(tensor.float32()[:, 0].T), "float32"
        elif name.endswith(tn.EXPERTS_OUTER):  # [experts, inner, hidden]
            by_expert = tensor.float32().reshape(-1, config.intermediate_size, config.hidden_size).swapaxes(1, 2)
            yield ours, layer, by_expert.reshape(-1, config.intermediate_size), "float32"
        elif padded and ours in PADDED:
            yield ours, layer, _with_padded_heads(matrix, tensor.float32(), config, padded), "float32"
        elif config.rms_norm and kind == "beta":
            yield ours, layer, np.zeros(shapes[name], np.float32), "float32"
        elif config.norm_offset and kind == "gamma":
            yield ours, layer, tensor.float32() + np.float32(config.norm_offset), "float32"
        elif tensor.dtype in STORED_DTYPES:
            yield ours, layer, tensor.array, STORED_DTYPES[tensor.dtype]
        else:
            yield ours, layer, tensor.float32(), "float32"
    if config.layer_inputs:
        yield from _layer_inputs(config, checkpoint)
    for layer in range(config.layers if int8 else 0):
        prefix = f"encoder.layer.{layer}."
        before = f"encoder.layer.{layer - 1}.output.LayerNorm" if layer > 0 else "embeddings.LayerNorm"
        for ours, norm in (("query", before), ("inner", f"{prefix}attention.output.LayerNorm")):
            by = factors[f"{prefix}{LAYER_LINEAR[ours]}"]
            yield f"{ours}.gamma", layer, checkpoint.float32(f"{norm}.weight") / by, "float32"
            yield f"{ours}.beta", layer, checkpoint.float32(f"{norm}.bias") / by, "float32"
    for table, rotary in enumerate(rotary_tables(config)):
        yield "angles", table, np.stack(rotations(rotary, config.max_positions), axis=-1), "float32"
    bias: npt.NDArray[np.float32] | None = None
    if config.relative_buckets:
        bias = bias_by_distance(checkpoint.float32(tn.RELATIVE_ATTENTION_BIAS), config.max_positions)
    elif config.alibi:
        bias = alibi_by_distance(config.heads, config.max_positions)
    if bias is not None:
        yield "relative", -1, bias, "float32"
    if config.disentangled is not None:
        # By query - key: the extension's order.
        yield (
            "distances",
            -1,
            relative_rows(config.disentangled, config.max_positions)[::-1].astype(np.float32),
            "float32",
        )
        yield from _distance_tables(config, config.disentangled, checkpoint)


def _layer_inputs(config: EncoderConfig, checkpoint: Checkpoint) -> Iterator[tuple[str, int, Any, str]]:
    """Yields each layer's rows of the matrix of all inputs, and its norm times the factor of the layer's result."""
    columns = config.layer_inputs
    for kind in ("weight", "bias"):
        tensor = checkpoint.stored(f"{tn.LAYER_INPUTS}.{kind}")
        known = tensor.dtype in STORED_DTYPES
        values = tensor.array if known else tensor.float32()
        for layer in range(config.layers):
            own = values[layer * columns : (layer + 1) * columns]
            yield f"input.{kind}", layer, own, STORED_DTYPES[tensor.dtype] if known else "float32"
    for layer in range(config.layers):
        prefix = f"encoder.layer.{layer}."
        factor = checkpoint.float32(f"{prefix}{tn.LAYER_SCALE}")
        gamma = checkpoint.float32(f"{prefix}{tn.INPUT_NORM}.weight") + np.float32(config.norm_offset)
        yield "input_sublayer.gamma", layer, gamma * factor, "float32"
        with np.errstate(divide="ignore"):
            yield "input_divisors", layer, np.full(config.hidden_size, 1 / factor[0], np.float32), "float32"


def _distance_tables(
    config: EncoderConfig, relative: Disentangled, checkpoint: Checkpoint
) -> Iterator[tuple[str, int, Any, str]]:
    """Factors of a layer's queries and keys for each row of the table of distances: [2 · span, hidden]."""
    table = checkpoint.float32(tn.RELATIVE_EMBEDDINGS)
    if relative.norm:
        centered = table - table.mean(1, keepdims=True)
        deviation = np.sqrt(np.square(centered).mean(1, keepdims=True) + np.float32(config.layer_norm_eps))
        gamma, beta = (checkpoint.float32(f"{tn.RELATIVE_NORM}.{kind}") for kind in ("weight", "bias"))
        table = centered / deviation * gamma + beta
    key, query = tn.POSITION_KEY, tn.POSITION_QUERY
    if relative.shared:
        key, query = LAYER_LINEAR["key"], LAYER_LINEAR["query"]
    parts = []
    if relative.content_to_position:
        parts.append(("distance_keys", key))
    if relative.position_to_content:
        parts.append(("distance_queries", query))
    for layer in range(config.layers):
        for ours, name in parts:
            weight, bias = (checkpoint.float32(f"encoder.layer.{layer}.{name}.{kind}") for kind in ("weight", "bias"))
            yield ours, layer, table @ weight.T + bias, "float32"


Floats = npt.NDArray[np.float32]

# Tokens that the magnitudes of columns are taken from. Large columns are large in every token, so a few suffice.
TOKENS = 32
TOGETHER = {
    tn.QKV[0]: tn.QKV,
    "intermediate.dense": ("intermediate.dense",),
}


def column_factors(config: EncoderConfig, checkpoint: Checkpoint) -> dict[str, Floats]:
    """The factors of each such matrix's columns, by its name without ".weight": float32 [hidden]."""
    factors: dict[str, Floats] = {}
    magnitudes_of = normed_magnitudes(spread_ids(config, TOKENS), config, checkpoint)
    for name, magnitudes in magnitudes_of.items():
        layer, part = next((name.removesuffix(part), part) for part in TOGETHER if name.endswith(part))
        names = [f"{layer}{member}" for member in TOGETHER[part]]
        weight = np.concatenate([checkpoint.float32(f"{member}.weight") for member in names])
        factors |= dict.fromkeys(names, balance(magnitudes, weight))
    return factors
