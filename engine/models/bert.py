"""BERT: absolute positions, token types, post-norm layers. The other model types say how they differ from it."""

from __future__ import annotations

from collections.abc import Mapping

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import QKV, Classification, FusedWeight, MaskedLM, TensorNames, WeightMapping

# HuggingFace's names → the function that is computed. `gelu` is the exact (erf) form; the other two are the tanh form.
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
# Those of model types with gates.
GATES = {**ACTIVATIONS, "silu": "silu", "swish": "silu"}

# transformers' defaults for keys that config.json omits.
DEFAULTS = {
    "vocab_size": 30_522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
}  # fmt: skip

MASKED_LM = MaskedLM(
    transform="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    decoder="cls.predictions.decoder",
    biases=("cls.predictions.decoder.bias", "cls.predictions.bias"),
)

CLASSIFICATION = Classification(dense="bert.pooler.dense", out="classifier")


def qkv_parts(name: str, letters: str = "qkv") -> dict[str, str]:
    """Queries, keys and values in separate tensors, by a `name` with {} for a letter."""
    return {part: name.format(letter) for part, letter in zip(QKV, letters, strict=True)}


def fused_qkv(name: str) -> dict[str, FusedWeight]:
    """Queries, keys and values in one stored tensor."""
    return {part: FusedWeight(name, index, 3) for index, part in enumerate(QKV)}


# transformers 5's own names of the parts of layers with a gate.
GATED_PARTS = {
    **qkv_parts("self_attn.{}_proj"),
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.gate": "mlp.gate_proj",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "post_mlp_layernorm",
}


def read(config: ConfigFile) -> EncoderConfig:
    return read_bert_like(
        config.with_missing(**DEFAULTS),
        TensorNames((WeightMapping(prefixes=("bert.",)),), masked_lm=MASKED_LM, classification=CLASSIFICATION),
    )


def read_bert_like(
    config: ConfigFile,
    tensors: TensorNames,
    *,
    first_position: int = 0,
    relative_buckets: int = 0,
    activations: Mapping[str, str] = ACTIVATIONS,
) -> EncoderConfig:
    """The config of a model type whose layers are BERT's.

    `first_position` and `relative_buckets` are those of `EncoderConfig`; `activations` are the values of `hidden_act`
    that the model type has, and what each computes. Raises BrokenModel for a field that is missing or wrong,
    UnsupportedModel for a value that no encoder here computes.
    """
    config.one_of("position_embedding_type", ("absolute",), "absolute")
    for flag in ("is_decoder", "add_cross_attention"):
        if config.fields.get(flag):
            raise config.unsupported(flag, config.fields[flag], (False,))
    activation = activations[config.one_of("hidden_act", tuple(activations), "gelu")]
    positions = config.integer("max_position_embeddings")
    if positions <= first_position:
        raise BrokenModel(
            f"{config.path}: max_position_embeddings must be above {first_position}, which is where texts start; "
            f"found {positions}"
        )
    encoder_config = EncoderConfig(
        model_type=config.fields["model_type"],
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        layers=config.layers(),
        heads=config.integer("num_attention_heads"),
        intermediate_size=config.integer("intermediate_size"),
        activation=activation,
        max_positions=positions - first_position,
        type_vocab_size=config.integer("type_vocab_size"),
        layer_norm_eps=config.number("layer_norm_eps"),
        tensors=tensors,
        first_position=first_position,
        relative_buckets=relative_buckets,
    )
    if encoder_config.hidden_size % encoder_config.heads:
        raise UnsupportedModel(
            f"{config.path}: {config.name('hidden_size')} {encoder_config.hidden_size} is not a multiple of "
            f"{config.name('num_attention_heads')} {encoder_config.heads}"
        )
    return encoder_config
