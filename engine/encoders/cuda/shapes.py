"""Describes a model to the CUDA extension, and refuses the models that the CUDA encoder does not run.

Needs neither weights nor numpy, because the supervisor imports it too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from embert.engine.encoders.base import shared_tasks
from embert.engine.errors import UnsupportedModel
from embert.engine.heads.description import (
    MARKED_OPTIONS,
    Classifier,
    LabelDecider,
    Layer,
    MarkerDecider,
    Splade,
    TokenWeights,
)
from embert.engine.heads.pooling import POOLINGS, Dense, is_plain
from embert.engine.model import Model
from embert.engine.models.encoder_config import DynamicNtk, EncoderConfig, Rotary
from embert.engine.models.tensor_names import TOKEN_TYPE_EMBEDDINGS
from embert.engine.tasks import NO_TASK, Task

MOST_TOKEN_LABELS = 8192
MOST_DISENTANGLED_COLUMNS = 128
MOST_DISTANCE_ROWS = 32_767
MOST_EXPERTS = 32
MOST_FLOAT32_COLUMNS, MOST_FLOAT32_RMS_COLUMNS = 1024, 2048
MOST_HEAD_COLUMNS, MOST_FLOAT32_HEAD_COLUMNS, MOST_SHARED_HEAD_COLUMNS = 512, 256, 256
MOST_INT8_COLUMNS, MOST_INT8_INNER = 1024, 8192
MOST_SCORED_COLUMNS = 256  # of multi-vectors
HEAD_ACTIVATIONS = ("identity", "tanh", "relu", "sigmoid", "gelu", "gelu_tanh")
_NOT_RUN = ", which the CUDA encoder does not run"
_LABEL_STEP = 8
_INT8_STEP = 128
_HEAD_STEP = 8  # columns: attention's kernels copy 16 bytes at a time


def refusal(model: Model, dtype: str = "auto") -> str | None:
    """Reason if the CUDA encoder runs this model in `dtype` on no GPU, in a sentence; None if it runs it."""
    try:
        check_layers(model)
        check_heads(model)
    except UnsupportedModel as error:
        return str(error)
    if dtype not in ("float32", "int8"):
        return None
    reason = _unfit_for_dtype(model.config, dtype)
    return reason and f"{model.model_id} has {reason}{_NOT_RUN} in {dtype}"


def _unfit_for_dtype(config: EncoderConfig, dtype: str) -> str | None:
    """Property that the extension refuses in float32 or int8 and takes in 16 bits; None if there is none."""
    if config.disentangled is not None:
        return "disentangled attention"
    if dtype == "float32":
        if (head := max(_head_sizes(config))) > MOST_FLOAT32_HEAD_COLUMNS:
            return f"heads of {head} columns, over {MOST_FLOAT32_HEAD_COLUMNS}"
        most = MOST_FLOAT32_RMS_COLUMNS if config.rms_norm else MOST_FLOAT32_COLUMNS
        return f"{config.hidden_size} columns, over {most}" if config.hidden_size > most else None
    for unable, what in (
        (config.gated, "gates"),
        (config.experts is not None, "experts"),
        (config.pre_norm, "norms before a layer's parts"),
        (config.embedding_size is not None, "embeddings narrower than its layers"),
        (bool(config.shared_layers), "layers that share weights"),
        (bool(rotary_tables(config)), "rotary positions"),
        (bool(padded_head(config)), f"heads of {config.head_size} columns"),
    ):
        if unable:
            return what
    for columns, most in ((config.hidden_size, MOST_INT8_COLUMNS), (config.intermediate_size, MOST_INT8_INNER)):
        if columns % _INT8_STEP or columns > most:
            return f"rows of {columns} columns, which is not a multiple of {_INT8_STEP} up to {most}"
    return None


def check_layers(model: Model) -> None:
    """Raise UnsupportedModel for embeddings or layers that the extension cannot compute."""
    config, relative, experts = model.config, model.config.disentangled, model.config.experts
    size, widest = config.head_size, max(_head_sizes(config))
    whole_heads = not any(each % _HEAD_STEP for each in _head_sizes(config))
    if not config.layers:
        _refuse(model, "has static embeddings, without layers")
    if relative is not None and (size > MOST_DISENTANGLED_COLUMNS or not whole_heads):
        bounds = f"neither a multiple of {_HEAD_STEP} nor at most {MOST_DISENTANGLED_COLUMNS}"
        _refuse(model, f"has disentangled attention in heads of {size} columns, {bounds}")
    if relative is not None and 2 * relative.span > MOST_DISTANCE_ROWS:
        _refuse(model, f"has more than {MOST_DISTANCE_ROWS} rows of distances")
    if config.attention_scale is not None and not whole_heads:
        _refuse(model, f"scales scores of heads of {size} columns, which is not a multiple of {_HEAD_STEP}")
    if config.projects_first and (config.position_table or TOKEN_TYPE_EMBEDDINGS not in config.tensors.absent):
        _refuse(model, "projects embeddings of positions or token types before their norm")
    if experts is not None and experts.count > MOST_EXPERTS:
        _refuse(model, f"has {experts.count} experts, over {MOST_EXPERTS}")
    if widest > MOST_HEAD_COLUMNS:
        _refuse(model, f"has heads of {widest} columns, over {MOST_HEAD_COLUMNS}")
    if config.layer_inputs % _HEAD_STEP:
        columns = f"{config.layer_inputs} columns, which is not a multiple of {_HEAD_STEP}"
        _refuse(model, f"has inputs of layers of {columns}")
    if _stretches(config):
        _refuse(model, "stretches rotary positions by each text's length")
    if config.activation == "silu" and not config.gated:
        _refuse(model, "has silu in a feed-forward network without a gate")
    if _sees_only_itself(config):
        _refuse(model, "has windows of one token")
    if marker_decider(model) is not None and adds_types(config):
        _refuse(model, "adds rows by token type, and decides by layers that read token types as types of questions")
    scaling = config.long_queries
    if scaling is not None and config.max_positions > scaling.trained:
        texts = f"takes texts of {config.max_positions} tokens"
        _refuse(model, f"{texts} and multiplies queries by their position from {scaling.trained} on")


def describe(cuda: Any, model: Model, dtype: str) -> Any:
    """Return the EncoderConfig of the extension `cuda` for a model: its embeddings, layers and heads.

    Raises UnsupportedModel for what the extension cannot compute.
    """
    check_layers(model)
    check_heads(model)
    config = cuda.EncoderConfig()
    for name, value in encoder_fields(model.config).items():
        setattr(config, name, value)
    config.attention = [cuda.LayerAttention(*layer) for layer in layer_attention(model.config)]
    config.activation = cuda.Activation[model.config.activation]
    config.pooling = cuda.Pooling[device_pooling(model)]
    classifier = model.heads.classifier
    if classifier is not None and not classifies_on_the_host(model):
        config.classifier_pooling = cuda.Pooling[classifier.pooling]
    config.task_heads = _task_heads(cuda, model)
    config.int8 = dtype == "int8"
    config.dtype = cuda.DType["float16" if config.int8 else dtype]  # of rows, tables and heads
    return config


def marker_decider(model: Model) -> MarkerDecider | None:
    """The layers after the encoder that make decisions; None if there are none."""
    return model.heads.decider if isinstance(model.heads.decider, MarkerDecider) else None


def describe_decider(cuda: Any, decider: MarkerDecider, dtype: str) -> Any:
    """Return the EncoderConfig of the layers that follow a model's own; the model's TaskHeads have the options."""
    config = cuda.EncoderConfig()
    for name, value in encoder_fields(decider.config).items():
        setattr(config, name, value)
    config.continues = True
    config.activation = cuda.Activation[decider.config.activation]
    config.dtype = cuda.DType["float16" if dtype == "int8" else dtype]
    hidden, _ = decider.scorer
    config.task_heads = cuda.TaskHeads()
    config.task_heads.multi = [cuda.DenseShape(hidden.inputs, hidden.outputs, cuda.HeadActivation[hidden.activation])]
    config.task_heads.token_weights = True  # the last product's, which has one output
    return config


# Fields of EncoderConfig that the extension has under other names.
_NAMES = {
    "hidden_size": "hidden",
    "intermediate_size": "inner",
    "vocab_size": "vocabulary",
    "max_positions": "positions",
    "key_value_heads": "kv_heads",
    "layer_norm_eps": "epsilon",
    "embedding_size": "embedding",
    "shared_layers": "shared",
}
# Fields that are converted below, or that only Python reads.
_CONVERTED = (
    "activation", "adapters", "alibi", "attention", "continues", "disentangled", "experts", "first_position",
    "long_queries", "model_type", "norm_offset", "relative_buckets", "tensors", "type_vocab_size", "wide_range",
)  # fmt: skip


def encoder_fields(config: EncoderConfig) -> dict[str, Any]:
    """Return the plain fields of the extension's EncoderConfig. A field that is None here keeps the default there."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    relative = config.disentangled
    return {
        **{
            _NAMES.get(name, name): value
            for name, value in fields.items()
            if name not in _CONVERTED and value is not None
        },
        "padded_head": padded_head(config),
        "types": config.type_vocab_size if adds_types(config) else 0,
        "padding": config.padding_id is not None,
        "relative": config.relative_buckets > 0 or config.alibi,
        "experts": 0 if config.experts is None else config.experts.count,
        "top_k": 0 if config.experts is None else config.experts.top_k,
        "expert_layers": () if config.experts is None else config.experts.layers,
        "distance_rows": 0 if relative is None else 2 * relative.span,
        "distance_keys": relative is not None and relative.content_to_position,
        "distance_queries": relative is not None and relative.position_to_content,
    }


def layer_attention(config: EncoderConfig) -> list[tuple[int, ...]]:
    """Return the extension's LayerAttention of each layer: window, rotary columns, table, own heads, and taps.

    The list is empty where all layers have plain attention.
    """
    tables = rotary_tables(config)
    attention: list[tuple[int, ...]] = []
    for kind in config.attention:
        window = kind.window if kind.window is not None and kind.window < config.max_positions - 1 else 0
        rotary_columns, table = (kind.rotary.columns, tables.index(kind.rotary)) if kind.rotary else (0, 0)
        taps, after = (kind.convolution.taps, kind.convolution.after) if kind.convolution else (0, 0)
        heads = kind.head_columns or 0, kind.key_value_heads or 0
        attention.append((window, rotary_columns, table, *heads, taps, after))
    return attention


def adds_types(config: EncoderConfig) -> bool:
    """True if the extension adds rows of the token-type table."""
    if TOKEN_TYPE_EMBEDDINGS in config.tensors.absent:
        return False
    return config.continues or (config.embedding_norm and not config.projects_first)


def padded_head(config: EncoderConfig) -> int:
    """Columns of a head with zeros behind its own, where the kernels need them; 0: they do not."""
    rest = config.head_size % _HEAD_STEP
    return config.head_size + _HEAD_STEP - rest if rest else 0


def check_heads(model: Model) -> None:
    """Raise UnsupportedModel for heads that the extension cannot compute."""
    heads, classifier, token_classifier = model.heads, model.heads.classifier, model.heads.token_classifier
    on_the_host = classifies_on_the_host(model)
    if token_classifier is not None and len(token_classifier.labels) > MOST_TOKEN_LABELS:
        labels = f"has {len(token_classifier.labels)} labels for tokens"
        _refuse(model, labels, f"; the CUDA encoder runs at most {MOST_TOKEN_LABELS}")
    if classifier is not None and classifier.pooling == "late":
        _refuse(model, "has a classification head that takes the mean of rows after its first layer")
    if classifier is not None and classifier.padding_id is not None and not model.config.causal:
        _refuse(model, "classifies by the last token that is not padding, with attention in both directions")
    if on_the_host and model.embeds:
        both = "embeds and has a classification head that is computed on the host, from pooled rows"
        _refuse(model, both, "; the CUDA encoder does not run both")
    for layer in classifier.layers if classifier is not None and not on_the_host else ():
        if layer.activation not in HEAD_ACTIVATIONS:
            runs = f"{_NOT_RUN}; it runs {', '.join(HEAD_ACTIVATIONS)}"
            _refuse(model, f"has {layer.activation} in its classification head", runs)
    if isinstance(heads.sparse, Splade) and heads.sparse.transform.outputs != model.config.hidden_size:
        columns = heads.sparse.transform.outputs
        _refuse(model, f"has a sparse head of {columns} columns on hidden states of {model.config.hidden_size}")


def _refuse(model: Model, what: str, end: str = _NOT_RUN) -> NoReturn:
    raise UnsupportedModel(f"{model.model_id} {what}{end}")


def _task_heads(cuda: Any, model: Model) -> Any:
    heads = model.heads

    def layers(linears: Sequence[Dense | Layer], *, padded: bool = False) -> list[Any]:
        return [
            cuda.DenseShape(
                linear.inputs,
                padded_labels(linear.outputs) if padded else linear.outputs,
                cuda.HeadActivation[linear.activation],
            )
            for linear in linears
        ]

    of_tokens = heads.token_classifier or heads.multi_vector
    task_heads = cuda.TaskHeads()
    task_heads.label_mass = isinstance(heads.decider, LabelDecider)
    task_heads.tied_vocabulary = own_vocabulary(model) is None
    if not embeds_on_the_host(model):
        task_heads.dense = layers([module for module in model.after_pooling if isinstance(module, Dense)])
    if heads.classifier is not None and not classifies_on_the_host(model):
        task_heads.classifier = layers(heads.classifier.layers)
    if of_tokens is not None:
        task_heads.multi = layers(of_tokens.layers, padded=True)
        task_heads.token_norm = any(linear.norm is not None for linear in of_tokens.layers)
    task_heads.token_logits = heads.token_classifier is not None
    if (decider := marker_decider(model)) is not None:
        task_heads.options, task_heads.marker = MARKED_OPTIONS, decider.marker
        task_heads.text_types = decider.config.type_vocab_size
    task_heads.token_weights = isinstance(heads.sparse, TokenWeights)
    if isinstance(heads.sparse, Splade):
        activation, epsilon = cuda.Activation[heads.sparse.transform.activation], heads.sparse.norm.eps
        # Adapters add to the word table, not to the decoder.
        tied = not heads.sparse.decoder and model.config.adapters is None and model.lora is None
        task_heads.splade = cuda.SpladeKind(activation, epsilon, 2 if heads.sparse.twice else 1, tied)
    return task_heads


def own_vocabulary(model: Model) -> Layer | None:
    """A language model's matrix for LABEL_MASS, where it is another tensor than the word table on the device."""
    decider = model.heads.decider
    if not isinstance(decider, LabelDecider) or not (decider.vocabulary.name or model.config.adapters):
        return None
    return decider.vocabulary


def padded_labels(labels: int) -> int:
    """Rows of a head's matrix with zeros behind its own: the products' kernels take multiples of 8."""
    return -(-labels // _LABEL_STEP) * _LABEL_STEP


def host_head(model: Model) -> Classifier | None:
    """The head for which the extension only pools: of decisions, or one that has a norm or takes a mean of rows."""
    if isinstance(model.heads.decider, LabelDecider):
        return model.heads.decider.classifier
    head = model.heads.classifier
    if head is not None and (head.pooling == "mean" or any(layer.norm is not None for layer in head.layers)):
        return head
    return None


def classifies_on_the_host(model: Model) -> bool:
    """True if the extension only pools for the classification head, or for that of decisions."""
    return host_head(model) is not None


def scores_on_the_host(model: Model) -> bool:
    """True if the extension returns multi-vectors, and the host scores documents with queries."""
    head = model.late_interaction
    return head is not None and (head.pools or head.columns > MOST_SCORED_COLUMNS)


def pools_on_the_host(model: Model) -> bool:
    """True if the extension has no kernel for the model's pooling: the host pools the rows of tokens."""
    return model.embeds and not (model.pooling in POOLINGS and model.include_prompt)


def embeds_on_the_host(model: Model) -> bool:
    """True if the host computes what follows the extension's pooling, or follows the last layer."""
    return model.embeds and not (not pools_on_the_host(model) and all(map(is_plain, model.after_pooling)))


def on_the_host(model: Model) -> str:
    """Modules of an embedding that the host computes, for the start-up log; empty if there are none."""
    pooling = f"pooling {model.pooling}{'' if model.include_prompt else ' without prompts'}"
    parts = [pooling] if pools_on_the_host(model) else []
    if embeds_on_the_host(model):
        parts += [type(module).__name__ for module in model.after_pooling]
    return ", ".join(parts)


def device_pooling(model: Model) -> str:
    """Pooling of the extension: for vectors, or for a classification head on the host."""
    head = host_head(model)
    if head is not None:
        return head.pooling
    return "mean" if pools_on_the_host(model) else model.pooling


def shares_tasks(model: Model) -> Task:
    """Tasks of texts that may continue another one of a batch: not with adapters, by which batches are divided."""
    fits = model.config.adapters is None and max(_head_sizes(model.config)) <= MOST_SHARED_HEAD_COLUMNS
    return shared_tasks(model) if fits else NO_TASK


def rotary_tables(config: EncoderConfig) -> list[Rotary]:
    """The different rotations of a model's layers: each has a table of angles."""
    tables = (config.attention_of(layer).rotary for layer in range(config.layers))
    return list(dict.fromkeys(table for table in tables if table is not None))


def _head_sizes(config: EncoderConfig) -> set[int]:
    """Columns of heads, of all layers."""
    return {kind.head_columns or config.head_size for kind in config.attention} or {config.head_size}


def _sees_only_itself(config: EncoderConfig) -> bool:
    """True if some layer has a window of no other token: the extension's windows of 0 are whole texts."""
    return any(config.attention_of(layer).window == 0 for layer in range(config.layers))


def _stretches(config: EncoderConfig) -> bool:
    """True if the angles of some layer depend on a text's length."""
    scalings = (rotary.scaling for rotary in rotary_tables(config))
    return any(isinstance(scaling, DynamicNtk) and config.max_positions > scaling.trained for scaling in scalings)
