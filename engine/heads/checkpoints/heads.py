"""A model's sparse and multi-vector heads, wherever its files describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from embert.engine.errors import BrokenModel
from embert.engine.heads.checkpoints import bge_m3
from embert.engine.heads.checkpoints.late_interaction import is_stanford, read_late_interaction, read_stanford
from embert.engine.heads.checkpoints.splade import read_splade
from embert.engine.heads.dense import width_after
from embert.engine.heads.description import MultiVector, Splade, TokenWeights
from embert.engine.heads.modules import Modules
from embert.engine.models.encoder_config import EncoderConfig

__all__ = ["VectorHeads", "read_vector_heads"]


@dataclass(frozen=True, slots=True)
class VectorHeads:
    """The heads found, and whether the model's pooled rows are embeddings too."""

    sparse: Splade | TokenWeights | None = None
    multi_vector: MultiVector | None = None
    embeds: bool = True
    pickled: tuple[str, ...] = ()  # heads that are not served, because they are pickles


def read_vector_heads(
    folder: Path,
    weights: Path,
    config: EncoderConfig,
    modules: Modules,
    prompts: Mapping[str, str],
    usual_prompt: str,
    *,
    pooling: str | None,
    splade: bool,
    most_weights: int | None,
) -> VectorHeads:
    """The heads of the model in `folder`, whose config.json and weights are in `weights`.

    `pooling` is the user's override, if any. `splade` requests SPLADE's head; `most_weights` bounds the weights of its
    vectors.

    Raises BrokenModel or UnsupportedModel.
    """
    transformer = folder / modules.transformer
    hidden_size = config.hidden_size
    if splade:
        head = read_splade(weights, config, twice=bool(modules.splade), most=most_weights)
        return VectorHeads(sparse=head, embeds=False)
    multi_vector = None
    if modules.token_dense:
        width_after(folder, modules.token_dense, hidden_size)
        multi_vector = read_late_interaction(
            folder, transformer, modules.token_dense, modules.mask, modules.transformer_module, prompts
        )
    elif modules.pooling is None and is_stanford(weights / "config.json"):
        multi_vector = read_stanford(weights, hidden_size)
    if multi_vector is not None:
        _check_lengths(transformer, multi_vector, config.max_positions)
        return VectorHeads(multi_vector=multi_vector, embeds=pooling is not None)
    return VectorHeads(
        sparse=bge_m3.read_token_weights(folder, transformer, hidden_size),
        multi_vector=bge_m3.read_multi_vector(folder, hidden_size, usual_prompt),
        pickled=tuple(bge_m3.still_pickled(folder)),
    )


def _check_lengths(folder: Path, head: MultiVector, most: int) -> None:
    expansion = head.query.expansion
    if expansion is not None and expansion.length > most:
        raise BrokenModel(f"{folder}: queries are expanded to {expansion.length} tokens, the model takes {most}")
