"""`embert info MODEL`: the metadata of a model, and the encoder that would run it on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import orjson

from embert.engine import Model, load_encoder, load_model
from embert.engine.errors import EngineError
from embert.engine.tokenization.tokenizer import Tokenizer
from embert.server.bulk.writer import write_errors
from embert.server.cli.arguments import encoder_options

SHOWN_CHARACTERS = 2000  # of one row: a checkpoint may have 100 000 prompts


def info(arguments: argparse.Namespace) -> None:
    """Runs the command. The metadata of the files is printed even if the model cannot run here."""
    model = load_model(arguments.model, revision=arguments.revision, pooling=arguments.pooling)
    metadata = _model_metadata(model)
    failure: EngineError | None = None
    try:
        metadata |= _encoder_metadata(model, arguments)
    except EngineError as error:
        failure = error
    with write_errors("standard output"):
        _print(metadata if failure is None or not arguments.json else metadata | {"error": str(failure)}, arguments)
    if failure is not None:
        raise failure


def _print(metadata: dict[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.json:
        sys.stdout.write(orjson.dumps(metadata, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        for name, value in metadata.items():
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
            if isinstance(text, str) and len(text) > SHOWN_CHARACTERS:
                text = f"{text[:SHOWN_CHARACTERS]}… ({len(text)} characters; --json prints all)"
            sys.stdout.write(f"{name.replace('_', ' '):20} {'-' if text in (None, '') else text}\n")
    sys.stdout.flush()


def _model_metadata(model: Model) -> dict[str, Any]:
    config, classifier = model.config, model.heads.classifier
    return {
        "model": model.model_id,
        "revision": model.revision,
        "folder": str(model.folder),
        "architecture": config.model_type,
        "layers": config.layers,
        "hidden_size": config.hidden_size,
        "heads": config.heads,
        "intermediate_size": config.intermediate_size,
        "activation": config.activation,
        "vocabulary": config.vocab_size,
        "tasks": model.task_names,
        "labels": list(classifier.labels) if classifier else None,
        "scores": classifier.activation if classifier else None,
        "pooling": model.pooling if model.embeds else None,
        "dimensions": model.width if model.embeds else None,
        "max_input_length": model.max_input_length,
        "prompts": sorted(model.prompts),
        "adapters": list(config.adapters.names) if config.adapters else None,
        "notices": list(model.notices),
    }


def _encoder_metadata(model: Model, arguments: argparse.Namespace) -> dict[str, Any]:
    """Loads the encoder. Raises EngineError if this machine cannot run the model."""
    Tokenizer(model)  # raises for one that cannot be read
    began = time.monotonic()
    encoder = load_encoder(model, **encoder_options(arguments))
    try:
        return {
            "encoder": encoder.name,
            "device": encoder.device,
            "device_name": encoder.device_name,
            "dtype": encoder.dtype,
            "choice": encoder.choice,
            "agreement": encoder.int8_accuracy,
            "max_batch_tokens": encoder.max_batch_tokens,
            "load_seconds": round(time.monotonic() - began, 2),
        }
    finally:
        encoder.close()
