"""Finds unused tensors of a checkpoint: those of heads that are not served. Imports no numpy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from embert.engine.heads.checkpoints.stored import Stored
from embert.engine.heads.description import Heads, Layer, Norm, Splade
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import stored_names_of
from embert.engine.models.tensor_shapes import tensor_shapes

__all__ = ["named_groups", "unused_tensors"]

MOST_GROUPS, MOST_CHARACTERS = 8, 60  # of a message, and of a name in it

# Buffers that follow from config.json, by the ends of their names.
BUFFERS = ("position_ids", "token_type_ids", "inv_freq")
ADDED = (".0.lora_A", ".0.lora_B")  # of adapters, beside the weights to which they add


def unused_tensors(stored: Stored, config: EncoderConfig, heads: Heads) -> list[str]:
    """The stored names of tensors that neither the encoder nor its `heads` read.

    Poolers do not count: HuggingFace's plain models have them too, and pooled hidden states do without.
    """
    used = {*_of_heads(heads)}
    for name in tensor_shapes(config):
        stored_names = config.tensors.stored_names(name)
        used |= {next((stored_name.name for stored_name in stored_names if stored_name.name in stored.shapes), "")}
    masked_lm = config.tensors.masked_lm
    if masked_lm is not None and isinstance(heads.sparse, Splade):
        # The word table and the decoder may be one, and so may two names of its bias.
        used |= {f"{masked_lm.decoder}.weight", *masked_lm.biases}
    return [name for name in stored.shapes if name not in used and not _says_nothing(name)]


def named_groups(names: Iterable[str], config: EncoderConfig) -> str:
    """The names by their first part, with the number of each: "classifier (2), lm_head (5)". At most MOST_GROUPS."""
    prefixes = {prefix for mapping in config.tensors.mappings for prefix in mapping.prefixes}
    groups = Counter(_first_part(name, prefixes) for name in names)
    listed = [f"{_short(group)} ({count})" for group, count in groups.most_common(MOST_GROUPS)]
    more = len(groups) - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more else "")


def _first_part(name: str, prefixes: set[str]) -> str:
    prefix = next((candidate for candidate in prefixes if name.startswith(candidate)), "")
    return prefix + name.removeprefix(prefix).partition(".")[0]


def _short(name: str) -> str:
    return name if len(name) <= MOST_CHARACTERS else name[:MOST_CHARACTERS] + "…"


def _says_nothing(name: str) -> bool:
    return name.endswith(BUFFERS + ADDED) or "pooler" in name.split(".")[:2]


def _of_heads(heads: Heads) -> Iterator[str]:
    """The stored names of the heads' tensors."""
    layers: list[Layer] = []
    if heads.classifier is not None:
        layers += heads.classifier.layers
    if heads.multi_vector is not None:
        layers += heads.multi_vector.layers
    if isinstance(heads.sparse, Splade):
        layers.append(heads.sparse.transform)
        yield from _of_norm(heads.sparse.norm)
        yield from (heads.sparse.decoder, heads.sparse.bias)
    for layer in layers:
        yield from (f"{layer.name}.weight", f"{layer.name}.bias")
        if layer.norm is not None:
            yield from _of_norm(layer.norm)


def _of_norm(norm: Norm) -> Iterator[str]:
    for part in ("weight", "bias"):
        yield from stored_names_of(f"{norm.name}.{part}")
