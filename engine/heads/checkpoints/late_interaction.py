"""Late interaction (ColBERT): a vector a token, as sentence-transformers, PyLate and Stanford's code store it.

sentence-transformers 6   modules Transformer, Dense …, MultiVectorMask, Normalize; lengths next to the transformer
PyLate, up to version 3   modules Transformer, Dense …; everything else in config_sentence_transformers.json
Stanford's ColBERT        no modules: linear.weight among the encoder's weights, and artifact.metadata
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import architectures_of, positive_int, read_object, read_optional
from embert.engine.files.tokenizer_config import SpecialToken
from embert.engine.heads.checkpoints.stored import Vocabulary, stored_tensors
from embert.engine.heads.checkpoints.transformer_module import TransformerModule
from embert.engine.heads.description import Expansion, Layer, MultiVector, Role, TokenPooling
from embert.engine.heads.pooling import Dense

PUNCTUATION = tuple(string.punctuation)
QUERY_LENGTH = 32  # of expanded queries where files do not say
SETTINGS = ("query_length", "document_length", "query_expansion")
# Further fields by which sentence-transformers takes a model for PyLate's, whose queries are expanded.
MARKS_OF_PYLATE = (
    "do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens", "query_prefix", "document_prefix",
    "skiplist_words",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mask:
    """A MultiVectorMask module: the tokens without a vector, and whether it applies to queries and to documents."""

    words: tuple[str, ...] = PUNCTUATION
    queries: bool = False
    documents: bool = True
    only: tuple[int, ...] = ()  # of documents: ids whose tokens alone have a vector; empty: all others


def read_mask(path: Path) -> Mask:
    """Reads the `config.json` of a MultiVectorMask module. Raises BrokenModel or UnsupportedModel."""
    fields = read_object(path)
    only = fields.get("keep_only_token_ids") or []
    if not isinstance(only, list) or not all(type(token_id) is int and token_id >= 0 for token_id in only):
        raise BrokenModel(f"{path}: keep_only_token_ids must be a list of token ids, found {only!r}")
    tasks = _tasks(path, fields, "skiplist_tasks")
    return Mask(_words(path, fields, ()), "query" in tasks, "document" in tasks, tuple(only))


def read_token_pooling(path: Path) -> tuple[TokenPooling | None, TokenPooling | None]:
    """Reads the `config.json` of a HierarchicalTokenPooling module: that of queries, and of documents.

    Raises BrokenModel, and UnsupportedModel where scipy is missing.
    """
    fields = read_object(path)
    factor, protected = fields.get("pool_factor", 1.0), fields.get("num_protected_tokens", 1)
    if type(factor) not in (int, float) or not 1 <= factor < float("inf"):
        raise BrokenModel(f"{path}: pool_factor must be a number of at least 1, found {factor!r}")
    if type(protected) is not int or protected < 0:
        raise BrokenModel(f"{path}: num_protected_tokens must be an int of at least 0, found {protected!r}")
    # The library's default is true, but false for files that do not say.
    pooling = TokenPooling(float(factor), protected, bool(fields.get("normalize_embeddings", False)))
    if factor > 1 and find_spec("scipy") is None:
        raise UnsupportedModel(f"{path}: pool_factor {factor} needs scipy: pip install 'embert[token-pooling]'")
    tasks = _tasks(path, fields, "tasks")
    query, document = (pooling if role in tasks else None for role in ("query", "document"))
    return query, document


def _tasks(path: Path, fields: Mapping[str, Any], name: str) -> list[str]:
    """The roles that a module is for; by default documents. Raises UnsupportedModel."""
    tasks = fields.get(name)
    tasks = ["document"] if tasks is None else [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(tasks, list) or not all(task in ("query", "document") for task in tasks):
        raise UnsupportedModel(f"{path}: {name} {tasks!r} is not supported; supported: 'query', 'document'")
    return tasks


def read_late_interaction(
    folder: Path,
    transformer: Path,
    dense: tuple[Dense, ...],
    mask: Mask | None,
    module: TransformerModule,
    prompts: Mapping[str, str],
    special: Mapping[str, SpecialToken],
    poolings: tuple[TokenPooling | None, TokenPooling | None] = (None, None),
) -> MultiVector:
    """The head of a model with Dense modules on its tokens. Without a `mask` it is PyLate's.

    `prompts` are those of `marked_prompts`, `special` the tokenizer's tokens. Raises BrokenModel or UnsupportedModel.
    """
    vocabulary = Vocabulary(transformer)
    path = folder / "config_sentence_transformers.json"
    fields = read_optional(path)
    mask = mask or Mask(_words(path, fields, PUNCTUATION))
    # The transformer's own file takes precedence.
    settings = _settings(fields) | {name: module.fields[name] for name in SETTINGS if name in module.fields}
    layers = tuple(
        Layer("linear", f"{layer.folder}/model.safetensors", layer.inputs, layer.outputs, layer.bias, layer.activation)
        for layer in dense
    )
    roles = _roles(module.path or path, settings, prompts, vocabulary, special, length=module.call_length)
    head = _with_mask(layers, *roles, mask, vocabulary)
    query, document = (
        dataclasses.replace(role, pooling=pooling)
        for role, pooling in zip((head.query, head.document), poolings, strict=True)
    )
    mean_of_query = fields.get("similarity_fn_name") == "meanmaxsim"
    return dataclasses.replace(head, query=query, document=document, mean_of_query=mean_of_query)


def marked_prompts(
    library: Path, prompts: Mapping[str, str], *, stanford: Path | None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The prompts with PyLate's or Stanford's markers before queries and documents, and these markers.

    PyLate's are in the file `library`. `stanford` is the folder of a model of Stanford's, else None. A marker is text
    before a text here, as in sentence-transformers, and a token of it is found in texts too. Raises BrokenModel.
    """
    markers = dict[str, str]()
    if stanford is not None:
        fields = read_optional(path := stanford / "artifact.metadata")
        for role, name, usual in (("query", "query_token_id", "[unused0]"), ("document", "doc_token_id", "[unused1]")):
            markers[role] = f"{_text(path, name, fields.get(name)) or usual} "
        return {**prompts, **markers}, tuple(markers.values())
    fields = read_optional(library)
    for role in ("query", "document"):
        if (name := f"{role}_prefix") in fields:
            markers[role] = _text(library, name, fields[name])
    role_prompts = {role: marker + prompts.get(role, "").removeprefix(marker) for role, marker in markers.items()}
    return {**prompts, **role_prompts}, tuple(markers.values())


def _text(path: Path, name: str, value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise BrokenModel(f"{path}: {name} must be a text, found {value!r}")
    return value or ""


def is_stanford(config: Path) -> bool:
    return "HF_ColBERT" in architectures_of(read_object(config))


def read_stanford(
    folder: Path, hidden_size: int, prompts: Mapping[str, str], special: Mapping[str, SpecialToken]
) -> MultiVector:
    """The head of Stanford's ColBERT; arguments as above. Raises BrokenModel or UnsupportedModel."""
    path = folder / "artifact.metadata"
    fields = read_optional(path)
    stored = stored_tensors(folder)
    outputs = stored.shapes.get("linear.weight", (0,))[0]
    stored.check("linear.weight", (outputs, hidden_size))
    vocabulary = Vocabulary(folder)
    settings = {
        "query_expansion": _fixed_expansion(fields.get("query_maxlen"), fields.get("attend_to_mask_tokens")),
        "document_length": fields.get("doc_maxlen"),
    }
    mask = Mask(PUNCTUATION if fields.get("mask_punctuation", True) else ())
    layer = Layer("linear", "", hidden_size, outputs, False, "identity")
    roles = _roles(path, settings, prompts, vocabulary, special)
    for role in roles:
        if vocabulary.id(marker := role.prompt.removesuffix(" ")) is None:
            raise BrokenModel(f"{path}: the marker {marker!r} is not a token of {vocabulary.path}")
    return _with_mask((layer,), *roles, mask, vocabulary)


def _settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the transformer module in PyLate's config_sentence_transformers.json."""
    settings = {name: fields[name] for name in SETTINGS if fields.get(name) is not None}
    if "query_expansion" in fields:
        settings["query_expansion"] = fields["query_expansion"]  # null: none
    elif fields.get("do_query_expansion") is not False and fields.keys() & {*SETTINGS, *MARKS_OF_PYLATE}:
        attended = fields.get("attend_to_expansion_tokens", fields.get("attend_to_mask_tokens"))
        settings["query_expansion"] = _fixed_expansion(settings.pop("query_length", None), attended)
    return settings


def _fixed_expansion(length: object, attended: object) -> dict[str, Any]:
    """Queries are expanded to a length; `query_expansion` as sentence-transformers has it."""
    return {"strategy": "fixed", "length": length or QUERY_LENGTH, "attend": bool(attended)}


def _roles(
    path: Path,
    settings: Mapping[str, Any],
    prompts: Mapping[str, str],
    vocabulary: Vocabulary,
    special: Mapping[str, SpecialToken],
    *,
    length: int | None = None,
) -> tuple[Role, Role]:
    """Queries and documents. No other prompt goes before them, not even the default one.

    A `length` replaces those of the settings, unless queries always have the same length.
    """
    expansion, longest = _expansion(path, settings, vocabulary, special)
    if expansion is None or settings["query_expansion"]["strategy"] != "fixed":
        longest = length or longest
    return (
        Role(prompts.get("query", ""), longest, expansion),
        Role(prompts.get("document", ""), length or positive_int(path, settings, "document_length")),
    )


def _expansion(
    path: Path, fields: Mapping[str, Any], vocabulary: Vocabulary, special: Mapping[str, SpecialToken]
) -> tuple[Expansion | None, int | None]:
    """sentence-transformers' query_expansion, and the tokens of a query at most."""
    longest = positive_int(path, fields, "query_length")
    expansion = fields.get("query_expansion")
    if expansion is None:
        return None, longest
    if not isinstance(expansion, dict) or expansion.get("strategy") not in ("fixed", "min"):
        raise UnsupportedModel(f"{path}: query_expansion {expansion!r} is not supported; supported: 'fixed', 'min'")
    if unknown := sorted(expansion.keys() - {"strategy", "attend", "token", "length"}):
        raise UnsupportedModel(f"{path}: query_expansion.{unknown[0]} is not supported")
    if not isinstance(attended := expansion.get("attend", False), bool):
        raise BrokenModel(f"{path}: query_expansion's attend must be true or false, found {attended!r}")
    length = positive_int(path, expansion, "length")
    if length is None:
        raise BrokenModel(f"{path}: query_expansion has no length")
    token = expansion.get("token")
    if token is None:  # as PyLate: encoders have a mask token, decoders mostly do not
        token = next((special[name].content for name in ("mask_token", "eos_token") if name in special), None)
    token_id = None if token is None else vocabulary.id(str(token))
    if token_id is None:
        raise BrokenModel(f"{path}: query_expansion's token {token!r} is not a token of {vocabulary.path}")
    if expansion["strategy"] == "fixed":
        longest = length
    elif longest is not None:
        longest = max(longest, length)
    return Expansion(token_id, length, attended), longest


def _with_mask(
    layers: tuple[Layer, ...], query: Role, document: Role, mask: Mask, vocabulary: Vocabulary
) -> MultiVector:
    ids = vocabulary.ids(mask.words)

    query = dataclasses.replace(query, skipped=ids if mask.queries else ())
    document = dataclasses.replace(document, skipped=ids if mask.documents else (), only=mask.only)
    return MultiVector(layers, query=query, document=document)


def _words(path: Path, fields: Mapping[str, Any], usual: tuple[str, ...]) -> tuple[str, ...]:
    words = fields.get("skiplist_words")
    if words is None:
        return usual
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise BrokenModel(f"{path}: skiplist_words must be a list of texts")
    return tuple(words)
