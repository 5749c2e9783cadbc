"""Estimates the memory of a model from its config, before loading.

docs/sizing.md has the formulas, with measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from embert.engine.heads.description import LabelDecider, MarkerDecider
from embert.engine.model import Model
from embert.engine.models.encoder_config import position_bytes, tensor_shapes

MIB = 1 << 20
_CUDA_PROCESS = 512 * MIB  # of GPU memory: context, kernels, graphs
_CPU_PROCESS = 150 * MIB  # Python and its threads' heaps; torch would take 250 MB more
_FOLDED_COLUMNS = 1024  # hidden states of more have separate norms
_TOKEN = 2048  # bytes of a token in addition to its rows: ids, sums, and what attention keeps
# Tokens of a batch without --max-batch-tokens; a longer text gets its own batch.
_BATCH_TOKENS = {"cuda": 16_384, "cpu": 2048}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the device. `loading` is needed while the model loads, and free afterwards."""

    weights: int
    activations: int
    loading: int = 0

    @property
    def resident(self) -> int:
        """Bytes in use after loading."""
        return self.weights + self.activations


def process_bytes(device: str) -> int:
    """Bytes of a process on the device without its models."""
    return _CUDA_PROCESS if device.startswith("cuda") else _CPU_PROCESS


def estimate_memory(
    model: Model, *, device: str, dtype: str = "auto", max_batch_tokens: int | None = None
) -> MemoryEstimate:
    """The memory of a model on "cuda…" or on the CPU; arguments as of `load_encoder`."""
    on_gpu = device.startswith("cuda")
    item = 4 if dtype == "float32" or (dtype in ("auto", "int8") and not on_gpu) else 2
    config = model.config
    shapes, added, encoders = tensor_shapes(config), 0, 1
    decider = model.heads.decider
    after = decider.config if isinstance(decider, MarkerDecider) else None
    parameters = sum(map(math.prod, (*shapes.values(), *(tensor_shapes(after) if after else {}).values())))
    weights = item * parameters
    if dtype == "int8":  # a byte for each weight of a layer
        weights -= (item - 1) * sum(
            math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name.startswith("encoder.layer.")
        )
    if config.disentangled is not None:  # each layer's products with the table of distances, on CPUs in FP32
        parts = config.disentangled.content_to_position + config.disentangled.position_to_content
        values = parts * config.layers * 2 * config.disentangled.span * config.hidden_size
        if on_gpu:
            weights += item * values
        else:
            added = 4 * values
    if config.adapters is not None:
        count = len(config.adapters.names)
        if on_gpu:  # an encoder for each, and one without (encoders/cuda/adapters.py)
            encoders += count
        else:
            widths = sum(sum(shape) for shape in shapes.values() if len(shape) == 2)
            added += 4 * count * config.adapters.rank * widths
    hidden, inner = config.hidden_size, config.intermediate_size
    of_layers = [config.of_layer(layer) for layer in range(config.layers)]
    # Queries, keys, values, and their mixture.
    attention = max((2 * (each.heads + each.kv_heads) * each.head_size for each in of_layers), default=0)
    if any(kind.convolution is not None for kind in config.attention):  # b, c, x and the result
        attention = max(attention, 4 * hidden)
    widest = max(attention, inner * (2 if config.gated else 1), after.intermediate_size if after else 0)
    if config.experts is not None and on_gpu:  # rows grouped by expert, or all rows of every expert
        rows, dense = config.experts.top_k * (hidden + inner), config.experts.count * hidden + inner
        widest = max(widest, rows, dense)
    if isinstance(decider, LabelDecider) and on_gpu:  # rows in FP32 and parts of sums; a matrix that is not tied
        widest = max(widest, 8 * hidden // item)
        weights += item * config.vocab_size * hidden if decider.vocabulary.name or config.adapters else 0
    if not config.layers:  # a mapped table, and the rows of a chunk
        return MemoryEstimate(weights, MIB)
    tokens = max_batch_tokens or _BATCH_TOKENS["cuda" if on_gpu else "cpu"]
    residual = (3 if config.layer_inputs else 2) * hidden
    activations = max(tokens, model.undivided_tokens) * (item * (residual + widest) + _TOKEN)
    if dtype == "int8" and on_gpu:  # rows of 8 bits, each with a scale
        activations += max(tokens, model.undivided_tokens) * (max(hidden, inner) + 4)
    # Norms are folded into these in FP32; the CPU encoder repacks its matrices, one at a time.
    products = max((each.heads + 2 * each.kv_heads) * each.head_size for each in of_layers)
    products += inner * (2 if config.gated else 1)
    matrices = config.layers * hidden * products
    folds = on_gpu and item == 2 and hidden <= _FOLDED_COLUMNS and not config.shared_layers
    loading = 4 * matrices if folds else 0
    if model.lora is not None and not on_gpu:  # what it changes, in FP32
        loading += 4 * parameters
    if dtype == "int8":  # compared with the usual dtype
        loading += item * parameters
    return MemoryEstimate(encoders * (weights + position_bytes(config)) + added, encoders * activations, loading)
