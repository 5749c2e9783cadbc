"""SPLADE: the head of a masked language model, read from the names and shapes of its tensors."""

from __future__ import annotations

from pathlib import Path

from embert.engine.errors import UnsupportedModel
from embert.engine.files.json_files import read_object
from embert.engine.heads.checkpoints.stored import check_layer, check_norm, stored_tensors
from embert.engine.heads.description import Layer, Norm, Splade
from embert.engine.models.encoder_config import EncoderConfig

__all__ = ["read_splade", "read_splade_pooling"]

# Architectures with the head. Those for pre-training have more than it.
SUFFIXES = ("ForMaskedLM", "ForPreTraining")
# The pooling module's activations → whether the logarithm is taken twice.
ACTIVATIONS = {"relu": False, "log1p_relu": True}


def read_splade_pooling(path: Path) -> bool:
    """Whether the logarithm is taken twice, from the `config.json` of a SpladePooling module.

    Raises BrokenModel or UnsupportedModel.
    """
    fields = read_object(path)
    strategy = fields.get("pooling_strategy", "max")
    if strategy != "max":
        raise UnsupportedModel(f"{path}: pooling_strategy {strategy!r} is not supported; supported: 'max'")
    activation = fields.get("activation_function", "relu")
    if activation not in ACTIVATIONS:
        named = ", ".join(map(repr, ACTIVATIONS))
        raise UnsupportedModel(f"{path}: activation_function {activation!r} is not supported; supported: {named}")
    return ACTIVATIONS[activation]


def read_splade(folder: Path, config: EncoderConfig, *, twice: bool = False, most: int | None = None) -> Splade:
    """The masked language model's head of the checkpoint in `folder`, for at most `most` weights of a text.

    Raises BrokenModel for a tensor that is missing or of another shape, UnsupportedModel for a checkpoint that is not
    of a masked language model.
    """
    names = config.tensors.masked_lm
    stated = read_object(folder / "config.json").get("architectures")
    stated = stated if isinstance(stated, list) else []
    if names is None or not any(str(item).endswith(SUFFIXES) for item in stated):
        raise UnsupportedModel(
            f"{folder / 'config.json'}: pooling splade needs a checkpoint of an architecture …ForMaskedLM, found "
            f"{', '.join(map(str, stated)) or 'none'}"
        )
    stored = stored_tensors(folder)
    columns, vocabulary = config.embedding_columns, config.vocab_size
    absent, head_names = config.tensors.is_absent, config.tensors.head_names
    transform = Layer(
        stored.named(head_names(names.transform)),
        "",
        config.hidden_size,
        columns,
        not absent(f"{names.transform}.bias"),
        names.activation or config.activation,
    )
    norm = Norm(stored.named(head_names(names.norm)), config.layer_norm_eps, not absent(f"{names.norm}.bias"))
    check_layer(stored, transform)
    check_norm(stored, norm, columns)
    decoder = f"{names.decoder}.weight"
    bias = next((name for name in names.biases if name in stored.shapes), names.biases[-1])
    return Splade(
        transform=transform,
        norm=norm,
        decoder=stored.check(decoder, (vocabulary, columns)) if decoder in stored.shapes else "",
        bias="" if absent(bias) else stored.check(bias, (vocabulary,)),
        twice=twice,
        most=most,
    )
