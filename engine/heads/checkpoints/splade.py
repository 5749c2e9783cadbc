"""SPLADE: the head of a masked language model, read from the names and shapes of its tensors."""

from __future__ import annotations

from pathlib import Path

from embert.engine.errors import UnsupportedModel
from embert.engine.families.architecture import Architecture
from embert.engine.families.tensor_names import spellings_of
from embert.engine.files.json_files import read_object
from embert.engine.heads.checkpoints.stored import stored_tensors
from embert.engine.heads.description import Layer, Splade

__all__ = ["read_splade", "read_splade_pooling"]

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


def read_splade(folder: Path, architecture: Architecture, *, twice: bool = False) -> Splade:
    """The masked language model's head of the checkpoint in `folder`.

    Raises BrokenModel for a tensor that is missing or of another shape, UnsupportedModel for a checkpoint that is not
    of a masked language model.
    """
    names = architecture.tensors.masked_lm
    stated = read_object(folder / "config.json").get("architectures")
    stated = stated if isinstance(stated, list) else []
    if names is None or not any(str(each).endswith("ForMaskedLM") for each in stated):
        raise UnsupportedModel(
            f"{folder / 'config.json'}: pooling splade needs a checkpoint of an architecture …ForMaskedLM, found "
            f"{', '.join(map(str, stated)) or 'none'}"
        )
    stored = stored_tensors(folder)
    hidden, vocabulary = architecture.hidden_size, architecture.vocab_size
    stored.check(f"{names.transform}.weight", (hidden, hidden))
    stored.check(f"{names.transform}.bias", (hidden,))
    for part in ("weight", "bias"):
        spellings = spellings_of(f"{names.norm}.{part}")
        stored.check(next((name for name in spellings if name in stored.shapes), spellings[0]), (hidden,))
    decoder = f"{names.decoder}.weight"
    bias = next((name for name in names.biases if name in stored.shapes), names.biases[-1])
    return Splade(
        transform=Layer(names.transform, "", hidden, hidden, True, names.activation or architecture.activation),
        norm=names.norm,
        norm_eps=architecture.layer_norm_eps,
        decoder=stored.check(decoder, (vocabulary, hidden)) if decoder in stored.shapes else "",
        bias=stored.check(bias, (vocabulary,)),
        twice=twice,
    )
