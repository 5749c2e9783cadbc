"""Reads the config of sentence-transformers' Transformer module: sentence_bert_config.json or another of NAMES."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import check_keys, positive_int, read_object
from embert.engine.files.key_tables import PROCESSING_KWARGS, PROCESSOR_KWARGS, SENTENCE_BERT_CONFIG
from embert.engine.files.tokenizer_config import check_tokenizer_keys

# The names that sentence-transformers tries, in its order.
NAMES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

# `transformer_task` → the output of the model, and the name that sentence-transformers gives it.
OUTPUTS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "fill-mask": ("logits", "token_embeddings"),
    "text-generation": ("logits", "causal_logits"),
}
# Versions 1 to 5 have the former name of each.
RENAMED = {"tokenizer_args": "processor_kwargs", "model_args": "model_kwargs", "config_args": "config_kwargs"}
# Keyword arguments of `from_pretrained` that change no weight and no product's definition.
MODEL_KWARGS = {
    "attn_implementation", "device_map", "dtype", "ignore_mismatched_sizes", "local_files_only", "low_cpu_mem_usage",
    "token", "torch_dtype", "trust_remote_code", "use_safetensors",
}  # fmt: skip
HUB_KWARGS = {"cache_dir", "local_files_only", "token", "trust_remote_code"}


@dataclass(frozen=True, slots=True)
class TransformerModule:
    """The file's settings; all defaults if the file does not exist."""

    path: Path | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # as the file has them
    max_length: int | None = None  # tokens, in place of the tokenizer's own limit
    call_length: int | None = None  # the same, where processing_kwargs state it
    lowercase: bool = False
    tokenizer: Mapping[str, Any] = field(default_factory=dict)  # in place of fields of tokenizer_config.json
    messages: bool = False  # pairs are put into the chat template
    structured: bool | None = None  # a message's content is a list; None: as the template looks
    template: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    notices: tuple[str, ...] = ()

    def check_task(self, *, splade: bool, only_transformer: bool, scores_logits: bool) -> None:
        """Raise UnsupportedModel for a stated `transformer_task` that gives no rows for the modules that follow.

        `splade` is whether SpladePooling follows, `scores_logits` whether LogitScore does, and `only_transformer`
        whether nothing does.
        """
        task = self.fields.get("transformer_task")
        follows = {
            "fill-mask": splade,
            "sequence-classification": only_transformer,
            "feature-extraction": not splade and not scores_logits,
            "text-generation": scores_logits,
        }
        if task is not None and not follows[task]:
            supported = "fill-mask" if splade else "text-generation" if scores_logits else "feature-extraction"
            raise UnsupportedModel(
                f"{self.path}: transformer_task {task!r} is not supported with these modules; supported: {supported!r}"
            )

    def check_no_roles(self) -> None:
        """Raise UnsupportedModel where queries and documents differ: only late interaction tells them apart."""
        for name in ("query_length", "document_length", "query_expansion"):
            if self.fields.get(name) is not None:
                raise UnsupportedModel(
                    f"{self.path}: {name} {self.fields[name]!r} is not supported for models without multi-vectors; "
                    "supported: null"
                )


def read_transformer_module(folder: Path) -> TransformerModule:
    """Read the first file of NAMES in the transformer's `folder` that holds anything.

    Raises BrokenModel for a value of a wrong type, UnsupportedModel for what the engine does not do.
    """
    for name in NAMES:
        path = folder / name
        if path.is_file() and (stored := read_object(path)):
            return _read(path, stored)
    return TransformerModule()


def _read(path: Path, stored: dict[str, Any]) -> TransformerModule:
    notices = check_keys(path, stored, SENTENCE_BERT_CONFIG)
    fields = {**stored, **{new: stored[old] for old, new in RENAMED.items() if old in stored}}
    _check_outputs(path, fields)
    model_kwargs = _object(path, fields, "model_kwargs")
    for name in model_kwargs.keys() - MODEL_KWARGS:
        raise UnsupportedModel(
            f"{path}: {_stored_name(stored, 'model_kwargs')}.{name} {model_kwargs[name]!r} is not supported; "
            f"supported: {', '.join(sorted(MODEL_KWARGS))}"
        )
    config_kwargs = _object(path, fields, "config_kwargs")
    for name in config_kwargs.keys() - HUB_KWARGS:
        raise UnsupportedModel(
            f"{path}: {_stored_name(stored, 'config_kwargs')}.{name} {config_kwargs[name]!r} is not supported; "
            "put it into config.json"
        )
    tokenizer = _object(path, fields, "processor_kwargs")
    where = path.with_name(f"{path.name}: {_stored_name(stored, 'processor_kwargs')}")
    notices += check_tokenizer_keys(where, tokenizer, PROCESSOR_KWARGS)
    length = positive_int(path, fields, "max_seq_length")
    if "model_max_length" in tokenizer:  # sentence-transformers prefers it to max_seq_length
        length = positive_int(path, tokenizer, "model_max_length")
    call_length, further = _processing(path, fields)
    return TransformerModule(
        path=path,
        fields=fields,
        max_length=length if call_length is None else call_length,
        call_length=call_length,
        lowercase=bool(fields.get("do_lower_case", False)),
        tokenizer=tokenizer,
        notices=notices + further,
        messages="message" in _object(path, fields, "modality_config"),
        structured=_is_structured(path, fields),
        template=_template(path, fields),
    )


def _is_structured(path: Path, fields: Mapping[str, Any]) -> bool | None:
    message = _object(path, _object(path, fields, "modality_config"), "message")
    kind = message.get("format", "auto")
    if kind not in ("auto", "flat", "structured"):
        raise UnsupportedModel(f"{path}: modality_config.message.format {kind!r} is not supported")
    return None if kind == "auto" else bool(kind == "structured")


def _template(path: Path, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The chat template's own variables, which `apply_chat_template` gets as keyword arguments."""
    variables = dict(_object(path, _object(path, fields, "processing_kwargs"), "chat_template"))
    for name, usual in (("restore_suffix", True), ("continue_final_message", False)):
        if variables.pop(name, usual) is not usual:
            raise UnsupportedModel(f"{path}: processing_kwargs.chat_template.{name} is supported as {usual} only")
    for name in ("padding", "truncation", "max_length", "chat_template", "tools", "documents"):
        if name in variables:
            raise UnsupportedModel(f"{path}: processing_kwargs.chat_template.{name} is not supported")
    return variables


def _check_outputs(path: Path, fields: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel unless the rows that the next module takes are the model's usual ones."""
    task = fields.get("transformer_task", "feature-extraction")
    if task not in OUTPUTS:
        raise UnsupportedModel(f"{path}: transformer_task {task!r} is not supported; supported: {', '.join(OUTPUTS)}")
    output, output_name = OUTPUTS[task]
    modalities = _object(path, fields, "modality_config")
    if not modalities:
        return
    if "message" in modalities and task not in ("text-generation", "sequence-classification"):
        raise UnsupportedModel(
            f"{path}: modality_config with message, which puts texts into a chat template, is supported for pairs "
            "only; supported: text"
        )
    text = _object(path, modalities, "text")
    for field_name, choices in (("method", ("forward",)), ("method_output_name", (output, [output]))):
        if text.get(field_name) not in choices:
            raise UnsupportedModel(
                f"{path}: modality_config.text.{field_name} {text.get(field_name)!r} is not supported; "
                f"supported: {choices[0]!r}"
            )
    if fields.get("module_output_name") != output_name:
        raise UnsupportedModel(
            f"{path}: module_output_name {fields.get('module_output_name')!r} is not supported for {output}; "
            f"supported: {output_name!r}"
        )


def _processing(path: Path, fields: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """The most tokens of a text that processing_kwargs state, and notices."""
    settings = _object(path, fields, "processing_kwargs")
    # sentence-transformers calls the tokenizer with the arguments of texts, then with the common ones.
    arguments = {**_object(path, settings, "text"), **_object(path, settings, "common")}
    where = path.with_name(f"{path.name}: processing_kwargs")
    notices = check_keys(where, arguments, PROCESSING_KWARGS)
    return positive_int(path, arguments, "max_length"), notices


def _stored_name(stored: Mapping[str, Any], name: str) -> str:
    """The file's name for a field."""
    return next((old for old, new in RENAMED.items() if new == name and old in stored), name)


def _object(path: Path, fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BrokenModel(f"{path}: {name} must be an object, found {value!r}")
    return value
