"""Late interaction (ColBERT): a vector a token, as sentence-transformers, PyLate and Stanford's code store it.

sentence-transformers 6   modules Transformer, Dense …, MultiVectorMask, Normalize; lengths beside the transformer
PyLate, up to version 3   modules Transformer, Dense …; everything else in config_sentence_transformers.json
Stanford's ColBERT        no modules: linear.weight among the encoder's weights, and artifact.metadata
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import positive_int, read_object, read_optional
from embert.engine.heads.checkpoints.stored import Vocabulary, stored_tensors
from embert.engine.heads.checkpoints.transformer_module import TransformerModule
from embert.engine.heads.description import Expansion, Layer, MultiVector, Role
from embert.engine.heads.pooling import Dense

__all__ = ["Mask", "is_stanford", "read_late_interaction", "read_mask", "read_stanford"]

PUNCTUATION = tuple(string.punctuation)
PYLATE_LENGTHS, STANFORD_LENGTHS = (32, 180), (32, 220)  # of queries and documents where files do not say


@dataclass(frozen=True, slots=True)
class Mask:
    """A MultiVectorMask module: the tokens without a vector, and whether it applies to queries and to documents."""

    words: tuple[str, ...] = PUNCTUATION
    queries: bool = False
    documents: bool = True


def read_mask(path: Path) -> Mask:
    """From the `config.json` of a MultiVectorMask module. Raises BrokenModel or UnsupportedModel."""
    fields = read_object(path)
    if fields.get("keep_only_token_ids"):
        raise UnsupportedModel(f"{path}: keep_only_token_ids is not supported; supported: null")
    tasks = fields.get("skiplist_tasks")
    tasks = ["document"] if tasks is None else [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(tasks, list) or not set(tasks) <= {"query", "document"}:
        raise UnsupportedModel(f"{path}: skiplist_tasks {tasks!r} is not supported; supported: 'query', 'document'")
    return Mask(_words(path, fields, ()), "query" in tasks, "document" in tasks)


def read_late_interaction(
    folder: Path,
    transformer: Path,
    dense: tuple[Dense, ...],
    mask: Mask | None,
    module: TransformerModule,
    prompts: Mapping[str, str],
) -> MultiVector:
    """The head of a model with Dense modules on its tokens. Without a `mask` it is PyLate's.

    Raises BrokenModel or UnsupportedModel.
    """
    vocabulary = Vocabulary(transformer)
    path, fields = folder / "config_sentence_transformers.json", module.fields
    if mask is not None:
        path = module.path or transformer
    else:
        fields = read_optional(path)
    # As sentence-transformers: no other prompt goes before a query or a document, not even the default one.
    query_prompt, document_prompt = prompts.get("query", ""), prompts.get("document", "")
    if mask is None:
        mask = Mask(_words(path, fields, PUNCTUATION))
        query, document = _pylate_roles(path, fields, vocabulary, query_prompt, document_prompt)
    else:
        expansion, longest = _expansion(path, fields, vocabulary)
        query = Role(query_prompt, length=longest, expansion=expansion)
        document = Role(document_prompt, length=positive_int(path, fields, "document_length"))
    layers = tuple(
        Layer("linear", f"{layer.folder}/model.safetensors", layer.inputs, layer.outputs, layer.bias, layer.activation)
        for layer in dense
    )
    return _with_mask(layers, query, document, mask, vocabulary)


def is_stanford(config: Path) -> bool:
    """Whether a `config.json` is of Stanford's ColBERT."""
    stated = read_object(config).get("architectures")
    return isinstance(stated, list) and "HF_ColBERT" in stated


def read_stanford(folder: Path, hidden_size: int) -> MultiVector:
    """The head of Stanford's ColBERT. Raises BrokenModel or UnsupportedModel."""
    path = folder / "artifact.metadata"
    fields = read_optional(path)
    stored = stored_tensors(folder)
    outputs = stored.shapes.get("linear.weight", (0,))[0]
    stored.check("linear.weight", (outputs, hidden_size))
    vocabulary = Vocabulary(folder)
    roles = []
    lengths = ("query_maxlen", "doc_maxlen")
    markers = (("query_token_id", "[unused0]"), ("doc_token_id", "[unused1]"))
    for name, usual, (field, token) in zip(lengths, STANFORD_LENGTHS, markers, strict=True):
        token = fields.get(field) or token
        marker = vocabulary.id(token) if isinstance(token, str) else None
        if marker is None:
            raise BrokenModel(f"{path}: {field} {token!r} is not a token of {vocabulary.path}")
        roles.append(Role(marker=marker, length=positive_int(path, fields, name) or usual))
    query, document = roles
    expansion = Expansion(_mask_token(vocabulary), query.length or 0, bool(fields.get("attend_to_mask_tokens")))
    query = Role(marker=query.marker, length=query.length, expansion=expansion)
    mask = Mask(PUNCTUATION if fields.get("mask_punctuation", True) else ())
    layer = Layer("linear", "", hidden_size, outputs, False, "identity")
    return _with_mask((layer,), query, document, mask, vocabulary)


def _pylate_roles(path: Path, fields: Mapping[str, Any], vocabulary: Vocabulary, *prompts: str) -> tuple[Role, Role]:
    """Queries and documents, from the fields of PyLate's config_sentence_transformers.json, and their prompts."""
    lengths = [
        positive_int(path, fields, name) or usual
        for name, usual in zip(("query_length", "document_length"), PYLATE_LENGTHS, strict=True)
    ]
    expansion = None
    if fields.get("do_query_expansion") is not False:
        attended = bool(fields.get("attend_to_expansion_tokens"))
        expansion = Expansion(_mask_token(vocabulary), lengths[0] or 0, attended)
    starts = []
    prefixes = (("query_prefix", "[Q] "), ("document_prefix", "[D] "))
    for (field, usual), prompt in zip(prefixes, prompts, strict=True):
        prefix = fields.get(field)
        prefix = usual if prefix is None else prefix
        if not isinstance(prefix, str):
            raise BrokenModel(f"{path}: {field} must be a text, found {prefix!r}")
        starts.append(_marked(prefix, prompt.removeprefix(prefix), vocabulary))
    (query_prompt, query_marker), (document_prompt, document_marker) = starts
    query = Role(query_prompt, query_marker, lengths[0], expansion)
    return query, Role(document_prompt, document_marker, lengths[1])


def _marked(prefix: str, prompt: str, vocabulary: Vocabulary) -> tuple[str, int | None]:
    """What goes before a text, and the marker: a prefix that the vocabulary has, or whose first word it has."""
    if not prefix.strip():
        return prefix + prompt, None
    if (marker := vocabulary.id(prefix)) is not None:
        return prompt, marker
    first, *rest = prefix.split(None, 1)
    if (marker := vocabulary.id(first)) is not None:
        return "".join(rest) + prompt, marker
    return prefix + prompt, None


def _expansion(path: Path, fields: Mapping[str, Any], vocabulary: Vocabulary) -> tuple[Expansion | None, int | None]:
    """sentence-transformers' query_expansion, and the tokens of a query at most."""
    longest = positive_int(path, fields, "query_length")
    stated = fields.get("query_expansion")
    if stated is None:
        return None, longest
    if not isinstance(stated, dict) or stated.get("strategy") not in ("fixed", "min"):
        raise UnsupportedModel(f"{path}: query_expansion {stated!r} is not supported; supported: 'fixed', 'min'")
    length = positive_int(path, stated, "length")
    if length is None:
        raise BrokenModel(f"{path}: query_expansion has no length")
    token = stated.get("token")
    marker = _mask_token(vocabulary) if token is None else vocabulary.id(str(token))
    if marker is None:
        raise BrokenModel(f"{path}: query_expansion's token {token!r} is not a token of {vocabulary.path}")
    if stated["strategy"] == "fixed":
        longest = length
    elif longest is not None:
        longest = max(longest, length)
    return Expansion(marker, length, bool(stated.get("attend"))), longest


def _with_mask(
    layers: tuple[Layer, ...], query: Role, document: Role, mask: Mask, vocabulary: Vocabulary
) -> MultiVector:
    skipped = vocabulary.ids(mask.words)

    def masked(role: Role, skips: bool) -> Role:
        return Role(role.prompt, role.marker, role.length, role.expansion, skipped if skips else ())

    return MultiVector(layers, query=masked(query, mask.queries), document=masked(document, mask.documents))


def _mask_token(vocabulary: Vocabulary) -> int:
    token = vocabulary.special("mask_token")
    mask_id = None if token is None else vocabulary.id(token)
    mask_id = next(iter(vocabulary.ids(("[MASK]", "<mask>"))), None) if mask_id is None else mask_id
    if mask_id is None:
        raise BrokenModel(f"{vocabulary.path} has no mask token, which queries are expanded with")
    return mask_id


def _words(path: Path, fields: Mapping[str, Any], usual: tuple[str, ...]) -> tuple[str, ...]:
    words = fields.get("skiplist_words")
    if words is None:
        return usual
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise BrokenModel(f"{path}: skiplist_words must be a list of texts")
    return tuple(words)
