"""The self test of an encoder before it serves: compares the device with numpy, and checks for finite rows.

An encoder whose kernels are built for another GPU, do nothing, or read the wrong weights still returns vectors of the
right shape. `self_test_ids`, `vector_of` and `mismatch` find that. `tasks_never_finite` finds tasks whose every request
would fail. The reference is the architecture's definition in numpy: one text at a time, in float32. It shares no code
with the encoders.
"""

from __future__ import annotations

import json
import math
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from embert.engine.batch import pack
from embert.engine.encoders.base import Encoder
from embert.engine.encoders.positions import alibi_by_distance, bias_by_distance, relative_rows, rotations
from embert.engine.model import Model
from embert.engine.models import tensor_names as tn
from embert.engine.models.encoder_config import EncoderConfig, Experts, Rotary
from embert.engine.quantization.rows import product, quantize_rows, quantize_weight
from embert.engine.tasks import NO_TASK, Task
from embert.engine.weights.checkpoint import Checkpoint

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_erf = np.frompyfunc(math.erf, 1, 1)


def hidden_state(
    ids: Ints, config: EncoderConfig, checkpoint: Checkpoint, adapter: int = -1, *, int8: bool = False
) -> Floats:
    """The last hidden state of token ids [L] of type 0 with one of the model's adapters, -1: none. float32 [L, hidden].

    The checkpoint's weights have no adapter: what it adds is computed separately. `int8`: layers use int8
    products.
    """
    return _Reference(config, checkpoint, adapter, int8=int8).hidden_state(ids)


def normed_magnitudes(ids: Ints, config: EncoderConfig, checkpoint: Checkpoint) -> dict[str, npt.NDArray[np.float64]]:
    """The root mean square of each column of the inputs of layers' products, over token ids [L] of type 0.

    By the name of the product, of queries and of the feed-forward part: float64 [hidden] each, computed in float64, so
    that its first six digits are the same on every machine.
    """
    recorder = _Recorder(config, checkpoint, -1, int8=False)
    recorder.hidden_state(ids)
    return recorder.found


class _Reference:
    def __init__(self, config: EncoderConfig, checkpoint: Checkpoint, adapter: int, *, int8: bool) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._adapter = adapter
        self._int8 = int8

    def hidden_state(self, ids: Ints) -> Floats:
        x = self._embed(ids)
        if self._config.embedding_size is not None and self._config.projects_first:
            x = self._linear(x, tn.EMBEDDING_PROJECTION)
        if self._config.embedding_norm:
            x = self._norm(x, "embeddings.LayerNorm")
        if self._config.embedding_size is not None and not self._config.projects_first:
            x = self._linear(x, tn.EMBEDDING_PROJECTION)
        if self._config.layer_inputs:
            inputs = self._linear(x, tn.LAYER_INPUTS) * np.float32(self._config.hidden_size**-0.5)
            self._inputs = self._norm(inputs.reshape(len(x), self._config.layers, -1), tn.LAYER_INPUTS_NORM)
        bias = self._bias(len(ids))
        for layer in range(self._config.layers):
            x = self._layer(x, layer, bias)
        return self._norm(x, tn.FINAL_NORM) if self._config.pre_norm else x

    def _embed(self, ids: Ints) -> Floats:
        words = self._rows(tn.WORD_EMBEDDINGS, ids) * np.float32(self._config.embedding_scale)
        x = words + self._rows(tn.TOKEN_TYPE_EMBEDDINGS, slice(1))
        return x + self._rows(tn.POSITION_EMBEDDINGS, slice(len(ids))) if self._config.position_table else x

    def _layer(self, x: Floats, layer: int, bias: Floats | None) -> Floats:
        prefix = f"encoder.layer.{self._config.stored_layer(layer)}."
        attention_norm, pre_norm = self._config.has_attention_norm(layer), self._config.pre_norm
        sublayer_input = self._norm(x, f"{prefix}attention.output.LayerNorm") if pre_norm and attention_norm else x
        context = self._mix(sublayer_input, layer, bias)
        x = x + (self._norm(context, prefix + tn.ATTENTION_SUBLAYER_NORM) if self._config.sublayer_norms else context)
        if attention_norm and not pre_norm:
            x = self._norm(x, f"{prefix}attention.output.LayerNorm")
        sublayer_input = self._norm(x, f"{prefix}output.LayerNorm") if pre_norm else x
        experts = self._config.experts_of(layer)
        output = (
            self._feed_forward(sublayer_input, prefix)
            if experts is None
            else self._feed_experts(sublayer_input, prefix, experts)
        )
        x = x + (self._norm(output, prefix + tn.SUBLAYER_NORM) if self._config.sublayer_norms else output)
        if self._config.layer_inputs:
            inner = self._activate(self._linear(x, prefix + tn.INPUT_GATE)) * self._inputs[:, layer]
            x = x + self._norm(self._linear(inner, prefix + tn.INPUT_DENSE), prefix + tn.INPUT_NORM)
            x = x * self._checkpoint.float32(prefix + tn.LAYER_SCALE)
        return x if pre_norm else self._norm(x, f"{prefix}output.LayerNorm")

    def _mix(self, x: Floats, layer: int, bias: Floats | None) -> Floats:
        prefix = f"encoder.layer.{self._config.stored_layer(layer)}."
        convolution = self._config.attention_of(layer).convolution
        if convolution is None:
            return self._linear(self._attention(x, layer, bias), f"{prefix}attention.output.dense")
        b, c, x = np.split(self._linear(x, prefix + tn.CONVOLUTION_IN), 3, axis=1)
        taps, offset = (
            self._checkpoint.float32(f"{prefix}{tn.CONVOLUTION_TAPS}.{part}") for part in ("weight", "bias")
        )
        rows = np.pad(b * x, ((convolution.taps - 1 - convolution.after, convolution.after), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(rows, convolution.taps, axis=0)  # [L, hidden, taps]
        return self._linear(c * ((windows * taps[:, 0]).sum(-1) + offset), prefix + tn.CONVOLUTION_OUT)

    def _feed_forward(self, x: Floats, prefix: str) -> Floats:
        inner = self._linear(x, f"{prefix}intermediate.dense")
        if self._config.gated:
            inner = inner * self._activate(self._linear(x, f"{prefix}intermediate.gate"))
        else:
            inner = self._activate(inner)
        return self._linear(inner, f"{prefix}output.dense")

    def _feed_experts(self, x: Floats, prefix: str, experts: Experts) -> Floats:
        """The experts' sum: each computes every row, with weight 0 where a row does not pass it."""
        logits = x @ self._checkpoint.float32(prefix + tn.ROUTER).T
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        weights[weights < np.sort(weights)[:, -experts.top_k, None]] = 0
        names = (tn.EXPERTS_INNER, tn.EXPERTS_OUTER)
        inner, outer = (np.split(self._checkpoint.float32(prefix + name), experts.count) for name in names)
        bias = self._checkpoint.float32(prefix + tn.EXPERTS_BIAS)
        y, none = np.tile(bias, (len(x), 1)), np.zeros(1, np.float32)
        for number in range(experts.count):
            h = self._activate(self._product(x, inner[number], none, prefix + tn.EXPERTS_INNER))
            y += weights[:, number, None] * self._product(h, outer[number].T, none, prefix + tn.EXPERTS_OUTER)
        return y

    def _product(self, x: Floats, weight: Floats, bias: Floats, name: str) -> Floats:
        if self._int8 and name.startswith("encoder.layer."):
            return product(quantize_rows(x), quantize_weight(weight, name), bias)
        y: Floats = x @ weight.T + bias
        return y

    def _attention(self, x: Floats, layer: int, bias: Floats | None) -> Floats:
        length, heads, size = len(x), self._config.heads, self._config.of_layer(layer).head_size
        attention = self._config.attention_of(layer)
        prefix = f"encoder.layer.{self._config.stored_layer(layer)}."
        q, k, v = (
            self._linear(x, f"{prefix}attention.self.{name}").reshape(length, -1, size).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        if self._config.qk_norm:
            q, k = self._norm(q, prefix + tn.QUERY_NORM), self._norm(k, prefix + tn.KEY_NORM)
        if self._config.value_norm:
            v = v / np.sqrt(np.square(v).mean(-1, keepdims=True) + np.float32(self._config.layer_norm_eps))
        if attention.rotary is not None:
            q, k = _rotate(q, attention.rotary), _rotate(k, attention.rotary)
        k, v = (np.repeat(shared, heads // len(shared), 0) for shared in (k, v))
        scores = q @ k.swapaxes(1, 2) * np.float32(self._config.score_scale)
        if bias is not None:
            scores = scores + bias
        if self._config.disentangled is not None:
            scores = scores + self._by_position(q, k, prefix) * np.float32(self._config.score_scale)
        if attention.window is not None:
            scores = np.where(np.abs(_distances(length)) > attention.window, -np.inf, scores)
        if self._config.causal:
            scores = np.where(_distances(length) > 0, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        context: Floats = (weights @ v).swapaxes(0, 1).reshape(length, -1)
        return context

    def _by_position(self, q: Floats, k: Floats, prefix: str) -> Floats:
        """The parts of disentangled attention's scores by distance: [heads, queries, keys]."""
        relative, length = self._config.disentangled, q.shape[1]
        assert relative is not None  # noqa: S101 - the caller has asked
        rows = relative_rows(relative, length)[_distances(length) + length - 1]
        table = self._rows(tn.RELATIVE_EMBEDDINGS, slice(None))
        if relative.norm:
            table = self._norm(table, tn.RELATIVE_NORM)

        def products(x: Floats, own: str, shared: str) -> Floats:
            """Products of queries or keys with each row: [heads, L, 2 · span]. int8 does not quantize these."""
            name = f"{prefix}attention.self.{shared}" if relative.shared else prefix + own
            weight, bias = (self._checkpoint.float32(f"{name}.{kind}") for kind in ("weight", "bias"))
            by_head = (table @ weight.T + bias).reshape(len(table), *x.shape[::2]).transpose(1, 2, 0)
            return x @ by_head

        scores: Floats = np.zeros((len(q), length, length), q.dtype)
        if relative.content_to_position:
            scores = scores + np.take_along_axis(products(q, tn.POSITION_KEY, "key"), rows[None], 2)
        if relative.position_to_content:
            scores = scores + np.take_along_axis(products(k, tn.POSITION_QUERY, "query"), rows.T[None], 2).swapaxes(
                1, 2
            )
        return scores

    def _bias(self, length: int) -> Floats | None:
        """Biases of attention's scores: [heads, queries, keys]."""
        if self._config.relative_buckets:
            by_distance = bias_by_distance(self._checkpoint.float32(tn.RELATIVE_ATTENTION_BIAS), length)
        elif self._config.alibi:
            by_distance = alibi_by_distance(self._config.heads, length)
        else:
            return None
        return by_distance[:, _distances(length) + length - 1]

    def _rows(self, name: str, index: npt.NDArray[np.signedinteger] | slice) -> Floats:
        stored = self._checkpoint.stored(name)
        rows = type(stored)(stored.array[index], stored.dtype).float32()  # converts only the rows that are read
        added = self._addition(name)
        if added is not None:
            rows = rows + added[0][index] @ added[1]
        return rows

    def _linear(self, x: Floats, name: str) -> Floats:
        weight, bias = (self._checkpoint.float32(f"{name}.{kind}") for kind in ("weight", "bias"))
        y = self._product(x, weight, bias, f"{name}.weight")
        added = self._addition(f"{name}.weight")
        if added is not None:
            y += x @ added[1].T @ added[0].T
        return y

    def _addition(self, name: str) -> tuple[Floats, Floats] | None:
        """The two matrices whose product the adapter adds to a weight; None: nothing."""
        low_rank, adapters = self._checkpoint.low_rank(name), self._config.adapters
        if self._adapter < 0 or low_rank is None or adapters is None:
            return None
        return low_rank.left[self._adapter] * np.float32(adapters.scale), low_rank.right[self._adapter]

    def _norm(self, x: Floats, name: str) -> Floats:
        gamma = self._checkpoint.float32(f"{name}.weight") + np.float32(self._config.norm_offset)
        epsilon = np.float32(self._config.layer_norm_eps)
        if not self._config.rms_norm:
            x = x - x.mean(-1, keepdims=True)
        y: Floats = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon) * gamma
        if not self._config.rms_norm:
            y += self._checkpoint.float32(f"{name}.bias")
        return y

    def _activate(self, x: Floats) -> Floats:
        if self._config.activation == "relu":
            return np.maximum(x, np.float32(0))
        half, one = np.float32(0.5), np.float32(1)
        match self._config.activation:
            case "gelu":
                curve: Floats = _erf(x / math.sqrt(2)).astype(np.float32)
            case "silu":  # x times its logistic function
                curve = np.tanh(half * x)
            case "gelu_tanh":  # the approximation of Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016
                curve = np.tanh(math.sqrt(2 / math.pi) * (x + np.float32(0.044715) * x**3))
            case other:
                raise ValueError(f"no activation {other!r}")
        y: Floats = half * x * (one + curve)
        return y


class _Recorder(_Reference):
    """The model in float64, which keeps what `normed_magnitudes` returns."""

    RECORDED = ("attention.self.query", "intermediate.dense")

    def __init__(self, config: EncoderConfig, checkpoint: Checkpoint, adapter: int, *, int8: bool) -> None:
        super().__init__(config, checkpoint, adapter, int8=int8)
        self.found: dict[str, npt.NDArray[np.float64]] = {}

    def _embed(self, ids: Ints) -> Floats:
        return cast("Floats", super()._embed(ids).astype(np.float64))

    def _linear(self, x: Floats, name: str) -> Floats:
        if name.endswith(self.RECORDED):
            self.found[name] = np.sqrt(np.square(x, dtype=np.float64).mean(0))
        return super()._linear(x, name)


def _distances(length: int) -> npt.NDArray[np.int64]:
    """The key's position less the query's: [queries, keys]."""
    positions = np.arange(length)
    return positions - positions[:, None]


def _rotate(x: Floats, rotary: Rotary) -> Floats:
    """Queries or keys [heads, L, size] rotated by their positions."""
    cosines, sines = rotations(rotary, x.shape[1])
    half = rotary.columns // 2
    low, high, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([low * cosines - high * sines, high * cosines + low * sines, rest], axis=-1)


TEST_LENGTH = 5
PAST_WINDOW = 16  # tokens
WIDEST_WINDOW = 512  # tokens; the reference of longer texts would take minutes for models of gigabytes
# Relative errors far above rounding, which is about 1e-3 in float16 and 1e-2 in bfloat16. Kernels that do not run, or
# run on other weights, are off by the vector's own length.
TOLERANCE = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.3, "int8": 0.3}
FIELD = '"post_processor":'
TEXTS, LENGTH = 4, 5  # several, because a checkpoint may have a bad row for a rare token; tokens without special ones


def self_test_ids(config: EncoderConfig) -> Ints:
    """A few tokens spread over the vocabulary, none of them padding: int32 [L].

    No window of up to WIDEST_WINDOW tokens holds them all.
    """
    windows = (config.attention_of(layer).window or 0 for layer in range(config.layers))
    widest = max((window + PAST_WINDOW for window in windows if 0 < window <= WIDEST_WINDOW), default=0)
    return spread_ids(config, max(TEST_LENGTH, widest))


def spread_ids(config: EncoderConfig, length: int) -> Ints:
    """Tokens, at most as many as the model reads, spread over the vocabulary, none of them padding: int32 [L]."""
    length = min(length, config.max_positions)
    ids = (np.arange(length) * 2 + 1) * config.vocab_size // (2 * length)
    if config.padding_id is not None:
        ids[ids == config.padding_id] = 0 if config.padding_id > 0 else config.vocab_size - 1
    return ids.astype(np.int32)


def vector_of(ids: Ints, config: EncoderConfig, checkpoint: Checkpoint, pooling: str, adapter: int = -1) -> Floats:
    """The pooled last hidden state of token ids [L] with an adapter, -1: none. Not normalized: float32 [hidden]."""
    x = hidden_state(ids, config, checkpoint, adapter)
    pooled: Floats = {
        "cls": lambda: x[0],
        "mean": lambda: x.mean(0),
        "max": lambda: x.max(0),
        "last-token": lambda: x[-1],
    }[pooling]()
    return pooled.astype(np.float32, copy=False)


def mismatch(got: Floats, expected: Floats, dtype: str) -> str | None:
    """Reason if `got` [hidden] cannot be the `expected` vector, in half a sentence; None if it can."""
    if not np.isfinite(got).all():
        return "its vector is not finite"
    if not got.any():
        return "its vector is all zeros"
    length = float(np.linalg.norm(expected))
    error = float(np.linalg.norm(got - expected)) / max(length, 1e-12)
    if error <= TOLERANCE[dtype]:
        return None
    return f"its vector is {error:.2g} of its length off, at most {TOLERANCE[dtype]:g} is rounding"


def tasks_never_finite(model: Model, encoder: Encoder) -> Task:
    """The tasks whose every request will fail: none of the texts gets finite rows. Raises EncoderError."""
    special = _special_ids(model)
    texts = np.array_split(spread_ids(model.config, TEXTS * LENGTH), TEXTS)
    batch = pack([np.concatenate([special, text])[: model.max_input_length] for text in texts if len(text)])
    never = NO_TASK
    for task, rows in encoder.wait(encoder.submit(batch.with_tasks(model.tasks))).items():
        if all(rows.slice(index, index + 1).first_not_finite() is not None for index in range(rows.sequences)):
            never |= task
    return never


def _special_ids(model: Model) -> npt.NDArray[np.int32]:
    """The special ids around every text: a bad row of one of these fails every request. int32 [n]."""
    # Parsing the whole file, with its vocabulary, would take a quarter of a second and 60 MB for a large one.
    _, _, rest = (model.transformer_folder / "tokenizer.json").read_bytes().decode(errors="replace").partition(FIELD)
    try:
        processor, _ = json.JSONDecoder().raw_decode(rest.lstrip())
    except (ValueError, RecursionError):  # the tokenizer's reader reports the error
        processor = None
    ids = {i for i in _ids_of(processor) if type(i) is int and 0 <= i < model.config.vocab_size}
    return np.array(sorted(ids), np.int32)


def _ids_of(processor: Any) -> list[Any]:
    """The ids that a post-processor of tokenizer.json adds to a single text."""
    try:
        match processor["type"]:
            case "Sequence":
                return [i for member in processor["processors"] for i in _ids_of(member)]
            case "BertProcessing" | "RobertaProcessing":
                return [processor["cls"][1], processor["sep"][1]]
            case "TemplateProcessing":
                names = [piece["SpecialToken"]["id"] for piece in processor["single"] if "SpecialToken" in piece]
                return [i for name in names for i in processor["special_tokens"][name]["ids"]]
    except (TypeError, LookupError):
        pass
    return []
