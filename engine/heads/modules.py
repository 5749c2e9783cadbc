"""Reads `modules.json` of sentence-transformers, and the files it names: the modules that follow the transformer.

Versions 1 to 5 and version 6 write different files; both kinds are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import check_keys, inside, read_json, read_object, read_optional
from embert.engine.files.key_tables import MODULE_CONFIGS, MODULES
from embert.engine.heads.checkpoints.late_interaction import Mask, read_mask, read_token_pooling
from embert.engine.heads.checkpoints.transformer_module import TransformerModule, read_transformer_module
from embert.engine.heads.description import TokenPooling
from embert.engine.heads.pooling import (
    Dense,
    Module,
    Normalize,
    PoolingModule,
    Quantize,
    check_normalize,
    read_dense,
    read_layer_norm,
    read_pooling,
)

# A module → those that it may follow; "" is the beginning. "token Dense" and "token Normalize" take every token's row.
AFTER_POOLING = ("Dense", "LayerNorm", "Normalize", "Dropout")
FOLLOWS = {
    "Transformer": ("",),
    "StaticEmbedding": ("",),
    "Pooling": ("Transformer",),
    **dict.fromkeys(AFTER_POOLING, ("Pooling", "StaticEmbedding", *AFTER_POOLING)),
    "Quantize": ("Pooling", *AFTER_POOLING),
    "SpladePooling": ("Transformer",),
    "LogitScore": ("Transformer",),
    "token Dense": ("Transformer", "token Dense"),
    "MultiVectorMask": ("token Dense", "token Normalize"),
    "token Normalize": ("token Dense", "MultiVectorMask"),
    "HierarchicalTokenPooling": ("token Normalize", "MultiVectorMask"),
}
SUPPORTED = (
    "Transformer, Pooling, then Dense, LayerNorm, Normalize and Dropout in any order; StaticEmbedding, then the same; "
    "Transformer, SpladePooling; "
    "Transformer, Dense on tokens, then MultiVectorMask, Normalize and HierarchicalTokenPooling; "
    "Transformer, LogitScore"
)
JINA_TRANSFORMER = "custom_st.Transformer"  # jina-embeddings' own class: a Transformer with adapters
# Keys of the module's config.json in jina v3, and in v5, whose class also pools the last token and normalizes it.
JINA_KEYS = {"lora_adaptations", "task_names"}
PPLX_QUANTIZER = "st_quantize.FlexibleQuantizer"  # pplx-embed's own class, whose default is int8
PYLATE_DENSE = "pylate.models.Dense.Dense"
# SpladePooling's activations → whether the logarithm is taken twice.
SPLADE_ACTIVATIONS = {"relu": False, "log1p_relu": True}


class LogitScore(NamedTuple):
    """A pair's score is a language model's logit of one token, or what it exceeds that of another by."""

    true_id: int
    false_id: int | None


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules of modules.json, with the settings in the files that it names."""

    transformer: str = ""  # folder of the transformer, or of the table, inside the model's folder
    static: bool = False  # a table of static embeddings takes the place of transformer and pooling
    transformer_module: TransformerModule = field(default_factory=TransformerModule)
    pooling: str | None = None
    only_transformer: bool = True  # nothing follows the transformer
    include_prompt: bool = True  # a prompt's tokens are pooled
    after_pooling: tuple[Module, ...] = ()  # without what ends the model and changes no direction
    normalize: bool = False  # the model ends in Normalize
    splade: bool | None = None  # a SpladePooling module; true: it takes the logarithm twice
    token_dense: tuple[Dense, ...] = ()  # on every token: late interaction
    mask: Mask | None = None  # of late interaction; None: the model is PyLate's
    token_pooling: tuple[TokenPooling | None, TokenPooling | None] = (None, None)  # of queries, and of documents
    logit_score: LogitScore | None = None
    notices: tuple[str, ...] = ()


def read_modules(folder: Path, *, pooling: str | None = None) -> Modules | None:
    """Read a model's modules.json and what it names; None if there is none. `pooling` replaces the model's own.

    Raises UnsupportedModel for modules in another order than FOLLOWS says, and BrokenModel for files that cannot be
    read.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    modules = read_json(path)
    if (
        not isinstance(modules, list)
        or not modules
        or not all(
            isinstance(module, dict) and isinstance(module.get("type"), str) and isinstance(module.get("path"), str)
            for module in modules
        )
    ):
        raise BrokenModel(f"{path} must list objects with a type and a path, and at least one of them")
    for module in modules:
        inside(path, module["path"])

    kinds: list[str] = []
    transformer, splade, mask, logit_score = "", None, None, None
    own = PoolingModule("", include_prompt=True)
    after_pooling: list[Module] = []
    token_dense: list[Dense] = []
    token_pooling: tuple[TokenPooling | None, TokenPooling | None] = (None, None)
    for module in modules:
        previous = kinds[-1] if kinds else ""
        kind = _kind(folder, module, previous)
        if previous not in FOLLOWS.get(kind, ()) or (kind in kinds and kind not in (*AFTER_POOLING, "token Dense")):
            raise UnsupportedModel(
                f"{path}: module {module['type']} {f'after {previous} ' if previous else 'first '}is not supported; "
                f"supported: {SUPPORTED}"
            )
        kinds.append(kind)
        if kind in ("Transformer", "StaticEmbedding"):
            transformer = module["path"]
            if module["type"] == JINA_TRANSFORMER and "task_names" in read_object(folder / transformer / "config.json"):
                own, after_pooling = PoolingModule("last-token", include_prompt=True), [Normalize()]
        elif kind == "Pooling":
            own = read_pooling(folder / module["path"] / "config.json", replaced=pooling is not None)
        elif kind == "Dense":
            after_pooling.append(read_dense(folder, module["path"]))
        elif kind == "LayerNorm":
            after_pooling.append(read_layer_norm(folder, module["path"]))
        elif kind == "Normalize":
            check_normalize(folder, module["path"])
            after_pooling.append(Normalize())
        elif kind == "Quantize":
            after_pooling.append(Quantize())
        elif kind == "token Dense":
            token_dense.append(read_dense(folder, module["path"], input_name="token_embeddings"))
        elif kind == "SpladePooling":
            splade = _splade_pooling(folder / module["path"] / "config.json")
        elif kind == "LogitScore":
            logit_score = _logit_score(folder / module["path"] / "config.json")
        elif kind == "MultiVectorMask":
            mask = read_mask(folder / module["path"] / "config.json")
        elif kind == "HierarchicalTokenPooling":
            token_pooling = read_token_pooling(folder / module["path"] / "config.json")
    if token_dense and not _is_pylate(folder, modules):
        for kind in ("MultiVectorMask", "token Normalize"):
            if kind not in kinds:
                raise UnsupportedModel(
                    f"{path}: Dense on tokens without {kind.rpartition(' ')[2]} is not supported; "
                    f"supported: {SUPPORTED}"
                )
    normalize = bool(after_pooling) and isinstance(after_pooling[-1], Normalize)
    while after_pooling and isinstance(after_pooling[-1], Normalize):
        after_pooling.pop()
    static = kinds[0] == "StaticEmbedding"
    transformer_module = TransformerModule() if static else read_transformer_module(folder / transformer)
    transformer_module.check_task(
        splade=splade is not None, only_transformer=len(kinds) == 1, scores_logits=logit_score is not None
    )
    return Modules(
        transformer=transformer,
        static=static,
        transformer_module=transformer_module,
        pooling=pooling or own.pooling or None,
        include_prompt=own.include_prompt,
        only_transformer=len(kinds) == 1,
        after_pooling=tuple(after_pooling),
        normalize=normalize,
        splade=splade,
        token_dense=tuple(token_dense),
        mask=mask,
        token_pooling=token_pooling,
        logit_score=logit_score,
        notices=(*_check_keys(folder, modules), *transformer_module.notices),
    )


def _kind(folder: Path, module: dict[str, Any], previous: str) -> str:
    """The key of FOLLOWS for a module; anything else for one that is not known."""
    if module["type"] == PYLATE_DENSE:
        return "token Dense"
    if module["type"] == PPLX_QUANTIZER:
        return "Quantize"
    if module["type"] == JINA_TRANSFORMER:
        # Other authors call their code by the same name, and it is never run.
        path = folder / module["path"] / "config.json"
        return "Transformer" if path.is_file() and not JINA_KEYS.isdisjoint(read_object(path)) else ""
    if not module["type"].startswith("sentence_transformers."):
        return ""
    # sentence_transformers.models.Pooling up to version 5, sentence_transformers.….pooling.Pooling since.
    kind = str(module["type"].rpartition(".")[2])
    if kind == "MLMTransformer":
        return "Transformer"
    if kind == "Dense" and previous in FOLLOWS["token Dense"]:
        return "token Dense"
    if kind == "Normalize":
        path = folder / module["path"] / "config.json"
        input_name = read_object(path).get("module_input_name") if module["path"] and path.is_file() else None
        return "token Normalize" if input_name == "token_embeddings" else kind
    return kind


def _logit_score(path: Path) -> LogitScore:
    """The `config.json` of a LogitScore module. Raises BrokenModel or UnsupportedModel."""
    fields = read_object(path)
    if fields.get("module_input_name", "causal_logits") != "causal_logits":
        raise UnsupportedModel(f"{path}: module_input_name is supported as 'causal_logits' only")
    ids = [fields.get(name) for name in ("true_token_id", "false_token_id")]
    for name, token_id in zip(("true_token_id", "false_token_id"), ids, strict=True):
        if isinstance(token_id, bool) or not isinstance(token_id, int | None) or (token_id or 0) < 0:
            raise BrokenModel(f"{path}: {name} must be a token id, found {token_id!r}")
    if ids[0] is None:
        raise BrokenModel(f"{path} has no true_token_id")
    return LogitScore(ids[0], ids[1])


def _splade_pooling(path: Path) -> bool:
    """True if the logarithm is taken twice, from the `config.json` of a SpladePooling module.

    Raises BrokenModel or UnsupportedModel.
    """
    fields = read_object(path)
    strategy = fields.get("pooling_strategy", "max")
    if strategy != "max":
        raise UnsupportedModel(f"{path}: pooling_strategy {strategy!r} is not supported; supported: 'max'")
    activation = fields.get("activation_function", "relu")
    if activation not in SPLADE_ACTIVATIONS:
        named = ", ".join(map(repr, SPLADE_ACTIVATIONS))
        raise UnsupportedModel(f"{path}: activation_function {activation!r} is not supported; supported: {named}")
    return SPLADE_ACTIVATIONS[activation]


def _is_pylate(folder: Path, modules: list[dict[str, Any]]) -> bool:
    """True if masking and normalizing are left to PyLate's code."""
    is_colbert = read_optional(folder / "config_sentence_transformers.json").get("model_type") == "ColBERT"
    return is_colbert or any(module["type"] == PYLATE_DENSE for module in modules)


def _check_keys(folder: Path, modules: list[dict[str, Any]]) -> list[str]:
    """Check modules.json and each module's config.json against the tables of keys. Returns sentences for the log."""
    notices: dict[str, None] = {}  # in order, each once
    for module in modules:
        notices |= dict.fromkeys(check_keys(folder / "modules.json", module, MODULES))
        path, table = folder / module["path"] / "config.json", MODULE_CONFIGS.get(module["type"].rpartition(".")[2])
        if table is not None and module["path"] and path.is_file():
            notices |= dict.fromkeys(check_keys(path, read_object(path), table))
    return [*notices]
