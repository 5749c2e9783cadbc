"""A model's sparse and multi-vector heads, wherever its files describe them: SPLADE, bge-m3, late interaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import architectures_of, read_object
from embert.engine.files.tokenizer_config import SpecialToken
from embert.engine.heads.checkpoints.late_interaction import is_stanford, read_late_interaction, read_stanford
from embert.engine.heads.checkpoints.stored import Vocabulary, check_layer, check_norm, stored_tensors, tensors_in
from embert.engine.heads.description import Layer, MultiVector, Norm, Role, Splade, TokenWeights
from embert.engine.heads.modules import Modules
from embert.engine.heads.pooling import width_after
from embert.engine.models.encoder_config import EncoderConfig

# Architectures with SPLADE's head, that of a masked language model. Those for pre-training have more than it.
SUFFIXES = ("ForMaskedLM", "ForPreTraining")


def read_splade(folder: Path, config: EncoderConfig, *, twice: bool = False, most: int | None = None) -> Splade:
    """The masked language model's head of the checkpoint in `folder`, for at most `most` weights of a text.

    Raises BrokenModel for a tensor that is missing or of another shape, UnsupportedModel for a checkpoint that is not
    of a masked language model, and for a model_type without this head.
    """
    names = config.tensors.masked_lm
    if names is None:
        raise UnsupportedModel(f"{folder / 'config.json'}: pooling splade is not supported for {config.model_type}")
    architectures = architectures_of(read_object(folder / "config.json"))
    if not any(name.endswith(SUFFIXES) for name in architectures):
        raise UnsupportedModel(
            f"{folder / 'config.json'}: pooling splade needs a checkpoint of an architecture …ForMaskedLM, found "
            f"{', '.join(architectures) or 'none'}"
        )
    stored = stored_tensors(folder)
    columns, vocabulary = config.embedding_columns, config.vocab_size
    absent, head_names = config.tensors.is_absent, config.tensors.head_names
    transform = Layer(
        stored.find_name(head_names(names.transform)),
        "",
        config.hidden_size,
        columns,
        not absent(f"{names.transform}.bias"),
        names.activation or config.activation,
    )
    norm = Norm(stored.find_name(head_names(names.norm)), config.layer_norm_eps, not absent(f"{names.norm}.bias"))
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


SPARSE, MULTI = "sparse_linear", "colbert_linear"  # the files' names without their endings

# Tokens without a weight, by their kinds, and XLM-RoBERTa's names for them.
SPECIAL_TOKENS = {"cls_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

# Python to run in the model's folder. It reads the pickles without running code of theirs.
CONVERT = (
    "import torch; from safetensors.torch import save_file; "
    "[save_file(torch.load(f'{{name}}.pt', map_location='cpu', weights_only=True), f'{{name}}.safetensors') "
    "for name in {names}]"
)


def read_token_weights(folder: Path, transformer: Path, hidden_size: int) -> TokenWeights | None:
    """The sparse head, where `folder` has one. The tokenizer is in `transformer`. Raises BrokenModel."""
    layer = _layer(folder, SPARSE, hidden_size)
    if layer is None:
        return None
    if layer.outputs != 1:
        raise BrokenModel(f"{folder / layer.file}: weight has {layer.outputs} rows, expected 1")
    vocabulary = Vocabulary(transformer)
    return TokenWeights(
        layer, vocabulary.ids(vocabulary.special(kind) or token for kind, token in SPECIAL_TOKENS.items())
    )


def _layer(folder: Path, name: str, hidden_size: int) -> Layer | None:
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        return None
    stored = tensors_in(path)
    outputs = stored.shapes.get("weight", (0,))[0]
    stored.check("weight", (outputs, hidden_size))
    if "bias" in stored.shapes:
        stored.check("bias", (outputs,))
    return Layer("", path.name, hidden_size, outputs, "bias" in stored.shapes, "identity")


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
    special: Mapping[str, SpecialToken],
    *,
    pooling: str | None,
    splade: bool,
    most_weights: int | None,
) -> VectorHeads:
    """The heads of the model in `folder`, whose config.json and weights are in `weights`.

    `prompts` are those of `marked_prompts`, `special` the tokenizer's tokens by name.
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
            folder,
            transformer,
            modules.token_dense,
            modules.mask,
            modules.transformer_module,
            prompts,
            special,
            modules.token_pooling,
        )
    elif modules.pooling is None and is_stanford(weights / "config.json"):
        multi_vector = read_stanford(weights, hidden_size, prompts, special)
    if multi_vector is not None:
        expansion = multi_vector.query.expansion
        if expansion is not None and expansion.length > config.max_positions:
            raise BrokenModel(
                f"{transformer}: queries are expanded to {expansion.length} tokens, the model takes "
                f"{config.max_positions}"
            )
        return VectorHeads(multi_vector=multi_vector, embeds=pooling is not None)
    multi, role = _layer(folder, MULTI, hidden_size), Role(usual_prompt)
    unread = (name for name in (SPARSE, MULTI) if not (folder / f"{name}.safetensors").is_file())
    return VectorHeads(
        sparse=read_token_weights(folder, transformer, hidden_size),
        multi_vector=None if multi is None else MultiVector((multi,), skips_first=True, query=role, document=role),
        pickled=tuple(name for name in unread if (folder / f"{name}.pt").is_file()),
    )
